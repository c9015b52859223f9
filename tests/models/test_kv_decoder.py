"""The decoder with values mixed over depth, against plain loops; and what a trace tells of these values.

Axes: N executions of attention, B batch, T token, K key-value head, d channel of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm
from tests.cases import EVERY_MECHANISM, label
from tests.mechanisms.test_kv import EVERY_KV, KV, close, expected, gradients
from tests.reference import decoder as reference_decoder

Case = tuple[str, dict[str, Any]]


def make_config(kv: Case | None = None, *, looped: bool = False, **fields: Any) -> dm.DecoderConfig:
    loop = {"first": 1, "last": 3, "repeats": 2} if looped else None
    kv_mixer = None if kv is None else {"name": kv[0], **kv[1]}
    sizes = {"vocab_size": 13, "dim": 16, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 6, "hidden": 20}
    return dm.DecoderConfig(**{**sizes, "loop": loop, "kv_mixer": kv_mixer, **fields})


def make_decoder(config: dm.DecoderConfig) -> dm.Decoder:
    """In double precision, every parameter away from its start."""
    model = dm.Decoder(config).double()
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=draw, dtype=p.dtype)
    return model


def make_tokens(shape: tuple[int, int] = (2, 5)) -> Tensor:
    return torch.randint(13, shape, generator=torch.Generator().manual_seed(3))


def reference_run(model: dm.Decoder, tokens: Tensor) -> tuple[Any, ...]:
    config = model.config
    return reference_decoder.run(
        tokens,
        dict(model.named_parameters()),
        order=list(config.layer_order),
        theta=config.rope_theta,
        eps=config.norm_eps,
        key_norm=config.key_norm.removesuffix("_rope"),
        kv_mixer=None if config.kv_mixer is None else config.kv_mixer.name,
        kv_options=None if config.kv_mixer is None else dict(config.kv_mixer.options),
    )


FORMS = [
    {"tie_embeddings": tied, "key_norm": norm, "looped": looped}
    for tied, norm, looped in [
        (False, "before_rope", False),
        (True, "after_rope", True),
        (True, "before_rope", False),
        (False, "after_rope", False),
        (False, "before_rope", True),
    ]
]
WHOLE = [pytest.param(None, form, id=f"none-{i}") for i, form in enumerate(FORMS)]
for at, each in enumerate(KV):  # two forms of each, one of them looped
    WHOLE += [pytest.param(each, FORMS[f], id=f"{label(*each)}-{f}") for f in (at % 3 and at % 3 + 1, (4, 1)[at % 2])]


@pytest.mark.parametrize(("kv", "form"), WHOLE)
def test_the_decoder_computes_what_plain_loops_compute(kv: Case | None, form: dict[str, Any]) -> None:
    model, tokens = make_decoder(make_config(kv, **form)), make_tokens()
    ours, theirs = model(tokens), reference_run(model, tokens)[0]
    close(ours, theirs, 1e-12)
    names, leaves = zip(*model.named_parameters(), strict=True)
    assert ("head.weight" in names) != form["tie_embeddings"]
    for a, b in zip(gradients([ours], leaves), gradients([theirs], leaves), strict=True):
        close(a, b, 1e-10)


def test_depth_attention_has_no_parameter_and_vanilla_weights_fit() -> None:
    vanilla = make_decoder(make_config())
    for name, options in KV:
        if name == "depth_attention":
            model = dm.Decoder(make_config((name, options))).double()
            assert not list(model.kv_mixers.state_dict())
            assert {k: p.shape for k, p in model.state_dict().items()} == {
                k: p.shape for k, p in vanilla.state_dict().items()
            }
            model.load_converted(vanilla.state_dict())
            assert torch.equal(model.embed.weight, vanilla.embed.weight)


def test_value_residual_has_two_scalars_for_each_execution_but_the_first() -> None:
    mixers = dm.Decoder(make_config(("value_residual", {"own": 0.75, "first": -1.5}), looped=True)).kv_mixers
    assert {k: p.tolist() for k, p in mixers.named_parameters()} == {
        f"{n}.{name}": [start] for n in range(1, 6) for name, start in (("own", 0.75), ("first", -1.5))
    }
    assert not list(dm.Decoder(make_config(("value_residual", {"learned": False}))).kv_mixers.parameters())


@pytest.mark.parametrize("kv", dm.list_mechanisms(kind="kv"))
@EVERY_MECHANISM
def test_values_mix_under_every_mechanism(name: str, options: dict[str, Any], kv: str) -> None:
    model = make_decoder(make_config((kv, {}), mixer={"name": name, **options}, looped=True))
    model.loss(make_tokens()).backward()
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        assert p.grad.isfinite().all(), key


@pytest.mark.parametrize("kv", [("depth_attention", {}), ("value_residual", {})], ids=lambda kv: kv[0])
def test_a_compiled_decoder_equals_eager(kv: Case) -> None:
    torch._dynamo.reset()
    model, tokens = make_decoder(make_config(kv, looped=True)), make_tokens()
    leaves = list(model.parameters())
    eager, compiled = model(tokens), torch.compile(model, fullgraph=True, backend="aot_eager")(tokens)
    close(compiled, eager, 1e-12)
    for a, b in zip(gradients([compiled], leaves), gradients([eager], leaves), strict=True):
        close(a, b, 1e-11)


class Recorder:
    """A cache of one forward pass that keeps the values which attention hands to it."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def place(self, tokens: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return torch.arange(tokens.shape[1]).expand_as(tokens), None

    def put(self, slot: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert slot == len(self.values)
        self.values.append(v)
        return k, v


@contextmanager
def raw_values(model: dm.Decoder) -> Iterator[list[Tensor]]:
    """[B, K, T, d] of each execution, as the projections give them."""
    found: list[Tensor] = []
    d = model.config.width
    projections = [m for name, m in model.named_modules() if name.endswith("v_proj")]
    hooks = [
        m.register_forward_hook(lambda _, __, y: found.append(y.unflatten(-1, (-1, d)).transpose(1, 2)))
        for m in projections
    ]
    yield found
    for hook in hooks:
        hook.remove()


@EVERY_KV
@pytest.mark.parametrize("looped", [False, True], ids=["plain", "looped"])
def test_the_trace_tells_whose_raw_values_a_cached_one_is_made_of(
    name: str, options: dict[str, Any], looped: bool
) -> None:
    model, tokens = make_decoder(make_config((name, options), looped=looped)), make_tokens()
    M = dm.trace(model, tokens).values
    assert M is not None
    n = len(model.config.layer_order)
    assert M.shape == (2, 5, 2, n, n)
    assert torch.equal(M, M.tril())
    if name == "depth_attention":
        close(M.sum(-1), torch.ones_like(M[..., 0]), 1e-12)
    _, q, k, v, _ = reference_run(model, tokens)
    with_params = torch.nn.ModuleList(model.kv_mixers)
    close(M, expected(name, options, with_params, "matrix", q, k, v).detach(), 1e-12)
    cache = Recorder()
    with raw_values(model) as raw, torch.no_grad():
        model(tokens, cache=cache)
    close(torch.einsum("btkij,jbktd->ibktd", M, torch.stack(raw)), torch.stack(cache.values), 1e-12)


def test_the_trace_moves_with_the_queries_of_a_layer(tmp_path: Path) -> None:
    """Nothing else than a skipped mix would leave the weights of the values as they are."""
    model, tokens = make_decoder(make_config(("depth_attention", {}))), make_tokens()
    before = dm.trace(model, tokens)
    with torch.no_grad():
        model.sublayers[6].q_norm.weight *= 2
    after = dm.trace(model, tokens)
    assert torch.equal(after.values[..., :3, :], before.values[..., :3, :])
    assert (after.values[..., 3, :] - before.values[..., 3, :]).abs().amax(-1).min() > 1e-4
    after.save(tmp_path / "trace.safetensors")
    assert torch.equal(dm.Trace.load(tmp_path / "trace.safetensors").values, after.values)


def test_there_is_no_value_matrix_where_no_values_are_mixed() -> None:
    assert dm.trace(make_decoder(make_config()), make_tokens()).values is None
