"""Traces of models and of bare stacks: M, sources, inputs, contributions, files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import depthmix as dm
from depthmix.analysis.invariants import make_probe
from depthmix.mechanisms.ddl import readout_matrix
from tests.cases import ALL, EVERY_CASE
from tests.reference import ddl as plain_ddl


class LanguageModel(nn.Module):
    """A user's model that takes tokens and runs the loop."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.depth = dm.DepthStack(name, dim=8, depth=5, **options)
        self.sublayers = nn.ModuleList(nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8)) for _ in range(5))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.depth.begin(self.embedding(tokens))
        for mixer, sublayer in zip(self.depth, self.sublayers, strict=True):
            state = mixer.step(state, sublayer)
        return self.head(self.depth.end(state))


def test_a_model_is_traced_through_its_own_forward() -> None:
    model = LanguageModel("block_attnres", num_blocks=2)
    nn.init.normal_(model.depth[3].query)
    tokens = torch.randint(0, 11, (2, 7))
    traced = dm.trace(model, tokens)
    assert traced.M.shape == (2, 7, 6, 6)
    assert traced.sources.shape == traced.inputs.shape == (6, 2, 7, 8)
    assert torch.equal(traced.sources[0], model.embedding(tokens))
    assert torch.equal(traced.sources[1], model.sublayers[0](model.embedding(tokens)))
    assert torch.allclose(model.head(traced.inputs[-1]), model(tokens), atol=1e-6)
    assert traced.mechanism == "block_attnres"
    assert traced.options["num_blocks"] == 2


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = LanguageModel("attnres")
    tokens = torch.randint(0, 11, (2, 3))
    before = model(tokens)
    keys = [set(vars(m)) for m in model.modules()]
    dm.trace(model, tokens)
    assert [set(vars(m)) for m in model.modules()] == keys
    assert torch.equal(model(tokens), before)
    with pytest.raises(RuntimeError):
        dm.trace(model, torch.randn(2, 3))  # fails inside the model
    assert [set(vars(m)) for m in model.modules()] == keys


def test_a_trace_never_takes_the_fast_path() -> None:
    from depthmix.mechanisms.residual import Residual

    class Fast(Residual):
        def read(self, state: dm.State) -> tuple[Tensor, Any]:
            raise AssertionError("the fast path was taken")

    stack = dm.DepthStack(Fast, dim=4, depth=3)
    dm.trace(stack, torch.randn(2, 4), [torch.tanh] * 3)
    with pytest.raises(AssertionError):
        stack(torch.randn(2, 4), [torch.tanh] * 3)


@pytest.mark.parametrize(("name", "options"), [case for case in ALL if case.values[0] != "ddl"])
def test_an_independent_probe_finds_the_same_matrix(name: str, options: dict[str, Any]) -> None:
    """Other sources under the recorded coefficients: M still rebuilds every row (ddl: see test_reference)."""
    probe = make_probe(name, options, depth=5, tokens=(2,))
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    generator = torch.Generator().manual_seed(1)
    moved = [v + torch.randn(v.shape, generator=generator, dtype=v.dtype) for v in traced.sources]
    mixers = probe.stack.all_mixers()
    state = mixers[0].begin(moved[0])
    for row, mixer in enumerate(mixers):
        h = mixer.combine(state, traced.coefficients[row])
        groups = traced.M.shape[-3] if traced.kind != "scalar" else 1
        weights = traced.M[..., row, :].reshape(2, groups, -1).repeat_interleave(8 // groups, 1)  # [T, D, i]
        rebuilt = (weights * torch.stack(moved, -1)).sum(-1)
        assert (h - rebuilt).abs().max() <= 1e-11 * h.abs().max().clamp(min=1)
        if not mixer.site.is_out:
            state = mixer.update(state, traced.coefficients[row], moved[row + 1])


@pytest.mark.parametrize("name", ["ddl", "delta_attnres", "mhc"])
def test_a_sublayer_that_works_in_place_does_not_spoil_the_record(name: str) -> None:
    probe = make_probe(name, {})
    first, *others = probe.sublayers  # the first reads the state itself: it must leave it alone
    sublayers = [first, *(lambda h, f=f: f(h.sub_(0.5)) for f in others)]
    traced = dm.trace(probe.stack, probe.x.clone(), sublayers)
    for row in range(1, 8):
        assert (traced.contributions(row).sum(0) - traced.inputs[row]).abs().max() <= 1e-11


def test_kinds_say_what_m_holds() -> None:
    kinds = {
        ("residual", ()): "scalar",
        ("attnres", (("heads", 2),)): "head",
        ("highway", (("gate", "channel"),)): "channel",
        ("ddl", ()): "operator",
    }
    for (name, options), kind in kinds.items():
        probe = make_probe(name, dict(options))
        traced = dm.trace(probe.stack, probe.x, probe.sublayers)
        assert traced.kind == kind
        assert traced.label
        lead = {"scalar": (2, 3), "head": (2, 3, 2), "channel": (2, 3, 8), "operator": (2, 3)}[kind]
        assert traced.M.shape == (*lead, 8, 8)


def test_a_few_channels_can_be_kept() -> None:
    probe = make_probe("mrla", {})
    whole = dm.trace(probe.stack, probe.x, probe.sublayers)
    some = dm.trace(probe.stack, probe.x, probe.sublayers, channels=[1, 6])
    assert torch.equal(some.M, whole.M[..., [1, 6], :, :])
    assert some.channels == [1, 6]
    with pytest.raises(ValueError, match="without `channels`"):
        some.contributions(2)


@pytest.mark.parametrize("width", [1, 3])
def test_ddl_reports_contributions_gains_and_its_readout(width: int) -> None:
    probe = make_probe("ddl", {"value_width": width})
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    assert traced.parts is not None
    assert traced.parts.shape == (8, 8, 2, 3, 8)
    assert traced.M.triu(1).abs().max() == 0
    diagonal = traced.M.diagonal(dim1=-2, dim2=-1)
    assert (diagonal - 1).abs().max() <= 1e-12, "a write is there in full when it is first read"
    with pytest.raises(ValueError, match="operator-valued"):
        traced.rank()
    with pytest.raises(ValueError, match="operator-valued"):
        traced.effective_rank()
    params = dict(probe.stack.named_parameters())
    want = plain_ddl.readout_matrix(probe.x, probe.sublayers, params, value_width=width)
    assert (readout_matrix(traced.coefficients[:-1]) - want).abs().max() <= 1e-12


@pytest.mark.parametrize("name", ["attnres", "ddl", "mrla"])
def test_a_saved_trace_comes_back_whole(name: str, tmp_path: Path) -> None:
    probe = make_probe(name, {})
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    traced.save(tmp_path / "deep" / "trace.safetensors")
    back = dm.Trace.load(tmp_path / "deep" / "trace.safetensors")
    for field in ("M", "sources", "inputs"):
        assert torch.equal(getattr(back, field), getattr(traced, field))
    assert (back.kind, back.mechanism, back.options) == (traced.kind, traced.mechanism, traced.options)
    assert torch.equal(back.contributions(4), traced.contributions(4))
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["trace.safetensors"]


@EVERY_CASE
def test_a_trace_does_not_change_with_the_model(name: str, options: dict[str, Any]) -> None:
    probe = make_probe(name, options)
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    before = [*tensors_of(traced.coefficients)]
    copies = [t.clone() for t in before]
    with torch.no_grad():
        for parameter in probe.stack.parameters():
            parameter.add_(1)
    assert all(torch.equal(a, b) for a, b in zip(before, copies, strict=True))
    assert not any(t.requires_grad for t in before)


def tensors_of(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from tensors_of(part)


def test_low_precision_streams_are_rebuilt_to_their_precision() -> None:
    probe = make_probe("mhc", {}, dtype=torch.bfloat16)
    traced = dm.trace(probe.stack, probe.x, probe.sublayers)
    assert traced.M.dtype == torch.float32
    for row in range(8):
        rebuilt = traced.contributions(row).sum(0)
        assert (rebuilt - traced.inputs[row].float()).abs().max() <= 5e-2 * rebuilt.abs().max()
