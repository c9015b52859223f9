"""A model of transformers with and without a mechanism: what `dm.wrap` adds to a step, a forward and a decode step.

All variants share one set of weights. The time of mixing itself is measured as in `mixing`, with submodules that
compute nothing in the place of attention and MLP.

Axes: B batch, T token, D channel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.bench.mixing import CheapSublayer, medians_of_turns, mixing_ratios, with_turns
from depthmix.bench.processes import progress
from depthmix.bench.report import BASELINE, CONTROL
from depthmix.bench.step import Options, ratios, with_control
from depthmix.bench.timing import measure
from depthmix.support.checks import import_package

STEP, FORWARD, DECODE = "wrapped step", "wrapped forward", "wrapped decode"
STEP_MIXING, FORWARD_MIXING = "mixing in a wrapped step", "mixing in a wrapped forward"
INSIDE, DECODING = " in Qwen3", " in Qwen3, decoding"
Call = Callable[[], None]


def run(
    mixers: Mapping[str, Options], fields: Mapping[str, Any], tokens: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Ratios to the unwrapped model: of a step, a forward and a decode step, and the first two by mixing alone."""
    plain = make_model(fields)
    models = {BASELINE: plain, **{name: wrapped(plain, name, options) for name, options in mixers.items()}}
    cheap = {name: with_cheap_parts(model, tokens) for name, model in models.items()}
    row = torch.randint(plain.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))

    def each(make: Callable[[Any, Tensor], Call], of: Mapping[str, nn.Module]) -> dict[str, Call]:
        return with_control({name: make(model, row) for name, model in of.items()})

    step, forward = make_step(plain, row), make_forward(plain, row)
    return {
        STEP: named(ratios(each(make_step, models), rounds, STEP), INSIDE),
        STEP_MIXING: named(mixing(step, each(make_layers_step, cheap), rounds, STEP_MIXING), INSIDE),
        FORWARD: named(ratios(each(make_forward, models), rounds, FORWARD), INSIDE),
        FORWARD_MIXING: named(mixing(forward, each(make_layers_forward, cheap), rounds, FORWARD_MIXING), INSIDE),
        DECODE: named(ratios(each(make_decode, models), 8 * rounds, DECODE), DECODING),
    }


def named(results: Mapping[str, list[float]], suffix: str) -> dict[str, list[float]]:
    return {name if name == CONTROL else name + suffix: each for name, each in results.items()}


def mixing(real: Call, cheap: Mapping[str, Call], rounds: int, label: str) -> dict[str, list[float]]:
    """1 + (wrapped − plain) / real, with cheap submodules in the first two."""
    times: Any = measure(with_turns(real, cheap), rounds=rounds, progress=progress(label))  # type: ignore[arg-type]
    return mixing_ratios(medians_of_turns(times))


def make_model(fields: Mapping[str, Any]) -> Any:
    """A Qwen3 with random weights; attention runs fused."""
    transformers = import_package("transformers", "the part hf", "'depthmix[hf]'")
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields))


def wrapped(plain: Any, name: str, options: Options) -> Any:
    """A wrapped copy that shares the weights."""
    from depthmix.hf.wrap import wrap

    model = wrap(sharing(plain), name, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "depthmix" in key:  # away from the start, where products with zeros may be faster
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def sharing(model: nn.Module) -> Any:
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


class CheapPart(CheapSublayer):
    """A `CheapSublayer` that is called and answers as a submodule of transformers."""

    def __init__(self, part: nn.Module, stored: Tensor, answers_tuple: bool) -> None:
        super().__init__(part, stored)
        self.answers_tuple = answers_tuple

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:  # type: ignore[override]
        output = super().forward(hidden_states)
        return (output, None) if self.answers_tuple else output


def with_cheap_parts(model: Any, tokens: int) -> Any:
    """A copy whose attention and MLP compute nothing; hooks of a wrapped layer move to what replaces them."""
    model = sharing(model)
    generator = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        for name, answers_tuple in (("self_attn", True), ("mlp", False)):
            part = getattr(layer, name)
            cheap = CheapPart(
                part, torch.randn(1, tokens, model.config.hidden_size, generator=generator), answers_tuple
            )
            cheap._forward_hooks = part._forward_hooks
            setattr(layer, name, cheap)
    return model


def make_step(model: Any, row: Tensor) -> Call:
    """Forward and backward, without an optimiser."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model.train()(row, labels=row, use_cache=False).loss.backward()

    return step


def make_layers_step(model: Any, row: Tensor) -> Call:
    """Of the layers alone, without the head and its loss."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model.model.train()(row, use_cache=False).last_hidden_state.square().mean().backward()

    return step


def make_layers_forward(model: Any, row: Tensor) -> Call:
    def forward() -> None:
        with torch.no_grad():
            model.model.eval()(row, use_cache=False)

    return forward


def make_forward(model: Any, row: Tensor) -> Call:
    """Without gradients, as in prefill: logits of the last token only."""

    def forward() -> None:
        with torch.no_grad():
            model.eval()(row, logits_to_keep=1, use_cache=False)

    return forward


def make_decode(model: Any, row: Tensor) -> Call:
    """One new token for one sequence, with a cache that is three quarters full."""
    transformers = import_package("transformers", "the part hf", "'depthmix[hf]'")
    full = 3 * row.shape[1] // 4
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model.eval()(row[:, :full], past_key_values=cache, logits_to_keep=1)
    token = row[:, full : full + 1]

    def decode() -> None:
        with torch.no_grad():
            model.eval()(token, past_key_values=cache)
            cache.crop(-1)

    return decode


def model_fields(*, dim: int, layers: int, tokens: int, vocabulary: int) -> dict[str, Any]:
    """A configuration in the proportions of small Qwen3 models, with heads of 64 channels."""
    heads = max(2, dim // 64)
    return {
        "vocab_size": vocabulary,
        "hidden_size": dim,
        "intermediate_size": 3 * dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": dim // heads,
        "max_position_embeddings": 2 * tokens,
        "tie_word_embeddings": True,
    }
