"""hyper-connections (lucidrains): its `mHC`, which is another function than the paper's, and its Sinkhorn iteration.

What compares exactly is compared; where it parts from the paper, the tests say by how much. depthmix follows the
paper in the order and direction of DeepSeek's code.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hyper_connections import mHC
from hyper_connections.manifold_constrained_hyper_connections import log_domain_sinkhorn_knopps, sinkhorn_knopps
from torch import Tensor, nn
from torch.func import functional_call

import depthmix as dm
from tests.conformance.networks import difference, float_as_double, fold, unfold

PEER = "hyper-connections"
M, D = 4, 16


class Step(nn.Module):
    """One site of depthmix as a module: streams and an output give what is read and the new streams."""

    def __init__(self, iterations: int) -> None:
        super().__init__()
        stack = dm.DepthStack("mhc", dim=D, depth=3, streams=M, iterations=iterations, eps=0.0, norm_eps=1e-30)
        self.mixer = stack.double()[1]

    def forward(self, streams: Tensor, y: Tensor) -> list[Tensor]:
        h, carry = self.mixer.read((streams,))
        return [h, *self.mixer.write((streams,), carry, y)]


def their_module(iterations: int) -> Any:
    torch.manual_seed(3)
    module = mHC(M, dim=D, layer_index=1, sinkhorn_iters=iterations).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.add_((0.3 if "scale" in name else 1.0) * torch.randn_like(parameter))
    return module


def their_step(module: Any, streams: Tensor, y: Tensor) -> list[Tensor]:
    with float_as_double():
        h, add = module(fold(streams))
        return [h, unfold(add(y), M)]


def as_depthmix(module: Any) -> dict[str, Tensor]:
    """Their projections of one stream each as depthmix's projection of all: zero outside a block."""
    gain, weight, w_b = module.norm.gamma + 1, module.dynamic_alpha_fn[0], module.dynamic_beta_fn
    blocks = torch.eye(M).double()  # row j of the coefficients sees stream j
    rows = [torch.outer(blocks[j], gain * weight[:, 0]) for j in range(M)]
    rows += [torch.outer(blocks[j], gain * w_b) for j in range(M)]
    rows += [torch.outer(blocks[j], gain * weight[:, 1 + i]) for j in range(M) for i in range(M)]
    alpha, scales = module.static_alpha, (module.pre_branch_scale, module.h_post_scale, module.residual_scale)
    return {
        "mixer.projection": torch.stack(rows).flatten(1),
        "mixer.bias": torch.cat([alpha[:, 0], module.static_beta, alpha[:, 1:].flatten()]),
        "mixer.scale": torch.stack([a.squeeze() for a in scales]),
    }


def streams_and_output(sizes: list[float]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    streams = dm.ops.rms_norm(torch.randn(2, 3, M, D).double(), 1e-30) * torch.tensor(sizes).double()[:, None]
    return streams, torch.randn(2, 3, D).double()


@pytest.mark.parametrize("theirs", [sinkhorn_knopps, log_domain_sinkhorn_knopps])
@pytest.mark.parametrize("iterations", [1, 2, 3, 20])
@pytest.mark.parametrize(("size", "spread"), [(2, 1.0), (4, 1.0), (4, 4.0), (7, 2.0)])
def test_sinkhorn_is_the_transpose_of_theirs(
    theirs: Any, iterations: int, size: int, spread: float, agree: Any
) -> None:
    torch.manual_seed(size)
    logits = (spread * torch.randn(50, size, size).double()).requires_grad_()
    with float_as_double():
        found = theirs(logits.mT, iterations).mT
    agree("ops.sinkhorn, transposed", [dm.ops.sinkhorn(logits, iterations)], [found], [logits])


def test_one_step_of_mhc_is_theirs_for_streams_of_equal_size_once_sinkhorn_has_converged(agree: Any) -> None:
    module = their_module(iterations=300)
    streams, y = streams_and_output([1.0] * M)
    ours = functional_call(Step(300), as_depthmix(module), (streams, y))
    agree("mhc, one step", ours, their_step(module, streams, y), list(module.parameters()))


def test_difference_they_normalise_each_stream_alone_and_the_paper_all_streams_jointly(pin: Any) -> None:
    module = their_module(iterations=300)
    streams, y = streams_and_output([0.5, 1.0, 2.0, 3.0])
    ours = functional_call(Step(300), as_depthmix(module), (streams, y))
    theirs = their_step(module, streams, y)
    pin("mHC: h from streams of rms .5, 1, 2, 3", difference(ours[:1], theirs[:1]), 0.102)


@pytest.mark.parametrize(("spread", "expected"), [(1.0, 3.9e-4), (4.0, 6.8e-2), (8.0, 0.136)])
def test_difference_new_streams_are_not_convex_combinations_before_their_sinkhorn_has_converged(
    spread: float, expected: float, pin: Any
) -> None:
    # Equal streams must stay equal. Their rows are exact, which is what a stream gives away; the paper's and
    # depthmix's exact sums are those of what a new stream is made of.
    torch.manual_seed(0)
    logits = spread * torch.randn(1000, M, M).double()
    equal = torch.ones(1000, M, 1).double()
    with float_as_double():
        theirs = sinkhorn_knopps(logits, 20).mT @ equal
    ours = dm.ops.sinkhorn(logits, 20).mT @ equal
    assert difference([ours], [equal]) < 1e-12
    pin(f"mHC: sum of a new stream, 20 iterations, logits of std {spread:g}", difference([theirs], [equal]), expected)


def test_difference_the_module_itself_parts_equal_streams(pin: Any) -> None:
    # The same through the whole module, at 3 iterations: y = 0, all streams equal.
    module = their_module(iterations=3)
    stream, _ = streams_and_output([1.0] * M)
    equal, zero = stream[..., :1, :].expand_as(stream).contiguous(), torch.zeros(2, 3, D).double()
    ours = functional_call(Step(3), as_depthmix(module), (equal, zero))[1]
    theirs = their_step(module, equal, zero)[1]
    assert difference([ours], [equal]) < 1e-12
    pin("mHC: equal streams after a step, 3 iterations", difference([theirs], [equal]), 3.7e-3)


def test_difference_their_start_is_not_the_prenorm_network_and_depthmix_has_one_that_is(pin: Any) -> None:
    module = mHC(M, dim=D, layer_index=1).double()
    stream, y = streams_and_output([1.0] * M)
    equal = stream[..., :1, :].expand_as(stream).contiguous()
    fresh = dm.DepthStack("mhc", dim=D, depth=3, start="prenorm").double()[1]
    h, carry = fresh.read((equal,))
    new = fresh.write((equal,), carry, y)
    # ln 3 was rounded to float32 when the parameters were made
    assert difference([h, *new], [equal[..., 0, :], equal + y[..., None, :]]) < 1e-7
    their_h, their_new = their_step(module, equal, y)
    pin("mHC at its start: h is the stream times", (their_h / equal[..., 0, :]).mean().item(), 2.2311, rel=1e-4)
    gain = ((their_new - equal) / y[..., None, :]).mean().item()
    pin("mHC at its start: y is written times", gain, 1.4621, rel=1e-4)
