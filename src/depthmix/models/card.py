"""A model card: the README.md beside a saved model, which says in words what its configuration says in fields."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthmix.mechanisms import DepthStack, KVMixer
from depthmix.mechanisms.blend import Blend
from depthmix.mechanisms.registry import name_of
from depthmix.models.counting import count_parameters
from depthmix.models.decoder import Decoder
from depthmix.support.files import read_text, version, write_text

CARD = "README.md"
MARK = "<!-- written by depthmix: delete this line, and the file is never written again -->"
Facts = Mapping[str, object]


def write_card(folder: Path, text: str) -> None:
    """Write the card, unless the folder has a README.md of somebody else's."""
    path = folder / CARD
    if not path.is_file() or MARK in read_text(path, "Remove it"):
        write_text(path, text)


def model_card(
    title: str, library: str, stack: DepthStack, values: KVMixer | None, sizes: Facts, training: Facts, usage: str
) -> str:
    """The text of a card.

    Args:
        title: what the model is.
        library: the package that loads it, depthmix or transformers.
        stack: the mixers.
        values: a value mixer, for what all of them share; None: there are none.
        sizes: width, layers, parameters …, by their names.
        training: seeds, tokens, data …; empty if they are not known.
        usage: code that loads it.
    """
    names = [stack.name] + ([] if values is None else [name_of(type(values))])
    parts = [
        "\n".join(["---", f"library_name: {library}", "tags:", *(f"- {n}" for n in ("depthmix", *names)), "---", MARK]),
        f"# {title}",
        "## Depth mixing",
        table({**mixing(stack), **({} if values is None else mixing_of_values(values))}),
        "Blocks and depth are counted in sublayers: attention and MLP are one each, or one together where they run in "
        "parallel.",
        "## Size",
        table(sizes),
        "## Training",
        table(training) if training else "These files do not say how the model was trained.",
        "## Use",
        f"```python\n{usage}\n```",
        f"Written by depthmix {version()}.",
    ]
    return "\n\n".join(parts) + "\n"


def decoder_card(model: Decoder, folder: Path, training: Facts) -> str:
    """The card of a decoder that `save_model` writes into `folder`."""
    config, counts = model.config, count_parameters(model.config)
    sizes = {
        "width": config.dim,
        "layers": config.layers,
        "vocabulary": config.vocab_size,
        "parameters": counts.total,
        "of which a token uses": counts.active if counts.active != counts.total else None,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
    values = [*model.kv_mixers]
    names = " and ".join([model.depth.name, *(name_of(type(mixer)) for mixer in values[-1:])])
    usage = f'import depthmix as dm\n\nmodel = dm.load_model("{folder.name}")'
    mixer: Any = values[-1] if values else None
    return model_card(f"A decoder with {names}", "depthmix", model.depth, mixer, sizes, training, usage)


def mixing(stack: DepthStack) -> dict[str, object]:
    """The mechanism in words: its name, its units, and every option."""
    described = {
        "mechanism": stack.name,
        "paper": getattr(type(next(iter(stack))), "paper", None),
        "sublayers": stack.depth,
        "layout": stack.facts.note,
        "start": f"PreNorm is preserved: {stack.facts.preserves_prenorm}",
        "parameters of the mixers": sum(p.numel() for p in stack.parameters()),
    }
    return {**described, "options": options_text(stack.config.resolved(dim=stack.dim, depth=stack.depth))}


def mixing_of_values(mixer: KVMixer) -> dict[str, object]:
    config: Any = mixer.config
    options = config.resolved(dim=mixer.site.dim, depth=mixer.site.depth)
    blend = "g times the change, with one learned g per layer that is 0 at first" if isinstance(mixer, Blend) else None
    return {"mechanism of values": name_of(type(mixer)), "its options": options_text(options), "its effect": blend}


def options_text(options: Facts) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in options.items())


def table(rows: Facts) -> str:
    """Two columns; what is empty or None is left out."""
    given = {name: value for name, value in rows.items() if value not in (None, "")}
    shown = {name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in given.items()}
    lines = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in shown.items()]
    return "\n".join(["| | |", "|---|---|", *lines])
