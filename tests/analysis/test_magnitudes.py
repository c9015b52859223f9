"""Magnitudes over depth: hand-made networks of unit outputs, and every mechanism against a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm
from depthmix.analysis import measuring
from depthmix.analysis.invariants import make_probe
from tests.cases import EVERY_CASE

DEPTH = 7


def unit_outputs(name: Any, **options: Any) -> dict[str, Any]:
    """Magnitudes where the embedding is e_0 and sublayer l returns e_l, of every token."""
    basis = torch.eye(DEPTH + 1, dtype=torch.float64).expand(2, 3, -1, -1)  # [B, T, l, D]
    stack = dm.DepthStack(name, dim=DEPTH + 1, depth=DEPTH, **options).double()
    with measuring(stack) as found:
        stack(basis[..., 0, :], [lambda h, k=k: basis[..., k, :] for k in range(1, DEPTH + 1)])
    return found.to_dict()


def roots(*numbers: float) -> Any:
    return pytest.approx([number**0.5 for number in numbers], abs=1e-12)


@pytest.mark.parametrize("name", ["residual", "delta_attnres", "denseformer"])
def test_a_stream_of_unit_outputs_grows_with_the_root_of_depth(name: str) -> None:
    found = unit_outputs(name)
    assert found["embedding_norm"] == 1
    assert found["output_norm"] == [1] * DEPTH
    assert [norm for (norm,) in found["state_norm"]] == roots(*range(2, DEPTH + 2))
    assert found["contribution"] == roots(*(1 / n for n in range(2, DEPTH + 2)))
    if name != "delta_attnres":
        assert found["read_norm"] == roots(*range(1, DEPTH + 2))
    assert found["stream_distance"] is None


def test_the_partial_of_a_block_restarts_with_each_block() -> None:
    found = unit_outputs("block_attnres", block_sublayers=3)
    assert [norm for (norm,) in found["state_norm"]] == roots(1, 2, 3, 1, 2, 3, 1)
    assert found["contribution"] == roots(1, 1 / 2, 1 / 3, 1, 1 / 2, 1 / 3, 1)
    blocks = [[1], [1, 1], [1, 2], [1, 3], [1, 3, 1], [1, 3, 2], [1, 3, 3], [1, 3, 3, 1]]  # lengths of the sums
    assert found["read_norm"] == roots(*(sum(row) / len(row) ** 2 for row in blocks))


def test_full_attnres_keeps_each_output_as_it_is() -> None:
    found = unit_outputs("attnres")
    assert found["state_norm"] == [[1]] * DEPTH
    assert found["contribution"] == [1] * DEPTH
    assert found["read_norm"] == roots(*(1 / n for n in range(1, DEPTH + 2)))


class Alternating(dm.DepthMixer):
    """Three streams; an output goes to one of them in turn, and the sum is read."""

    @classmethod
    def facts(cls, config: Any, *, dim: int, depth: int) -> dm.Facts:
        return dm.Facts(preserves_prenorm="no", rank=None, parameters=0, reads=0, writes=0)

    def spec(self, site: dm.Site) -> dm.StateSpec:
        return dm.StateSpec(((3, site.dim),), essential=1, sealed=0)

    def begin(self, x: Tensor) -> dm.State:
        return (torch.stack([x, x, x], -2),)

    def combine(self, state: dm.State, c: Any) -> Tensor:
        return state[0].sum(-2)

    def update(self, state: dm.State, c: Any, v: Tensor) -> dm.State:
        chosen = torch.eye(3, dtype=v.dtype)[self.site.index % 3]
        return (state[0] + chosen[:, None] * v[..., None, :],)


def test_m_streams_have_m_norms_and_a_distance() -> None:
    found = unit_outputs(Alternating)
    counts = [[1 + (written - k + 2) // 3 for k in range(3)] for written in range(1, DEPTH + 1)]
    assert counts[:4] == [[2, 1, 1], [2, 2, 1], [2, 2, 2], [3, 2, 2]]
    for norms, distance, lengths in zip(found["state_norm"], found["stream_distance"], counts, strict=True):
        assert norms == roots(*lengths)
        # Streams i and j share the embedding and nothing else.
        apart = [lengths[i] - 1 + lengths[j] - 1 for i in range(3) for j in range(3) if i != j]
        assert distance == pytest.approx((sum(apart) / 6 / (sum(lengths) / 3)) ** 0.5, abs=1e-12)
    assert found["contribution"] == roots(*(3 / sum(lengths) for lengths in counts))


def test_equal_streams_have_no_distance() -> None:
    stack = dm.DepthStack("hyper_connections", dim=4, depth=3, streams=2, dynamic=False).double()
    with torch.no_grad():
        for mixer in stack:
            mixer.alpha_r.copy_(torch.eye(2))
            mixer.beta.fill_(1)
    with measuring(stack) as found:
        stack(torch.randn(5, 4).double(), [torch.tanh] * 3)
    assert found.to_dict()["stream_distance"] == pytest.approx([0] * 3, abs=1e-7)


def root_mean_square(x: Tensor) -> float:
    return float((x.detach() ** 2).sum(-1).mean() ** 0.5)


@EVERY_CASE
def test_norms_and_gradients_are_those_of_a_plain_loop(name: str, options: dict[str, Any]) -> None:
    """Of h and v the gradients with respect to something that is added to them: nothing else of the graph counts."""
    probe = make_probe(name, options, depth=5)
    state, reads, outputs, kept, added = probe.stack.begin(probe.x), [], [], [], []

    def with_zero(x: Tensor) -> Tensor:
        added.append(torch.zeros_like(x, requires_grad=True))
        return x + added[-1]

    for mixer, sublayer in probe.stack.pairs(probe.sublayers):
        h, carry = mixer.read(state)
        reads.append(with_zero(h))
        outputs.append(with_zero(sublayer(reads[-1])))
        state = mixer.write(state, carry, outputs[-1])
        kept.append(state)
    reads.append(with_zero(probe.stack.end(state)))
    gradients = [root_mean_square(g) for g in torch.autograd.grad(reads[-1].cos().sum(), added)]

    with measuring(probe.stack) as found:
        probe.run().cos().sum().backward()
    line = found.to_dict()
    assert line["read_norm"] == pytest.approx([root_mean_square(h) for h in reads])
    assert line["output_norm"] == pytest.approx([root_mean_square(v) for v in outputs])
    assert line["read_gradient_norm"] == pytest.approx(gradients[::2])
    assert line["gradient_norm"] == pytest.approx(gradients[1::2])
    assert all(norms for norms in line["state_norm"])
    if name in ("residual", "highway", "scaled_residual"):
        assert [norm for (norm,) in line["state_norm"]] == pytest.approx([root_mean_square(s[0]) for s in kept])
    if name in ("hyper_connections", "mhc", "mhc_lite"):
        streams = [[root_mean_square(s[0][..., j, :]) for j in range(s[0].shape[-2])] for s in kept]
        assert line["state_norm"] == [pytest.approx(norms) for norms in streams]


def test_measuring_leaves_the_stack_as_it_was() -> None:
    probe = make_probe("block_attnres", {})
    before, keys = probe.run(), [set(vars(m)) for m in probe.stack.modules()]
    with measuring(probe.stack):
        assert torch.equal(probe.run(), before)
    assert [set(vars(m)) for m in probe.stack.modules()] == keys
