"""Edits of reads: what is cut is exactly a contribution, everything above follows, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import depthmix as dm
from depthmix.analysis.invariants import Probe, make_probe
from depthmix.mechanisms import SourceWeights
from tests.cases import EVERY_CASE, EVERY_MECHANISM
from tests.decoders import some_tokens, tiny

Sublayer = Callable[[Tensor], Tensor]


def ones(probe: Probe) -> Tensor:
    n = probe.stack.depth + 1
    return torch.ones(n, n, dtype=torch.float64)


@torch.no_grad()
def run(
    probe: Probe, *args: Any, sublayers: list[Sublayer] | None = None, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """The output, and what each sublayer read, under an edit."""
    reads: list[Tensor] = []

    def reading(f: Sublayer) -> Sublayer:
        return lambda h: (reads.append(h.clone()), f(h))[1]

    with dm.editing(probe.stack, *args, **options):
        out = probe.stack(probe.x, [reading(f) for f in sublayers or probe.sublayers])
    return out, [*reads, out]


def less(f: Sublayer, part: Tensor) -> Sublayer:
    return lambda h: f(h - part)


def close(a: Tensor, b: Tensor, bound: float = 1e-11) -> bool:
    return bool((a - b).abs().max() <= bound * max(1.0, float(b.abs().max())))


@EVERY_MECHANISM
def test_without_an_edit_the_ordinary_path_runs_with_the_same_bits(name: str, options: dict[str, Any]) -> None:
    probe = make_probe(name, options, dtype=torch.float32)
    plain = probe.run()
    with dm.editing(probe.stack) as edited:
        assert not any("read" in vars(mixer) for mixer in probe.stack.all_mixers())
        assert torch.equal(probe.run(), plain)
    assert edited.reads == 0


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@EVERY_CASE
def test_a_mask_of_ones_changes_nothing(name: str, options: dict[str, Any], dtype: torch.dtype, bound: float) -> None:
    probe = make_probe(name, options, dtype=dtype, spread=0.2)
    for renormalise in (False, True):
        out, _ = run(probe, ones(probe), renormalise=renormalise)
        # The delta rule subtracts nearly equal numbers, so that float32 paths of other order differ by more.
        assert close(out, probe.run().detach(), 4 * bound if name == "ddl" and dtype == torch.float32 else bound)


@EVERY_CASE
def test_a_cut_edge_takes_its_contribution_from_the_read_and_all_above_follows(
    name: str, options: dict[str, Any]
) -> None:
    """Compared with the mechanism's own path, where the sublayer itself subtracts the contribution of a trace."""
    probe = make_probe(name, options)
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    row, source = 4, 2
    scale = ones(probe)
    scale[row, source] = 0.25
    out, reads = run(probe, scale)
    part = 0.75 * traced.contributions(row)[source]
    sublayers = [less(f, part) if i == row else f for i, f in enumerate(probe.sublayers)]
    assert close(out, probe.stack(probe.x, sublayers).detach())
    assert close(reads[row], traced.inputs[row] - part)
    for below in range(row):
        assert close(reads[below], traced.inputs[below])


@EVERY_MECHANISM
def test_a_cut_source_is_missing_in_every_read(name: str, options: dict[str, Any]) -> None:
    """Row by row: each sublayer subtracts what a trace of the network so far says that the source contributes."""
    probe, source = make_probe(name, options), 2
    scale = ones(probe)
    scale[:, source] = 0
    _, reads = run(probe, scale)
    sublayers, n = list(probe.sublayers), probe.stack.depth + 1
    for row in range(source, n):
        traced = dm.trace(probe.stack, probe.x, sublayers)
        part = traced.contributions(row)[source]
        assert close(reads[row], traced.inputs[row] - part)
        if row < n - 1:
            sublayers[row] = less(probe.sublayers[row], part)


@pytest.mark.parametrize("options", [{}, {"heads": 2}, {"mixing": "static"}, {"scale_by_count": True}, {"window": 3}])
def test_a_masked_source_of_a_softmax_leaves_its_weight_to_the_others(options: dict[str, Any]) -> None:
    """A softmax without the masked logits, as a plain loop."""
    probe = make_probe("attnres", options)
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    row, masked = 5, {0, 4}
    scale = ones(probe)
    scale[row, sorted(masked)] = 0
    with dm.editing(probe.stack, scale, renormalise=True) as edited:
        pass
    assert "softmax" in edited.how
    _, reads = run(probe, scale, renormalise=True)
    assert traced.weights is not None
    alpha = traced.weights if traced.weights.dim() == 5 else traced.weights.unsqueeze(-3)  # [B, T, H, n, C]
    heads, count = alpha.shape[-3], len(traced.reads[row]) if options.get("scale_by_count") else 1
    width = probe.stack.dim // heads
    for head in range(heads):
        want, total = torch.zeros(*probe.x.shape[:-1], width, dtype=torch.float64), 0
        for i in traced.reads[row]:
            if i not in masked:
                weight = alpha[..., head, row, i, None]
                want = want + weight * traced.sources[i][..., head * width : (head + 1) * width]
                total = total + weight
        assert close(reads[row][..., head * width : (head + 1) * width], count * want / total)


def test_a_masked_block_leaves_its_weight_and_a_part_of_a_block_only_its_outputs() -> None:
    probe = make_probe("block_attnres", {"block_sublayers": 3})
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    assert traced.weights is not None
    v, alpha = traced.sources, traced.weights[..., 7, :].unsqueeze(-1)
    blocks = [v[0], v[1] + v[2] + v[3], v[4] + v[5] + v[6], v[7]]
    scale = ones(probe)
    scale[7, [1, 2, 3]] = 0
    out, _ = run(probe, scale, renormalise=True)
    kept = [alpha[..., c, :] * blocks[c] for c in (0, 2, 3)]
    assert close(out, sum(kept) / (1 - alpha[..., 1, :]))
    scale = ones(probe)
    scale[7, 2] = 0
    out, _ = run(probe, scale, renormalise=True)
    assert close(out, traced.inputs[7] - alpha[..., 1, :] * v[2])


def test_what_reaches_a_read_beside_its_weights_is_cut_too() -> None:
    """Delta AttnRes: the plain sum and a softmax beside it; the softmax without the source, and the sum without it."""
    probe = make_probe("delta_attnres", {})
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    assert traced.weights is not None
    scale = ones(probe)
    scale[3, 1] = 0
    _, reads = run(probe, scale, renormalise=True)
    alpha, v = traced.weights[..., 3, :], traced.sources
    kept = [0, 2, 3]
    total = sum(alpha[..., i] for i in kept)
    want = sum((1 + alpha[..., i] / total).unsqueeze(-1) * v[i] for i in kept)
    assert close(reads[3], want)


def test_rows_that_sum_to_1_are_divided_by_what_is_left() -> None:
    probe = make_probe("highway", {})
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    scale = ones(probe)
    scale[4, [0, 3]] = 0
    _, reads = run(probe, scale, renormalise=True)
    kept = [1, 2, 4]
    total = sum(traced.M[..., 4, i] for i in kept).unsqueeze(-1)
    assert close(reads[4], sum(traced.contributions(4)[i] for i in kept) / total)


@pytest.mark.parametrize("name", ["residual", "mhc", "ddl"])
def test_where_rows_do_not_sum_to_1_it_is_said_that_nothing_was_renormalised(name: str) -> None:
    probe = make_probe(name, {})
    scale = ones(probe)
    scale[4, 1] = 0
    with dm.editing(probe.stack, scale, renormalise=True) as edited:
        assert "none was renormalised" in edited.how
    assert torch.equal(run(probe, scale, renormalise=True)[0], run(probe, scale)[0])


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["attnres", "block_attnres", "hyper_connections", "ddl", "mrla"]), st.booleans(), st.integers(0, 99)
)
def test_edits_of_their_own_for_each_row_of_the_batch_are_those_of_separate_passes(
    name: str, renormalise: bool, seed: int
) -> None:
    probe = make_probe(name, {})
    draw = torch.Generator().manual_seed(seed)
    scale = torch.stack([ones(probe)] * 2)
    drawn = torch.rand(scale.shape, generator=draw, dtype=torch.float64)
    scale = torch.where(drawn < 0.2, 0.0, torch.where(drawn < 0.3, 1.5, scale))
    together, _ = run(probe, scale, renormalise=renormalise)
    for b in (0, 1):
        alone = Probe(probe.stack, probe.x[b : b + 1], probe.sublayers)
        assert close(together[b : b + 1], run(alone, scale[b], renormalise=renormalise)[0])


def test_weights_can_be_replaced_in_flight() -> None:
    probe = make_probe("block_attnres", {"block_sublayers": 3})
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)

    def embedding_only(row: int, given: SourceWeights) -> Tensor | None:
        if row != 4:
            return None
        assert given.names == ("embedding", "block 1", "block 2")
        new = torch.zeros_like(given.weights)
        new[..., 0] = 1
        return new

    _, reads = run(probe, weights=embedding_only)
    assert close(reads[4], traced.sources[0])
    assert close(reads[3], traced.inputs[3])


def test_replacing_weights_by_themselves_changes_nothing() -> None:
    for name in ("attnres", "delta_attnres"):
        probe = make_probe(name, {"heads": 2})
        out, _ = run(probe, weights=lambda row, given: given.weights)
        assert close(out, probe.run().detach(), 1e-13)


def test_generation_with_a_cache_runs_under_the_edit_too() -> None:
    model = tiny(mixer="attnres")
    n = model.config.depth + 1
    scale = torch.ones(n, n, dtype=torch.float64)
    scale[:, 2] = 0
    prompt = some_tokens(1, 5)
    with torch.no_grad(), dm.editing(model, scale):
        (made,) = dm.generate(model, prompt.tolist(), max_new_tokens=6)
        tokens = torch.cat([prompt, torch.tensor([made])], -1)
        edited = model(tokens)
    assert made == edited.argmax(-1)[0, 4:-1].tolist()
    assert not close(edited, model(tokens).detach(), 1e-3)


def test_cutting_the_first_value_is_value_residual_without_it() -> None:
    changes = {"kv_mixer": {"name": "value_residual", "learned": False, "own": 0.75, "first": 0.5}}
    model, without = (
        tiny(**changes),
        tiny(kv_mixer={"name": "value_residual", "learned": False, "own": 0.75, "first": 0.0}),
    )
    tokens = some_tokens(2, 7)
    scale = torch.ones(3, 3, dtype=torch.float64)
    scale[1:, 0] = 0
    with torch.no_grad(), dm.editing(model, values=scale):
        out = model(tokens)
    assert close(out, without(tokens).detach())
    assert not close(out, model(tokens).detach(), 1e-3)


def test_a_cut_of_depth_attention_takes_the_value_out_of_what_is_cached() -> None:
    stack = dm.KVStack("depth_attention", head_dim=4, depth=3, stride=1)
    draws = [[torch.randn(2, heads, 5, 4, dtype=torch.float64) for heads in (4, 2, 2)] for _ in range(3)]
    scale = torch.ones(3, 3, dtype=torch.float64)
    scale[2, 0] = 0

    class Values(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixers, self.depth = stack, dm.DepthStack("residual", dim=4, depth=2)

        def forward(self) -> list[Tensor]:
            kv, out = self.mixers.begin(), []
            for mixer, (q, k, v) in zip(self.mixers, draws, strict=True):
                mixed, kv = mixer.mix(q, k, v, kv)
                out.append(mixed)
            return out

    values = Values()
    plain = values()
    with dm.editing(values, values=scale):
        edited = values()
    first = values_weight(stack, draws)
    assert torch.equal(edited[0], plain[0])
    assert torch.equal(edited[1], plain[1])
    assert close(edited[2], plain[2] - first * draws[0][2])
    assert all(torch.equal(a, b) for a, b in zip(values(), plain, strict=True))


def values_weight(stack: dm.KVStack, draws: list[list[Tensor]]) -> Tensor:
    """How much of layer 1's value is in layer 3's, by two runs that differ in it: mixing is linear in the values."""
    outs = []
    for bump in (0.0, 1.0):
        kv = stack.begin()
        for i, (mixer, (q, k, v)) in enumerate(zip(stack, draws, strict=True)):
            mixed, kv = mixer.mix(q, k, v + bump * (i == 0), kv)
        outs.append(mixed)
    return outs[1] - outs[0]


def test_after_an_error_the_model_is_as_before() -> None:
    model = tiny(mixer="attnres", kv_mixer="depth_attention")
    tokens = some_tokens(1, 6)
    plain = model(tokens)
    n = model.config.depth + 1
    with (
        pytest.raises(RuntimeError, match="in the middle"),
        dm.editing(model, torch.ones(n, n) * 0.5, values=torch.ones(3, 3)),
    ):
        raise RuntimeError("in the middle")
    assert torch.equal(model(tokens), plain)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": torch.ones(3, 3)}, r"scale is \[3, 3\]; expected a tensor \[8, 8\]"),
        ({"scale": [[1.0]]}, "scale is list"),
        ({"scale": torch.full((8, 8), torch.nan)}, "not finite"),
        ({"scale": torch.ones(5, 8, 8)}, "one matrix for each row of the batch"),
        ({"values": torch.ones(2, 2)}, "no attention of this DepthStack mixes values"),
        ({"weights": lambda row, given: given.weights[..., :1]}, "expected floating-point weights of shape"),
    ],
)
def test_wrong_edits_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(make_probe("attnres", {}), **given)


def test_weights_of_a_mechanism_without_a_list_of_sources_cannot_be_edited() -> None:
    with pytest.raises(ValueError, match="does not weight a list of sources"):
        run(make_probe("mhc", {}), weights=lambda row, given: None)


def test_a_mechanism_that_cannot_replace_its_weights_can_still_be_cut() -> None:
    class Plain(dm.mechanism("attnres")):  # type: ignore[misc]
        with_weights = dm.DepthMixer.with_weights

    stack = dm.DepthStack(Plain, dim=8, depth=7)
    probe = Probe(stack.double(), make_probe("attnres", {}).x, make_probe("attnres", {}).sublayers)
    scale = ones(probe)
    scale[4, 1] = 0
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    with dm.editing(probe.stack, scale, renormalise=True) as edited:
        assert "softmax" not in edited.how
    assert close(run(probe, scale)[1][4], traced.inputs[4] - traced.contributions(4)[1])
    with pytest.raises(ValueError, match="no `with_weights`"):
        run(probe, weights=lambda row, given: None)


def test_gradients_flow_through_an_edit_also_of_a_model_that_would_recompute() -> None:
    model, tokens = tiny(mixer="attnres"), some_tokens(2, 7)
    n = model.config.depth + 1
    scale = torch.ones(n, n, dtype=torch.float64)
    scale[3:, 1] = 0.5
    grads = []
    for every in (None, 2):
        model.checkpoint_every = every
        model.zero_grad(set_to_none=True)
        with dm.editing(model, scale):
            model.loss(tokens).backward()
        assert model.checkpoint_every == every
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_negative_factors_are_refused_where_weights_are_renormalised() -> None:
    probe = make_probe("attnres", {})
    scale = ones(probe)
    scale[4, 1] = -3
    with pytest.raises(ValueError, match="below 0 with renormalise=True"):
        run(probe, scale, renormalise=True)
    assert run(probe, scale)[0].isfinite().all()


@pytest.mark.parametrize(("name", "depth"), [("attnres", 1), ("block_attnres", 2)])
def test_sigmoid_weights_are_not_renormalised_even_where_they_happen_to_sum_to_1(name: str, depth: int) -> None:
    options = {"mixing": "sigmoid", **({"num_blocks": 1} if name == "block_attnres" else {})}
    probe = make_probe(name, options, depth=depth, spread=0)
    scale = ones(probe)
    scale[1, 0] = 0
    with dm.editing(probe.stack, scale, renormalise=True) as edited:
        assert "none was renormalised" in edited.how


def test_attention_that_is_still_off_can_be_masked() -> None:
    probe = make_probe("mrla", {"form": "base"}, spread=0)
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    scale = ones(probe)
    scale[4, 1] = 0
    _, reads = run(probe, scale, renormalise=True)
    assert close(reads[4], traced.inputs[4] - traced.sources[1])


def test_passes_under_one_edit_of_values_do_not_see_each_other() -> None:
    model = tiny(kv_mixer="value_residual")
    scale = torch.ones(3, 3, dtype=torch.float64)
    scale[2, 0] = scale[1, 0] = 0
    first, second = some_tokens(2, 7), some_tokens(2, 9).flip(0)
    with torch.no_grad(), dm.editing(model, values=scale):
        outs = [model(first), model(second), model(first)]
    with torch.no_grad(), dm.editing(model, values=scale):
        alone = model(second)
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], alone)


def test_a_row_of_which_nothing_is_left_is_not_divided_by_nothing() -> None:
    probe = make_probe("highway", {})
    scale = ones(probe)
    scale[4, :] = 0
    _, reads = run(probe, scale, renormalise=True)
    assert reads[4].abs().max() <= 1e-9
    assert all(read.isfinite().all() for read in reads)


def test_sources_above_a_row_cannot_be_edited_into_it() -> None:
    probe = make_probe("block_attnres", {})
    scale = ones(probe).triu(1) * 5 + ones(probe).tril()
    assert close(run(probe, scale)[0], probe.run().detach(), 1e-13)
