"""Set fields of a configuration by their dotted keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from depthmix.mechanisms import kv_mechanism, mechanism
from depthmix.support.checks import did_you_mean, parse_value
from depthmix.training.config import TrainConfig
from depthmix.training.identity import leaves

MECHANISMS = (["model", "mixer"], ["model", "kv_mixer"])
CHILDREN = ("model.moe", "model.loop", "model.kda", "model.mla")  # their fields are valid only together
KINDS = ("model.attention", "model.kda", "model.mla")  # and these with each other
OPEN = (*MECHANISMS, *(child.split(".") for child in CHILDREN))  # children that accept fields which are not set yet


def override(config: TrainConfig, key: str, value: Any) -> TrainConfig:
    """A copy with one field set by its dotted key: "optimizer.lr", "model.mixer", "mixer.block_sublayers".

    A string is parsed as a number, true or false, none, or a list if possible, unless the field is a string. Setting
    `model.mixer` to a name drops the options of the previous mechanism; setting `mixer.num_blocks` drops
    `mixer.block_sublayers`, and likewise for other options that exclude each other.
    """
    path = ["model", *key.split(".")] if key.split(".")[0] in ("mixer", "kv_mixer") else key.split(".")
    fields, name = config.to_dict(), path[-1]
    section = find_section(fields, path, key)
    if path[:2] in MECHANISMS and len(path) == 3:
        drop_excluded(section, path[1], name, parse_value(value))
    problem: Exception | None = None
    for candidate in (parse_like(section.get(name), value), value):  # the string itself, if it only looks like a number
        section[name] = candidate
        try:
            return TrainConfig.from_dict(fields)
        except (TypeError, ValueError) as error:
            problem = problem or error
    raise ValueError(f"{key}={value!r}: {problem}")


def override_all(
    config: TrainConfig,
    pairs: Iterable[tuple[str, Any]],
    applies: Callable[[TrainConfig, str], bool] = lambda config, key: True,
) -> TrainConfig:
    """`override` for several keys, in order; a key that does not apply is skipped.

    Fields of a loop, of a mixture of experts or of the attention are set together, when the last of them comes.
    """
    waiting = [(key, value, group_of(key)) for key, value in pairs]
    together: dict[str, dict[str, Any]] = {}
    while waiting:
        key, value, group = waiting.pop(0)
        if group is not None:
            together.setdefault(group, {})[key] = value
            if all(group != later for _, _, later in waiting):
                config = set_together(config, together.pop(group))
        elif applies(config, key):
            config = override(config, key, value)
    return config


def group_of(key: str) -> str | None:
    """The first of the fields that are set together with this one; None: it is set alone."""
    child = ".".join(key.split(".")[:2])
    if child in KINDS:
        return KINDS[0]
    return child if child in CHILDREN and key != child else None


def set_together(config: TrainConfig, given: dict[str, Any]) -> TrainConfig:
    """A copy with these fields of `model`; other fields keep their values."""
    fields = config.to_dict()
    for key, value in given.items():
        _, child, *inside = key.split(".")
        if not inside:
            fields["model"][child] = parse_kinds(value) if key == KINDS[0] else parse_value(value)
            continue
        section = dict(fields["model"][child] or {})
        name = ".".join(inside)
        fields["model"][child] = {**section, name: parse_like(section.get(name), value)}
    try:
        return TrainConfig.from_dict(fields)
    except (TypeError, ValueError) as error:
        listed = ", ".join(f"{key}={value}" for key, value in given.items())
        raise ValueError(f"{listed}: {error}") from error


def parse_kinds(value: Any) -> Any:
    """Names that are separated by commas are a list: kda,kda,kda,mla."""
    parsed = parse_value(value)
    return [name.strip() for name in parsed.split(",")] if isinstance(parsed, str) and "," in parsed else parsed


def find_section(fields: dict[str, Any], path: list[str], key: str) -> dict[str, Any]:
    """The mapping inside `fields` that holds the last name of `path`; children that are None become empty mappings."""
    keys = [dotted for dotted, _ in leaves(fields)]
    section: Any = fields
    for i, name in enumerate(path[:-1]):
        if not isinstance(section, dict) or name not in section:
            parent = ".".join(path[:i]) or "a configuration"
            raise ValueError(f"unknown key {key!r}; {parent} has no {name!r}. {list_names(section)}")
        if section[name] is None:
            section[name] = {}
        section = section[name]
    if not isinstance(section, dict) or (path[:2] not in OPEN and path[-1] not in section):
        hint = did_you_mean(path[-1], keys) or did_you_mean(".".join(path), keys)
        raise ValueError(f"unknown key {key!r}. {hint}{list_names(section)}")
    return section


def list_names(section: Any) -> str:
    return f"Known: {', '.join(section)}" if isinstance(section, dict) else "It has no fields"


def parse_like(old: Any, value: Any) -> Any:
    """Parse a value; 1e4 becomes a whole number if the old value is one."""
    new = parse_value(value)
    if isinstance(old, int) and not isinstance(old, bool) and isinstance(new, float) and new.is_integer():
        return int(new)
    return new


def drop_excluded(options: dict[str, Any], child: str, key: str, value: Any) -> None:
    """Remove the options that exclude the one about to be set."""
    excluded: list[str] = []
    if key == "name" and value != options.get("name"):
        excluded = [other for other in options if other != "name"]
    elif "name" in options and value is not None:
        groups = exclusive_groups(child, options["name"])
        excluded = [other for group in groups if key in group for other in group if other != key]
    for other in excluded:
        options.pop(other, None)


def exclusive_groups(child: str, name: str) -> tuple[tuple[str, ...], ...]:
    """Options of a mechanism of which only one can be given."""
    return (mechanism if child == "mixer" else kv_mechanism)(name).Config.either


def check_excluding(config: TrainConfig, keys: Iterable[str]) -> None:
    """Raise an error if `keys` set more than one of several options that exclude each other."""
    given = {key.removeprefix("model.") for key in keys}
    for child in ("mixer", "kv_mixer"):
        choice = getattr(config.model, child)
        for group in exclusive_groups(child, choice.name) if choice is not None else ():
            both = [f"{child}.{name}" for name in group if f"{child}.{name}" in given]
            if len(both) > 1:
                raise ValueError(f"{' and '.join(both)} are both set; expected one of them: they exclude each other")
