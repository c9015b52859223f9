"""How the papers' models were trained, as data, and a rule that extends one table to other sizes.

A recipe holds what a paper reports for one of its models. The rule is fitted to Table 2 of arXiv 2603.15031 by least
squares in logarithms: learning rate by parameters, batch by tokens, tokens and widths in proportion. Parameters and
tokens grow together in that table, so it cannot say what happens when only one of them grows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from depthmix.data.tokenizers import vocabulary_size
from depthmix.models import PRESETS, DecoderConfig, preset
from depthmix.models import presets as shapes
from depthmix.models.backbones import KIMI_LINEAR, QWEN3
from depthmix.support.checks import did_you_mean
from depthmix.training.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from depthmix.training.dial import initial_std, learning_rate, split_mixer
from depthmix.training.retrofit import count_parameters

RULE = "attnres"  # name of the rule, used like the name of a preset
RULES = {KIMI_LINEAR: shapes.attnres, QWEN3: shapes.attnres_gqa}
MICRO_ROWS = 16  # rows of a micro-batch if a batch is split into several; our choice
LEAST_CONTEXT = 128


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one model was trained. What a paper does not report (AdamW, lengths of a schedule) is taken from
    Depth-Attention."""

    tokens: float
    lr: float
    rows: int  # per step
    tokens_per_row: int
    precision: Literal["float32", "bfloat16"] = "float32"
    parameters: float = math.nan  # active, without embeddings, from the paper's table
    optimizer: Literal["adamw", "muon"] = "adamw"
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup: float = 0.02


def table_2(parameters: float, tokens: float, lr: float, rows: int) -> Recipe:
    """A row of Table 2 of arXiv 2603.15031; of schedule and optimiser, the paper reports only the cosine."""
    return Recipe(parameters=parameters, tokens=tokens, lr=lr, rows=rows, tokens_per_row=8192)


def depth_attention(lr: float) -> Recipe:
    """arXiv 2606.05014: 15,625 steps of 1024 sequences; the authors' files say bfloat16, their text FP16."""
    return Recipe(tokens=15_625 * 1024 * 2048, lr=lr, rows=1024, tokens_per_row=2048, precision="bfloat16")


def kimi_linear_48b() -> Recipe:
    """The first phase of training in arXiv 2603.15031, section 5. The paper does not give the learning rate: this one
    is what the law of its Table 2 gives for 2.73 billion parameters."""
    return Recipe(
        tokens=1e12,
        lr=1.07e-3,
        rows=2048,
        tokens_per_row=4096,
        precision="bfloat16",
        optimizer="muon",
        schedule="wsd",
    )


def kimi_linear_tiny() -> Recipe:
    """As the dial trains a model of this size: 20 tokens per active parameter."""
    return Recipe(tokens=31.5e6, lr=learning_rate(128), rows=16, tokens_per_row=256, optimizer="muon", warmup=0.1)


TABLE = {
    "attnres-194m": table_2(194e6, 38.7e9, 2.99e-3, 192),
    "attnres-241m": table_2(241e6, 45.4e9, 2.80e-3, 256),
    "attnres-296m": table_2(296e6, 62.1e9, 2.50e-3, 320),
    "attnres-436m": table_2(436e6, 87.9e9, 2.20e-3, 384),
    "attnres-528m": table_2(528e6, 119.0e9, 2.02e-3, 432),
}
RECIPES: dict[str, Recipe] = {
    "depth-attention-360m": depth_attention(1.5e-3),
    "depth-attention-500m": depth_attention(1e-3),
    "depth-attention-500m-x3": depth_attention(1e-3),  # the paper reports no other settings for its looped model
    "depth-attention-710m": depth_attention(1e-3),
    "depth-attention-1.5b": depth_attention(1e-3),
    "depth-attention-3b": depth_attention(1e-3),
    **TABLE,
    **{f"{name}-gqa": recipe for name, recipe in TABLE.items()},
    "kimi-linear-48b": kimi_linear_48b(),
    "kimi-linear-tiny": kimi_linear_tiny(),
}


class PowerLaw(NamedTuple):
    """y = factor · x^exponent."""

    factor: float
    exponent: float

    def __call__(self, x: float) -> float:
        return self.factor * float(x**self.exponent)


def power_law(xs: Sequence[float], ys: Sequence[float]) -> PowerLaw:
    """Fit a power law by least squares in logarithms."""
    line = statistics.linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys])
    return PowerLaw(math.exp(line.intercept), line.slope)


RATE = power_law([row.parameters for row in TABLE.values()], [row.lr for row in TABLE.values()])
BATCH = power_law([row.tokens for row in TABLE.values()], [row.rows * row.tokens_per_row for row in TABLE.values()])
MOST_RATE = max(
    row.lr for row in TABLE.values()
)  # below the table's smallest size the law gives rates that are too high
TOKENS_PER_PARAMETER = statistics.geometric_mean([row.tokens / row.parameters for row in TABLE.values()])
WIDTH_PER_LAYER = statistics.mean(PRESETS[name]["dim"] / PRESETS[name]["layers"] for name in TABLE)
EXPERT_PER_WIDTH = statistics.mean(PRESETS[name]["moe"]["hidden"] / PRESETS[name]["dim"] for name in TABLE)


def preset_config(
    name: str, mixer: str | None = None, *, tokenizer: str | None = None, folder: str | None = None
) -> TrainConfig:
    """The whole training configuration behind a name of `RECIPES`.

    Args:
        name: such as attnres-194m.
        mixer: mechanisms that replace all of the preset's: a name, or two joined with +.
        tokenizer: bytes, bpe:SIZE or a tokenizer.json; its vocabulary replaces the paper's.
        folder: folder of the run.
    """
    if name not in RECIPES:
        known = (*RECIPES, RULE)
        raise ValueError(f"no recipe for preset {name!r}. {did_you_mean(name, known)}Known: {', '.join(known)}")
    vocabulary = {} if tokenizer is None else {"vocab_size": vocabulary_size(tokenizer)}
    model = preset(name, **chosen_mixers(mixer), **vocabulary)
    return assemble(model, RECIPES[name], tokenizer or "bytes", folder or default_folder(name, mixer))


def rule_config(
    depth: int = 12,
    dim: int | None = None,
    mixer: str | None = None,
    *,
    backbone: str = KIMI_LINEAR,
    tokenizer: str = "bytes",
    vocab_size: int | None = None,
    folder: str | None = None,
    tokens: float | None = None,
) -> TrainConfig:
    """The configuration that the table's rule gives for another size.

    Args:
        depth: number of sublayers; as many heads of 128 channels as layers, 8 of 64 experts, at most 8 blocks.
        dim: width; by default proportional to the depth, as in the table.
        mixer: as in `preset_config`.
        backbone: "kimi_linear", as in the paper; "qwen3" for grouped-query attention and experts in every layer.
        tokenizer: decides the vocabulary, unless `vocab_size` is given.
        vocab_size: vocabulary size of the model.
        folder: folder of the run.
        tokens: number of tokens to train on; by default the table's tokens per parameter. It decides the batch.
    """
    if depth < 2 or depth % 2:
        raise ValueError(f"depth={depth}; expected an even number of sublayers, at least 2")
    dim = in_sixteens(WIDTH_PER_LAYER * depth / 2) if dim is None else dim
    if backbone not in RULES:
        raise ValueError(f"backbone={backbone!r}; expected one of {', '.join(map(repr, RULES))}")
    shape = RULES[backbone](depth // 2, dim, in_sixteens(EXPERT_PER_WIDTH * dim))
    shape["mixer"]["num_blocks"] = min(depth, shape["mixer"]["num_blocks"])
    vocabulary = vocabulary_size(tokenizer) if vocab_size is None else vocab_size
    more = {"vocab_size": vocabulary, "init_std": initial_std(dim), **chosen_mixers(mixer)}
    model = DecoderConfig.from_dict({**shape, **more})
    parameters = count_parameters(model).active_without_embeddings
    budget = TOKENS_PER_PARAMETER * parameters if tokens is None else tokens
    batch = BATCH(budget)
    context = max(LEAST_CONTEXT, min(8192, 2 ** math.floor(math.log2(max(1.0, batch / MICRO_ROWS)))))
    name = RULE if backbone == KIMI_LINEAR else f"{RULE}-{backbone}"
    rate = min(MOST_RATE, float(f"{RATE(parameters):.3g}"))
    recipe = Recipe(tokens=budget, lr=rate, rows=max(1, round(batch / context)), tokens_per_row=context)
    return assemble(model, recipe, tokenizer, folder or default_folder(f"{name}-{depth}", mixer))


def assemble(model: DecoderConfig, recipe: Recipe, tokenizer: str, folder: str) -> TrainConfig:
    """A batch of more than two micro-batches is split into the nearest whole number of them."""
    accumulate = round(recipe.rows / MICRO_ROWS) if recipe.rows > 2 * MICRO_ROWS else 1
    rows = MICRO_ROWS if accumulate > 1 else recipe.rows
    steps = max(1, round(recipe.tokens / (accumulate * rows * recipe.tokens_per_row)))
    optimizer = OptimizerConfig(name=recipe.optimizer, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.1, clip=1.0)
    return TrainConfig(
        model=model,
        data=DataConfig(tokenizer=tokenizer, tokens_per_row=recipe.tokens_per_row, rows=rows),
        optimizer=optimizer,
        schedule=ScheduleConfig(kind=recipe.schedule, warmup=recipe.warmup, final=0.1),
        run=RunConfig(folder=folder, steps=steps, accumulate=accumulate, precision=recipe.precision),
    )


def chosen_mixers(mixer: str | None) -> dict[str, Any]:
    return {} if mixer is None else {"mixer": "residual", "kv_mixer": None, **split_mixer(mixer)}


def default_folder(name: str, mixer: str | None) -> str:
    return f"runs/{name}" if mixer is None else f"runs/{name}-{mixer}"


def in_sixteens(value: float) -> int:
    """The table's widths are multiples of 16."""
    return max(16, 16 * round(value / 16))


def describe_recipe(name: str, config: TrainConfig) -> str:
    """The numbers of a preset in one line."""
    parameters = count_parameters(config.model).active_without_embeddings
    tokens = config.run.steps * config.tokens_per_step
    capped = name == RULE and config.optimizer.lr == MOST_RATE
    limit = f", the table's largest (its law would give {RATE(parameters):.3g})" if capped else ""
    return (
        f"{name}: {parameters:,} active parameters without embeddings, {tokens:.4g} tokens ({tokens / parameters:.3g} "
        f"per parameter) in {config.run.steps:,} steps of {config.run.accumulate * config.data.rows} × "
        f"{config.data.tokens_per_row} tokens, learning rate {config.optimizer.lr:g}{limit}"
    )
