"""The arms of a study: mechanisms × sizes × a grid over options, each as a whole configuration."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from depthmix.mechanisms import kv_mechanism, mechanism
from depthmix.models import DecoderConfig
from depthmix.models.backbones import QWEN3
from depthmix.support.checks import split_pair
from depthmix.training import TrainConfig, flops_per_token, override, retrofit_config
from depthmix.training.continued import retrofit_rate
from depthmix.training.diagnostics import least_interval
from depthmix.training.dial import learning_rate
from depthmix.training.overrides import check_excluding, override_all
from depthmix.training.retrofit import count_parameters

TIMES_PER_RUN = {"validate_every": 25, "depth_every": 10, "checkpoint_every": 10}  # defaults
FEWEST_VALIDATIONS = 4  # of a run, however short: fewer make no curve
FILES_KEPT = {"keep": 1, "snapshot_every": 0}
Budget = Callable[
    [TrainConfig, float], float
]  # tokens of a size, from its baseline's configuration and the tokens requested for it


@dataclass(frozen=True, kw_only=True)
class Size:
    depth: int  # sublayers
    dim: int | None = None  # None: as the dial derives it

    @classmethod
    def of(cls, text: str) -> Size:
        """Parse "24x128", or "24", whose width the dial derives."""
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip())
        if match is None:
            raise ValueError(f"size {text!r}; expected DEPTHxDIM such as 24x128, or DEPTH alone")
        return cls(depth=int(match[1]), dim=None if match[2] is None else int(match[2]))

    def __str__(self) -> str:
        return str(self.depth) if self.dim is None else f"{self.depth}x{self.dim}"


@dataclass(frozen=True, kw_only=True)
class Arm:
    label: str
    baseline: str | None  # the arm that it is compared with
    mixer: str  # its label without the size
    size: Size
    config: TrainConfig  # with seed 0; the folder is set later


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What a study varies, and what it fixes."""

    mixers: Sequence[str]  # the first is the baseline; a repeated name is a control, "residual again"
    sizes: Sequence[Size]
    sweeps: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)  # values by dotted key
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)  # for all arms
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)  # learning rates of single mechanisms
    data: str = "stdlib"
    tokenizer: str | None = "bytes"  # None: that of the model of transformers
    backbone: str = QWEN3
    from_hf: str | None = None  # folder of the model of transformers that all arms start from; sizes are its own

    @classmethod
    def parse(
        cls,
        mixers: Sequence[str],
        sizes: Sequence[Size],
        *,
        sweep: Sequence[str] = (),
        settings: Sequence[str] = (),
        rates: Sequence[str] = (),
        data: str = "stdlib",
        tokenizer: str | None = "bytes",
        backbone: str = QWEN3,
        from_hf: str | None = None,
    ) -> Grid:
        """Parse mixer.block_sublayers=2,4 (`sweep`), run.steps=9 (`settings`), residual=1e-3 (`rates`) and the like."""
        sweeps: dict[str, Sequence[str]] = {}
        for key, values in map(parse_sweep, sweep):
            if key in sweeps:
                raise ValueError(f"{key} is varied twice; expected all its values in one --sweep")
            sweeps[key] = values
        pairs = dict(split_pair(text, "optimizer.weight_decay=0.1") for text in settings)
        by_mixer: dict[str, float] = {}
        for mixer, rate in map(parse_rate, rates):
            if mixer in by_mixer:
                raise ValueError(
                    f"{mixer} has two rates, {by_mixer[mixer]:g} and {rate:g}; expected one --lr-of for each"
                )
            by_mixer[mixer] = rate
        return cls(
            mixers=mixers,
            sizes=sizes,
            sweeps=sweeps,
            settings=pairs,
            rates=by_mixer,
            data=data,
            tokenizer=tokenizer,
            backbone=backbone,
            from_hf=from_hf,
        )


def make_arms(grid: Grid, budget: Budget | None = None, *, across_sizes: bool = True) -> list[Arm]:
    """All arms of a grid. A key that only some mechanisms have (mixer.block_sublayers) varies only these.

    Args:
        grid: what the study varies and what it fixes.
        budget: tokens of a size; None: those of run.steps, or the dial's 20 per parameter.
        across_sizes: compare the baseline of each further size with that of the first size.
    """
    check_keys(grid)
    arms: list[Arm] = []
    for size in grid.sizes:
        first: Arm | None = None
        tokens = 0.0
        for name, config in variants(grid, size):
            if first is None:
                requested = requested_tokens(grid, config)
                tokens = requested if budget is None else budget(config, requested)
            label = unused_label(f"{name} {size}" if len(grid.sizes) > 1 else name, {arm.label for arm in arms})
            baseline = first or (arms[0] if arms and across_sizes else None)
            arm = Arm(
                label=label,
                baseline=baseline.label if baseline else None,
                mixer=label.replace(f" {size}", "", 1),
                size=size,
                config=with_tokens(config, tokens, grid.settings),
            )
            first = first or arm
            arms.append(arm)
    return arms


def unused_label(name: str, used: Collection[str]) -> str:
    """The name itself, else "NAME again", "NAME again 2" and so on."""
    label, repeats = name, 0
    while label in used:
        repeats += 1
        label = f"{name} again" if repeats == 1 else f"{name} again {repeats}"
    return label


def equal_compute(tokens: float | None) -> Budget:
    """`tokens` for the first size (None: those requested); for the others, as many as take the same FLOPs."""
    spent: list[float] = []

    def budget(config: TrainConfig, requested: float) -> float:
        each = flops_per_token(config.model, config.data.tokens_per_row)
        if not spent:
            spent.append(each * (requested if tokens is None else tokens))
        return spent[0] / each

    return budget


def per_parameter(tokens: float) -> Budget:
    """`tokens` per active parameter, without embeddings."""
    return lambda config, requested: tokens * count_parameters(config.model).active_without_embeddings


def requested_tokens(grid: Grid, config: TrainConfig) -> float:
    has_length = "run.steps" in grid.settings or grid.from_hf is not None
    return config.run.steps * config.tokens_per_step if has_length else per_parameter(20)(config, 0)


def first_config(grid: Grid, mixer: str, size: Size) -> TrainConfig:
    """An arm's configuration before anything is set; the number of steps of a decoder is set later."""
    if grid.from_hf is not None:
        return retrofit_config(grid.from_hf, mixer, tokenizer=grid.tokenizer)
    model: dict[str, Any] = {"backbone": grid.backbone, **({} if size.dim is None else {"dim": size.dim})}
    return TrainConfig.from_dial(size.depth, mixer, tokenizer=grid.tokenizer or "bytes", tokens=1, **model)


def derived_rate(config: TrainConfig) -> float:
    """The default learning rate, which depends on the optimiser."""
    model = config.model
    if isinstance(model, DecoderConfig):
        return learning_rate(model.dim, config.optimizer.name)
    return retrofit_rate(model)


def variants(grid: Grid, size: Size) -> Iterator[tuple[str, TrainConfig]]:
    """Name and configuration of every mechanism, with every combination of the swept options that it has."""
    for mixer in grid.mixers:
        config = first_config(grid, mixer, size)
        config = override(config, "data.source", grid.data)
        config = override_all(config, grid.settings.items(), applies)
        rate = grid.rates.get(mixer)
        config = with_changes(config, rate)
        derived = rate is None and "optimizer.lr" not in (*grid.settings, *grid.sweeps)
        keys = [key for key in grid.sweeps if applies(config, key)]
        for values in itertools.product(*(grid.sweeps[key] for key in keys)):
            varied = override_all(config, zip(keys, values, strict=True))
            if derived:
                varied = with_changes(varied, derived_rate(varied))
            words = [f"{key.rsplit('.', 1)[-1]}={value}" for key, value in zip(keys, values, strict=True)]
            yield " ".join([mixer, *words]), varied


def applies(config: TrainConfig, key: str) -> bool:
    """Whether the mechanism of `config` has the option `key`; keys that are not options of mechanisms always apply."""
    path = key.removeprefix("model.").split(".")
    if path[0] not in ("mixer", "kv_mixer") or len(path) == 1:
        return True
    choice = config.model.mixer if path[0] == "mixer" else config.model.kv_mixer
    if choice is None:
        return False
    cls = mechanism(choice.name) if path[0] == "mixer" else kv_mechanism(choice.name)
    return path[1] in {field.name for field in dataclasses.fields(cls.Config)}


def check_keys(grid: Grid) -> None:
    if not grid.mixers or not grid.sizes:
        raise ValueError("a study needs at least one mechanism and one size")
    if len(set(grid.sizes)) < len(grid.sizes):
        raise ValueError(f"sizes {', '.join(map(str, grid.sizes))}; expected each size once")
    bases = [first_config(grid, mixer, Size(depth=2)) for mixer in grid.mixers]
    for config in bases:
        check_excluding(config, (*grid.sweeps, *grid.settings))
    for key in (*grid.sweeps, *grid.settings):
        if not any(applies(config, key) for config in bases):
            raise ValueError(f"{key}: none of {', '.join(grid.mixers)} has this option")
        if key in ("run.seed", "run.folder"):
            raise ValueError(f"{key} is set by the study; use --seeds and --folder")
        if key in grid.sweeps and key.removeprefix("run.") in (*TIMES_PER_RUN, *FILES_KEPT, "steps"):
            raise ValueError(f"{key} cannot be varied between arms; expected it in --set, the same for all")
        if key in grid.sweeps and key in grid.settings:
            raise ValueError(f"{key} is both varied and set; expected one of them")
    for mixer in grid.rates:
        if mixer not in grid.mixers:
            raise ValueError(
                f"a learning rate is given for {mixer!r}; expected one of the arms: {', '.join(grid.mixers)}"
            )
        if "optimizer.lr" in (*grid.sweeps, *grid.settings):
            raise ValueError(
                f"a learning rate is given for {mixer}, and optimizer.lr for all arms; expected only one of them"
            )


def with_tokens(config: TrainConfig, tokens: float, settings: Mapping[str, str]) -> TrainConfig:
    """Set the steps that `tokens` take, and the intervals of measurements unless `settings` have them."""
    if not 0 < tokens < math.inf:
        raise ValueError(f"{tokens:g} tokens for a run; expected a number above 0")
    steps = max(1, round(tokens / config.tokens_per_step))
    times = {**TIMES_PER_RUN, "validate_every": count_validations(config, steps)}
    every = {name: max(1, steps // count) for name, count in times.items()} | FILES_KEPT
    every["depth_every"] = max(every["depth_every"], least_interval(config.tokens_per_step))
    return with_changes(config, steps=steps, **{k: v for k, v in every.items() if f"run.{k}" not in settings})


def count_validations(config: TrainConfig, steps: int) -> int:
    """How often a run is validated: at most about a quarter of its time goes into it.

    A forward pass takes about a third of a step's time, so validation may read as many tokens as training.
    """
    tokens = config.run.validate_batches * config.data.rows * config.data.tokens_per_row
    affordable = steps * config.tokens_per_step // tokens
    return min(TIMES_PER_RUN["validate_every"], max(FEWEST_VALIDATIONS, affordable))


def with_changes(config: TrainConfig, lr: float | None = None, **run: Any) -> TrainConfig:
    """A copy with another learning rate or other fields of `run`."""
    optimizer = config.optimizer if lr is None else dataclasses.replace(config.optimizer, lr=lr)
    return dataclasses.replace(config, optimizer=optimizer, run=dataclasses.replace(config.run, **run))


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """Parse "mixer.block_sublayers=1,2,4,8"."""
    example = "mixer.block_sublayers=1,2,4,8"
    key, listed = split_pair(text, example)
    values = [value.strip() for value in listed.split(",")]
    if not all(values):
        raise ValueError(f"{text!r}; expected KEY=VALUE,VALUE such as {example}")
    if len(set(values)) < len(values):
        raise ValueError(f"{text!r} has a value twice; expected each once")
    return key, values


def parse_rate(text: str) -> tuple[str, float]:
    """Parse "residual=1.5e-3"."""
    try:
        mixer, rate = split_pair(text, "residual=1.5e-3")
        value = float(rate)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"lr_of {text!r}; expected MIXER=RATE with a rate above 0, such as residual=1.5e-3")
    return mixer, value
