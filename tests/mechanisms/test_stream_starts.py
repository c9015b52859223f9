"""Starts of mechanisms with several streams: M by hand, PreNorm kept, streams that part, controls of the same scale.

The parameters themselves are in test_starts.
"""

from __future__ import annotations

import math
import typing
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import depthmix as dm
from depthmix.analysis.invariants import Probe, check_start, make_probe
from depthmix.models import Decoder, DecoderConfig
from tests.decoders import some_tokens, tiny_config
from tests.mechanisms.test_starts import gate, start_biases, start_writes

NAMES = ("mhc", "mhc_lite", "hyper_connections")
STARTS = {name: typing.get_args(typing.get_type_hints(dm.mechanism(name).Config)["start"]) for name in NAMES}
EVERY_NAME = pytest.mark.parametrize("name", NAMES)
EVERY_START = pytest.mark.parametrize(("name", "start"), [(name, start) for name in NAMES for start in STARTS[name]])
EXACT = [(name, start) for name in NAMES for start in ("prenorm", "parted", "hyper")]


def fresh(name: str, depth: int = 9, **options: Any) -> Probe:
    return make_probe(name, options, depth=depth, spread=0)


def static(probe: Probe) -> Probe:
    """Without the small random part that "megatron" starts with."""
    with torch.no_grad():
        for key, parameter in probe.stack.named_parameters():
            if key.endswith(".scale"):
                parameter.zero_()
    return probe


def matrix(probe: Probe) -> Tensor:
    """M of the first token."""
    return dm.trace(probe.stack, probe.x, probe.sublayers).M[0, 0]


def streams(probe: Probe, after: int) -> Tensor:
    """[m, D] of the first token, after so many writes."""
    return probe.states()[after][0][0, 0].detach()


def distance(found: Tensor) -> float:
    """The least distance between two streams, relative to their mean."""
    between = torch.cdist(found, found) + torch.eye(len(found)) * 1e9
    return float(between.min() / found.mean(0).norm())


def hand_matrix(name: str, start: str, m: int, depth: int) -> Tensor:
    """M in plain loops from the page's table: H[j] holds what stream j has of each source."""
    apart = {"lite": -8, "paper": -8, "hyper": -8, "megatron": 0, "lucidrains": -1}.get(start, -5)
    if name == "mhc_lite":
        shared = math.factorial(m - 1) * math.exp(0 if start == "megatron" else -8)
        moved = shared / (1 + (math.factorial(m) - 1) * math.exp(0 if start == "megatron" else -8))
    elif name == "mhc":
        moved = math.exp(apart) / (1 + (m - 1) * math.exp(apart))
    else:
        moved = 1 / m if start == "megatron" else 0
    H = [[1.0] + [0.0] * depth for _ in range(m)]
    rows = [H[0]]
    for ell in range(1, depth + 1):
        if ell > 1:
            reads = [gate(bias) for bias in start_biases(start, m, ell)[0]]
            rows.append([sum(reads[j] * H[j][i] for j in range(m)) for i in range(depth + 1)])
        written = start_writes(start, m, ell, None)
        total = [sum(H[j][i] for j in range(m)) for i in range(depth + 1)]
        H = [
            [moved * total[i] + (1 - m * moved) * H[j][i] + (i == ell) * written[j] for i in range(depth + 1)]
            for j in range(m)
        ]
    rows.append([sum(H[j][i] for j in range(m)) / m for i in range(depth + 1)])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("m", [2, 3, 4])
@EVERY_START
def test_the_matrix_at_the_start_is_the_one_computed_by_hand(name: str, start: str, m: int) -> None:
    found = matrix(static(fresh(name, start=start, streams=m)))
    assert (found - hand_matrix(name, start, m, 9)).abs().max() <= 1e-13


@EVERY_START
def test_the_facts_say_what_a_start_is(name: str, start: str) -> None:
    for options in ({}, {"streams": 2}, {"readout": "sum"}, {"output_scale": 1.0}, {"output_scale": 0.5}):
        for depth in (1, 2, 7):
            probe = fresh(name, depth, start=start, **options)
            assert all(check.holds for check in check_start(name, {"start": start, **options}, probe))


def test_the_starts_that_keep_prenorm_are_known_by_name() -> None:
    found = [
        (name, start)
        for name in NAMES
        for start in STARTS[name]
        if dm.DepthStack(name, dim=4, depth=6, start=start).facts.preserves_prenorm == "exact"
    ]
    assert sorted(found) == sorted(EXACT)


@pytest.mark.parametrize(("name", "start"), EXACT)
@torch.no_grad()
def test_a_network_that_keeps_prenorm_is_the_residual_network(name: str, start: str) -> None:
    for m in (2, 3, 4, 5):
        probe = fresh(name, start=start, streams=m)
        plain = dm.DepthStack("residual", dim=8, depth=9)(probe.x, probe.sublayers)
        assert (probe.run() - plain).abs().max() <= 1e-12 * plain.abs().max()


@pytest.mark.parametrize(("name", "start"), EXACT)
@torch.no_grad()
def test_a_decoder_retrofitted_with_it_gives_the_same_logits(name: str, start: str) -> None:
    torch.manual_seed(0)
    plain = Decoder(tiny_config(mixer="residual")).double()
    changed = Decoder(tiny_config(mixer={"name": name, "start": start})).double()
    changed.depth.reset_parameters()  # the start in float64
    own = {key: value for key, value in changed.state_dict().items() if key.startswith("depth.")}
    changed.load_state_dict({**plain.state_dict(), **own})
    wanted, found = plain(some_tokens(2, 9)), changed(some_tokens(2, 9))
    assert (found - wanted).abs().max() <= 1e-12 * wanted.abs().max()


@EVERY_NAME
def test_only_some_streams_differ_at_the_start(name: str) -> None:
    apart = {start: distance(streams(fresh(name, start=start), after=3)) for start in STARTS[name]}
    equal = {"prenorm", "scaled", "hyper", "megatron", "lucidrains"} & apart.keys()
    assert all(apart[start] <= 0.01 for start in equal), apart  # megatron: 0.01 of a random part
    assert all(apart[start] >= 0.1 for start in apart.keys() - equal), apart


@settings(max_examples=12, deadline=None)
@given(m=st.integers(2, 12), name=st.sampled_from(["mhc", "hyper_connections"]), seed=st.integers(0, 99))
def test_any_number_of_streams_parts_within_one_round(m: int, name: str, seed: int) -> None:
    probe = make_probe(name, {"start": "parted", "streams": m}, dim=16, depth=2 * m, spread=0, seed=seed)
    ones = torch.ones(2 * m + 1, 2 * m + 1, dtype=torch.float64).tril()
    assert (matrix(probe) - ones).abs().max() <= 1e-13
    found = streams(probe, after=max(2, m - 1))
    assert distance(found) >= 0.05
    directions = torch.linalg.svdvals(found - found.mean(0))[: m - 1]
    assert directions.min() >= 1e-3 * directions.max(), "the streams differ in all ways that keep their mean"
    gains = [mixer.coeff(state).gain[0, 0] for mixer, state in zip(probe.stack, probe.states()[:-1], strict=True)]
    mean = torch.stack(gains[: 2 * (m - 1)]).mean(0)
    assert (mean - 1).abs().max() <= 1e-12, "after two rounds no stream is ahead of the others"


def trained(name: str, start: str) -> Tensor:
    """M after 20 steps of a small network."""
    torch.manual_seed(0)
    stack = dm.DepthStack(name, dim=16, depth=8, start=start).double()
    parts = [nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(8)]
    network = stack.bind(parts).double()
    x = torch.randn(32, 16, dtype=torch.float64)
    wanted = torch.sin(2 * x.roll(1, -1)) * x.roll(3, -1)
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(20):
        optimiser.zero_grad()
        (nn.functional.rms_norm(network(x), (16,)) - wanted).square().mean().backward()
        optimiser.step()
    return dm.trace(stack, x[:4], parts).M


@EVERY_NAME
def test_streams_that_differ_gain_rank_in_a_few_steps_and_equal_ones_do_not(name: str) -> None:
    ranks = {start: int(dm.semiseparable_rank(trained(name, start), tol=1e-2).max()) for start in ("prenorm", "parted")}
    assert ranks["prenorm"] == 1
    assert ranks["parted"] >= 2


# The scale of outputs, told apart from the streams


@EVERY_NAME
@torch.no_grad()
def test_the_control_has_the_scale_of_lite_and_equal_streams(name: str) -> None:
    scale = (2 * gate(1) + 6 * gate(-1)) / 4
    assert scale == pytest.approx(0.76894, abs=1e-5)
    lite, control = matrix(fresh(name, start="lite")), matrix(fresh(name, start="scaled"))
    for last in (lite[-1], control[-1]):
        assert last[0] == pytest.approx(1)
        assert last[1:].tolist() == pytest.approx([scale] * 9)
    shares = lite[4:8, 1:5] / lite[4:8, :1]  # four reads, each in another turn, of four outputs
    assert float(shares.mean()) == pytest.approx(scale, abs=0.01)
    assert float((shares - scale).abs().max()) > 0.05
    probe = fresh(name, start="scaled")
    plain = dm.DepthStack("scaled_residual", dim=8, depth=9, init=scale).double()
    plain.reset_parameters()
    wanted = plain(probe.x, probe.sublayers)
    assert (probe.run() - wanted).abs().max() <= 1e-12 * wanted.abs().max()


@EVERY_START
def test_an_output_scale_is_the_mean_of_what_is_written(name: str, start: str) -> None:
    last = matrix(static(fresh(name, start=start, output_scale=0.6)))[-1]
    assert last[0] == pytest.approx(1)
    assert last[1:].tolist() == pytest.approx([0.6] * 9)


def test_an_output_scale_that_no_gate_reaches_is_refused() -> None:
    most = 2 / (1 + math.tanh(1))
    for name in ("mhc", "mhc_lite"):
        words = rf"{name}: output_scale=1\.2 with start='parted' and 4 streams; expected a number below {most:.4g}"
        with pytest.raises(ValueError, match=words):
            dm.DepthStack(name, dim=4, depth=2, start="parted", output_scale=1.2)
        dm.DepthStack(name, dim=4, depth=2, start="parted", output_scale=1.13)
    dm.DepthStack("hyper_connections", dim=4, depth=2, start="parted", output_scale=5.0)
    for name in NAMES:
        with pytest.raises(ValueError, match=r"output_scale=0\.0; expected a number above 0"):
            dm.DepthStack(name, dim=4, depth=2, output_scale=0.0)


# Options and files


def test_an_explicit_input_scale_prevails_over_that_of_the_start() -> None:
    for start, own in (("prenorm", 0.0), ("parted", 0.0), ("lite", 0.01), ("megatron", 0.01)):
        for given_scale in (None, 0.0, 0.25):
            stack = dm.DepthStack("mhc", dim=4, depth=3, start=start, scale_init=given_scale)
            want = own if given_scale is None else given_scale
            assert all(
                p.tolist() == pytest.approx([want] * len(p)) for k, p in stack.named_parameters() if "scale" in k
            )
    assert dm.DepthStack("mhc", dim=4, depth=3, start="parted", scale_init=0.01).facts.preserves_prenorm == "no"
    assert (
        dm.DepthStack("mhc", dim=4, depth=3, start="megatron", scale_init=0.0).facts.preserves_prenorm == "up to scale"
    )


@EVERY_NAME
def test_a_state_dict_loads_over_another_start(name: str) -> None:
    source = dm.DepthStack(name, dim=4, depth=4, start="lite", output_scale=0.9)
    for start in STARTS[name]:
        target = dm.DepthStack(name, dim=4, depth=4, start=start)
        target.load_state_dict(source.state_dict())
        assert torch.equal(target[2].state_dict().popitem()[1], source[2].state_dict().popitem()[1])


def test_the_paper_of_mhc_lite_is_lite_and_keeps_its_digest() -> None:
    first, second = (dm.DepthStack("mhc_lite", dim=4, depth=4, start=start) for start in ("lite", "paper"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    config = DecoderConfig.from_depth(12, mixer={"name": "mhc_lite", "start": "lite"})
    assert config.fingerprint()["mixer"] == {"name": "mhc_lite", "start": "paper"}


def test_defaults_say_nothing_in_the_fingerprint_of_a_run() -> None:
    """What 0.1.0 wrote, so that its runs keep their digests."""
    for name, options in (("mhc", {}), ("mhc", {"scale_init": 0.01}), ("mhc_lite", {}), ("hyper_connections", {})):
        old = {"mhc": "prenorm", "mhc_lite": "prenorm", "hyper_connections": "hyper"}[name]
        config = DecoderConfig.from_depth(12, mixer={"name": name, "start": old, **options})
        assert config.fingerprint()["mixer"] == {"name": name, **options}


def test_another_start_of_a_file_brings_its_own_input_scale() -> None:
    saved = DecoderConfig.from_depth(12, mixer={"name": "mhc", "start": "parted"}).saved()
    assert (saved["mixer"]["start"], saved["mixer"]["scale_init"]) == ("parted", 0.0)
    options = DecoderConfig.from_saved(saved, 2).mixer.options
    again = DecoderConfig.from_depth(12, mixer={"name": "mhc", **options, "start": "lite"})
    assert again.saved()["mixer"]["scale_init"] == 0.01


@torch.no_grad()
def test_without_mixing_mhc_lite_is_mhc() -> None:
    lite = make_probe("mhc_lite", {"transition": "identity"})
    assert lite.stack.facts.parameters == sum(p.numel() for p in lite.stack.parameters())
    assert lite.stack.facts.parameters == 7 * (8 * 33 + 2) - (4 * 33 + 1)
    full = dm.DepthStack("mhc", dim=8, depth=7, transition="identity").double()
    full.load_converted(lite.stack.state_dict())
    assert torch.equal(full(lite.x, lite.sublayers), lite.run())
    with pytest.raises(RuntimeError, match="size mismatch"):
        dm.DepthStack("mhc_lite", dim=8, depth=7).double().load_state_dict(lite.stack.state_dict())
