"""hyper-connections (lucidrains): `HyperConnections`, one module a sublayer, streams folded into the batch axis.

depthmix's own parameters are handed to its modules, so gradients of both sides are with respect to the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hyper_connections import HyperConnections
from torch import Tensor
from torch.func import functional_call

import depthmix as dm
from tests.conformance.networks import Network, difference, fold, network, random_stack, reads, unfold

PEER = "hyper-connections"
SIZES = [((1,), 2, 1, 4), ((2, 3), 16, 7, 4), ((3,), 9, 5, 2), ((2, 1, 2), 8, 12, 3), ((2, 3), 8, 4, 1)]  # D, L, m
KINDS: list[dict[str, bool]] = [{"dynamic": False}, {}, {"tanh": False}]
NO_EPS = 1e-30  # theirs divides by the norm itself; depthmix wants an eps above 0


def module(mixer: Any) -> Any:
    config, site = mixer.config, mixer.site
    return HyperConnections(config.streams, dim=site.dim, layer_index=site.index, tanh=config.tanh).double()


def parameters(mixer: Any, transition: Tensor | None = None) -> dict[str, Tensor]:
    """depthmix's parameters of a site under their names; `transition` in the place of A_r, where given."""
    m, dim = mixer.config.streams, mixer.site.dim
    # Sublayer 1 of depthmix reads one source without coefficients; e_0 makes theirs read it as it is.
    read = torch.eye(m).double()[0] if mixer.alpha_m is None else mixer.alpha_m
    a_r = mixer.alpha_r if transition is None else transition
    found = {"static_alpha": torch.cat([read[:, None], a_r], 1), "static_beta": mixer.beta}
    if mixer.norm_weight is not None:
        w_m = torch.zeros(dim).double() if mixer.w_m is None else mixer.w_m
        found["norm.gamma"] = mixer.norm_weight - 1
        found["dynamic_alpha_fn"] = torch.cat([w_m[:, None], mixer.w_r], 1)
        found["dynamic_alpha_scale"] = mixer.s_a.squeeze()
        found["dynamic_beta_fn"] = mixer.w_b
        found["dynamic_beta_scale"] = mixer.s_b.squeeze()
    return found  # the others stay at their start: no dynamic part


def their_reads(stack: Any, net: Network, transition: Callable[[Tensor], Tensor] = lambda a: a) -> list[Tensor]:
    """h_1 … h_{L+1}, with the static part of every A_r changed by `transition`."""
    expand, reduce = HyperConnections.get_expand_reduce_stream_functions(stack.config.streams)
    streams, out = expand(net.x), []
    for mixer, f in zip(stack, net.sublayers, strict=True):
        h, add = functional_call(module(mixer), parameters(mixer, transition(mixer.alpha_r)), (streams,))
        out.append(h)
        streams = add(f(h))
    return [*out, reduce(streams)]


def one_step(kind: dict[str, bool], eps: float, scale: float = 1.0) -> tuple[Any, list[Tensor], list[Tensor]]:
    """A mixer that is not the first, and (h, new streams) of both from streams of unequal size."""
    mixer = random_stack("hyper_connections", dim=16, depth=3, eps=eps, **kind)[1]
    streams = scale * torch.randn(2, 3, 4, 16, dtype=torch.float64) * torch.tensor([0.5, 1, 2, 3])[:, None]
    y = scale * torch.randn(2, 3, 16, dtype=torch.float64)
    h, carry = mixer.read((streams,))
    (new,) = mixer.write((streams,), carry, y)
    their_h, add = functional_call(module(mixer), parameters(mixer), (fold(streams),))
    return mixer, [h, new], [their_h, unfold(add(y), 4)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("leading", "dim", "depth", "streams"), SIZES)
def test_every_read_of_hyper_connections_is_theirs(
    leading: Any, dim: int, depth: int, streams: int, kind: Any, agree: Any
) -> None:
    net = network(leading, dim, depth)
    stack = random_stack("hyper_connections", dim=dim, depth=depth, streams=streams, readout="sum", eps=NO_EPS, **kind)
    what = "static" if "dynamic" in kind else "dynamic" + ("" if "tanh" not in kind else " without tanh")
    theirs = their_reads(stack, net)
    agree(f"hyper_connections {what}, all reads", reads(stack, net), theirs, [*stack.parameters(), *net.leaves])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_step_from_streams_of_unequal_size_is_theirs(kind: Any, agree: Any) -> None:
    mixer, ours, theirs = one_step(kind, NO_EPS)
    agree("hyper_connections, one step", ours, theirs, list(mixer.parameters()))


def test_fresh_stacks_are_the_same_network_without_copying_anything(agree: Any) -> None:
    net = network((2, 3), 16, 7)
    stack = dm.DepthStack("hyper_connections", dim=16, depth=7, readout="sum").double()
    expand, reduce = HyperConnections.get_expand_reduce_stream_functions(4)
    streams, theirs = expand(net.x), []
    for index, f in enumerate(net.sublayers):
        h, add = HyperConnections(4, dim=16, layer_index=index).double()(streams)
        theirs.append(h)
        streams = add(f(h))
    agree("hyper_connections at its start, all reads", reads(stack, net), [*theirs, reduce(streams)], net.leaves)


def test_the_comparison_would_notice_a_transition_that_is_left_out_or_transposed() -> None:
    # Releases before 0.3.10 returned the streams unmixed; a transposed matrix is the other likely slip.
    net = network((2, 3), 16, 2)
    stack = random_stack("hyper_connections", dim=16, depth=2, readout="sum", eps=NO_EPS, dynamic=False)
    ours = reads(stack, net)
    for wrong in (lambda a: torch.eye(4).double(), lambda a: a.mT):
        assert difference(ours, their_reads(stack, net, wrong)) > 0.01
    assert difference(ours, their_reads(stack, net)) < 1e-12


@pytest.mark.parametrize(("size", "expected"), [(1.0, 2.1e-7), (1e-2, 2.0e-3), (1e-3, 5.2e-2)])
def test_difference_their_norm_has_no_eps_and_that_of_depthmix_has_1e_6(size: float, expected: float, pin: Any) -> None:
    _, ours, theirs = one_step({}, 1e-6, size)
    _, same, again = one_step({}, NO_EPS, size)
    assert difference(theirs, again) == 0
    assert difference(same, theirs) < 1e-12  # nothing but eps is behind it
    pin(f"norm without eps, streams times {size:g}", difference(ours, theirs), expected)


def test_difference_their_first_sublayer_has_coefficients_to_read_one_source_and_depthmix_reads_it_as_it_is(
    pin: Any,
) -> None:
    net = network((2, 3), 16, 7)
    stack = random_stack("hyper_connections", dim=16, depth=7, readout="sum", dynamic=False)
    alpha = torch.tensor([0.4, -0.3, 0.7, 0.5], dtype=torch.float64)
    first = stack[0]
    expand, _ = HyperConnections.get_expand_reduce_stream_functions(4)
    given = {**parameters(first), "static_alpha": torch.cat([alpha[:, None], first.alpha_r], 1)}
    h, _ = functional_call(module(first), given, (expand(net.x),))
    torch.testing.assert_close(h, alpha.sum() * net.x, rtol=0, atol=1e-12)  # a number that can go into the sublayer
    assert torch.equal(reads(stack, net)[0], net.x)
    pin("h_1 with read coefficients that sum to 1.3", difference([h], [net.x]), 0.3)


def test_difference_both_have_an_rmsnorm_where_the_paper_has_a_layernorm(pin: Any) -> None:
    mixer = random_stack("hyper_connections", dim=16, depth=3, eps=NO_EPS)[1]
    streams = torch.randn(2, 3, 4, 16, dtype=torch.float64)
    width = module(mixer)
    width.load_state_dict(parameters(mixer))
    theirs = width.width_connection(fold(streams))[2]["beta"].squeeze(-1).squeeze(-2)
    assert difference([mixer.coeff((streams,)).gain], [theirs]) < 1e-12
    centred = streams - streams.mean(-1, keepdim=True)  # the RMSNorm of this is the LayerNorm of the streams
    pin("B with LayerNorm, streams of mean near 0", difference([mixer.coeff((centred,)).gain], [theirs]), 0.296)


def test_difference_they_mix_in_the_dtype_of_the_parameters_and_depthmix_in_float32_whatever_the_stream() -> None:
    mixer = random_stack("hyper_connections", dim=16, depth=3, dtype=torch.float32)[1]
    streams = torch.randn(2, 3, 4, 16).bfloat16()
    theirs = HyperConnections(4, dim=16, layer_index=1)
    with pytest.raises(RuntimeError, match="BFloat16"):
        theirs(fold(streams))
    h, carry = mixer.read((streams,))
    assert h.dtype == torch.bfloat16
    assert carry.read.dtype == torch.float32
