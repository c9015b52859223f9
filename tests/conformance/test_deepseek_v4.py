"""transformers: the hyper-connection, the head and the decoder layer of its DeepSeek-V4.

depthmix's own parameters are handed to its modules, so gradients of both sides are with respect to the same tensors.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
    DeepseekV4PreTrainedModel,
)

import depthmix as dm
from tests.conformance.networks import (
    Network,
    Sublayer,
    difference,
    float_as_double,
    network,
    random_stack,
    reads,
)

PEER = "transformers"
SIZES = [((1, 1), 2, 1, 4), ((2, 3), 16, 7, 4), ((3, 1), 9, 5, 2), ((2, 2), 8, 12, 3)]  # leading, D, L, m
OPTIONS: list[dict[str, Any]] = [
    {"eps": 1e-6, "readout": "learned"},
    {"eps": 1e-3, "norm_eps": 1e-2, "readout": "learned", "iterations": 2},
    {"eps": 0.0, "readout": "mean", "iterations": 1},
    {"eps": 0.0, "readout": "sum", "iterations": 5},
]


def settings(stack: Any) -> Any:
    """All that their two modules ask of a configuration."""
    config = stack.config
    return SimpleNamespace(
        hc_mult=config.streams,
        hidden_size=stack.dim,
        hc_sinkhorn_iters=config.iterations,
        hc_eps=config.eps,
        rms_norm_eps=config.norm_eps,
    )


def parameters(mixer: Any) -> dict[str, Tensor]:
    """depthmix's parameters of a site under their names."""
    if not mixer.site.is_first:
        return {"fn": mixer.projection, "base": mixer.bias, "scale": mixer.scale}
    # Sublayer 1 of depthmix reads one source without coefficients: theirs gets m equal ones that sum to 1.
    m = mixer.config.streams
    equal = torch.logit(torch.full((m,), 1 / m - mixer.config.eps, dtype=torch.float64))
    return {
        "fn": torch.cat([torch.zeros_like(mixer.projection[:m]), mixer.projection]),
        "base": torch.cat([equal, mixer.bias]),
        "scale": torch.cat([torch.ones(1).double(), mixer.scale]),
    }


def head_parameters(stack: Any) -> dict[str, Tensor]:
    return {"hc_fn": stack.out.projection, "hc_base": stack.out.bias, "hc_scale": stack.out.scale}


def copies(x: Tensor, m: int) -> Tensor:
    """m streams of one embedding; theirs needs them contiguous."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], m, x.shape[-1]).contiguous()


def their_end(stack: Any, streams: Tensor) -> Tensor:
    if stack.config.readout == "learned":
        return functional_call(DeepseekV4HyperHead(settings(stack)).double(), head_parameters(stack), (streams,))
    return streams.mean(-2) if stack.config.readout == "mean" else streams.sum(-2)  # their model has the head only


def their_reads(stack: Any, net: Network) -> list[Tensor]:
    """h_1 … h_{L+1}; the update is their decoder layer's, which a test below runs itself."""
    module = DeepseekV4HyperConnection(settings(stack))
    streams, out = copies(net.x, stack.config.streams), []
    with float_as_double():
        for mixer, f in zip(stack, net.sublayers, strict=True):
            post, comb, h = functional_call(module, parameters(mixer), (streams,))
            out.append(h)
            streams = post.unsqueeze(-1) * f(h).unsqueeze(-2) + comb.transpose(-1, -2) @ streams
        return [*out, their_end(stack, streams)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("leading", "dim", "depth", "streams"), SIZES)
def test_every_read_of_mhc_is_theirs(
    leading: Any, dim: int, depth: int, streams: int, options: Any, agree: Any
) -> None:
    net = network(leading, dim, depth)
    stack = random_stack("mhc", dim=dim, depth=depth, streams=streams, scale_init=0.5, **options)
    agree("mhc, all reads", reads(stack, net), their_reads(stack, net), [*stack.parameters(), *net.leaves])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_coefficients_of_a_site_are_theirs(options: Any, agree: Any) -> None:
    stack = random_stack("mhc", dim=16, depth=3, scale_init=0.5, **options)
    mixer = stack[1]
    streams = torch.randn(2, 3, 4, 16, dtype=torch.float64) * torch.tensor([0.5, 1, 2, 3])[:, None]
    streams.requires_grad_()
    h, carry = mixer.read((streams,))
    with float_as_double():
        post, comb, collapsed = functional_call(
            DeepseekV4HyperConnection(settings(stack)), parameters(mixer), (streams,)
        )
    agree(
        "mhc, coefficients of a site",
        [h, carry.gain, carry.transition.mT],
        [collapsed, post, comb],
        [streams, *mixer.parameters()],
    )


class Branch(nn.Module):
    """Stands in a decoder layer where attention (which returns a pair) or the experts were."""

    def __init__(self, f: Sublayer, *, pair: bool) -> None:
        super().__init__()
        self.f, self.pair = f, pair

    def forward(self, h: Tensor, **kwargs: Any) -> Any:
        return (self.f(h), None) if self.pair else self.f(h)


def decoder_layer(config: Any, index: int, attention: Sublayer, experts: Sublayer) -> Any:
    """Their layer with these sublayers; all that it does with the streams is its own."""
    layer = DeepseekV4DecoderLayer(config, index)
    layer.self_attn, layer.mlp = Branch(attention, pair=True), Branch(experts, pair=False)
    layer.input_layernorm = layer.post_attention_layernorm = nn.Identity()
    return layer


def layer_parameters(attention: Any, experts: Any) -> dict[str, Tensor]:
    given = {f"attn_hc.{k}": v for k, v in parameters(attention).items()}
    return given | {f"ffn_hc.{k}": v for k, v in parameters(experts).items()}


def tiny_config(dim: int, layers: int) -> Any:
    return DeepseekV4Config(
        hidden_size=dim,
        num_hidden_layers=layers,
        vocab_size=32,
        moe_intermediate_size=8,
        num_attention_heads=2,
        head_dim=8,
        q_lora_rank=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
        o_groups=1,
        o_lora_rank=8,
        index_n_heads=1,
        index_head_dim=8,
        partial_rotary_factor=0.5,
    )


def test_their_decoder_layers_with_the_same_sublayers_give_the_same_output(agree: Any) -> None:
    # The layer holds the direction in which the matrix is applied.
    config, net = tiny_config(16, 3), network((2, 3), 16, 6)
    stack = random_stack(
        "mhc",
        dim=16,
        depth=6,
        streams=config.hc_mult,
        iterations=config.hc_sinkhorn_iters,
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
        readout="learned",
        scale_init=0.5,
    )
    streams = copies(net.x, config.hc_mult)
    with float_as_double():
        for index in range(0, 6, 2):
            layer = decoder_layer(config, index // 2, *net.sublayers[index : index + 2])
            streams = functional_call(layer, layer_parameters(stack[index], stack[index + 1]), (streams,))
        theirs = their_end(stack, streams)
    agree("mhc, 3 decoder layers and head", [stack(net.x, net.sublayers)], [theirs], [*stack.parameters(), *net.leaves])


def test_as_shipped_in_float32(agree: Any) -> None:
    stack = random_stack("mhc", dim=16, depth=3, dtype=torch.float32, eps=1e-6, scale_init=0.5, readout="learned")
    streams = torch.randn(2, 3, 4, 16)
    h, carry = stack[1].read((streams,))
    post, comb, collapsed = functional_call(
        DeepseekV4HyperConnection(settings(stack)), parameters(stack[1]), (streams,)
    )
    head = functional_call(DeepseekV4HyperHead(settings(stack)), head_parameters(stack), (streams,))
    ours = [h, carry.gain, carry.transition.mT, stack.end((streams,))]
    agree("mhc in float32, as shipped", ours, [collapsed, post, comb, head], list(stack[1].parameters()), 5e-6)


def test_their_defaults_are_the_ones_that_the_page_of_mhc_gives_for_deepseek() -> None:
    config = DeepseekV4Config()
    assert (config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps) == (4, 20, 1e-6)
    ours = dm.DepthStack("mhc", dim=2, depth=2).config
    assert (ours.streams, ours.iterations, ours.norm_eps) == (4, 20, config.rms_norm_eps)


@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_difference_their_eps_keeps_new_streams_from_being_convex_combinations_and_depthmix_starts_without(
    eps: float, pin: Any
) -> None:
    stack = random_stack("mhc", dim=16, depth=3, eps=eps, scale_init=0.5)
    streams = torch.randn(2, 3, 4, 16, dtype=torch.float64)
    with float_as_double():
        _, comb, _ = functional_call(DeepseekV4HyperConnection(settings(stack)), parameters(stack[1]), (streams,))
    ones = torch.ones(2, 3, 4, dtype=torch.float64)
    exact = random_stack("mhc", dim=16, depth=3, scale_init=0.5)[1].read((streams,))[1].transition
    assert exact.sum(-1).sub(1).abs().max() < 1e-12
    pin(f"sum of a new stream, hc_eps {eps:g}", difference([comb.sum(-2)], [ones]), eps)


def test_difference_their_first_sublayer_has_coefficients_to_read_one_source_and_depthmix_reads_it_as_it_is(
    pin: Any,
) -> None:
    stack = random_stack("mhc", dim=16, depth=3, eps=1e-6)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    given = parameters(stack[0])
    given["base"] = torch.cat([torch.zeros(4).double(), given["base"][4:]])  # as at their start: four halves
    with float_as_double():
        _, _, h = functional_call(DeepseekV4HyperConnection(settings(stack)), given, (copies(x, 4),))
    pin("h_1 with biases of 0 is the embedding times", (h / x).mean().item(), 2 + 4e-6, rel=1e-9)


def test_difference_their_start_is_not_the_prenorm_network_and_depthmix_has_one_that_is(pin: Any) -> None:
    torch.manual_seed(0)
    config = tiny_config(64, 1)
    module = DeepseekV4HyperConnection(config)
    owner = object.__new__(DeepseekV4PreTrainedModel)  # the rule that fills the parameters, without a model around it
    nn.Module.__init__(owner)
    owner.config = config
    owner._init_weights(module)
    assert (module.base.unique().tolist(), module.scale.unique().tolist()) == ([0.0], [1.0])
    x, y = torch.randn(64, 8, 64), torch.randn(64, 8, 64)
    _, _, h = module(copies(x, 4))
    fresh = dm.DepthStack("mhc", dim=64, depth=3, start="prenorm")[1]
    ours, carry = fresh.read((copies(x, 4),))
    (new,) = fresh.write((copies(x, 4),), carry, y)
    assert difference([ours, new], [x, copies(x + y, 4)]) < 1e-6
    pin("at its start: h is the stream times", (h / x).mean().item(), 2.0)


def test_difference_their_layer_rounds_coefficients_to_bfloat16_and_depthmix_rounds_the_new_streams_once(
    pin: Any,
) -> None:
    stack = random_stack("mhc", dim=16, depth=3, dtype=torch.float32, eps=1e-6, scale_init=0.5)
    mixer, exact_mixer = stack[1], copy.deepcopy(stack[1]).double()
    streams, y = torch.randn(64, 8, 4, 16).bfloat16(), torch.randn(64, 8, 16).bfloat16()
    layer, seen = decoder_layer(tiny_config(16, 1), 0, lambda h: y, lambda h: y), []
    layer.ffn_hc.register_forward_pre_hook(lambda _, given: seen.append(given[0]))  # the streams after attention
    with torch.no_grad():
        functional_call(layer, layer_parameters(mixer, mixer), (streams,))
        ours = mixer.write((streams,), mixer.read((streams,))[1], y)
        exact_carry = exact_mixer.read((streams.double(),))[1]
        exact = exact_mixer.write((streams.double(),), exact_carry, y.double())
    assert seen[0].dtype == ours[0].dtype == torch.bfloat16
    once = exact[0].bfloat16()
    assert (ours[0] != once).double().mean() < 5e-4  # sums in another order may fall on the other side of a tie
    errors = [(streams.double() - exact[0]).square().mean().sqrt() for streams in (seen[0], once)]
    pin("a step in bfloat16: error, in errors of one rounding", (errors[0] / errors[1]).item(), 1.7)
