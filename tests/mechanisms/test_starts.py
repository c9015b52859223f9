"""Where every parameter starts, as the tables of docs/mechanisms say it: names, places, shapes and values.

Each function below is a page: its arguments are the options that decide a start, with their defaults, its rows the
page's parameters. Sublayers ell are counted from 1, as on the pages; L + 1 stands for the output. A parameter without a
row fails, and so does a row without a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm
from depthmix.mechanisms import kv_mechanism
from depthmix.mechanisms.registry import DEPTH, KV
from tests.cases import ALL, label

D, L = 256, 7
EVERY = range(1, L + 1)  # every sublayer
LATER = range(2, L + 1)  # sublayers ell ≥ 2
READS = range(2, L + 2)  # sublayers ell ≥ 2 and the output
FIRST, OUT = [1], [L + 1]


@dataclass(frozen=True)
class Normal:
    """Independent normal numbers; the first rows may be 0."""

    std: float
    zero_rows: int = 0


@dataclass(frozen=True)
class Row:
    name: str
    where: Iterable[int]
    shape: tuple[int, ...] | Callable[[int], tuple[int, ...]]
    start: Any  # a number, a (nested) list, Normal, or one of these as a function of ell


def residual() -> list[Row]:
    return []


def scaled_residual(*, gate: str = "scalar", init: float | None = None, **_: Any) -> list[Row]:
    width, start = {"scalar": (1, 0.0), "channel": (D, 0.1)}[gate]  # 0.1: 4 Transformer blocks
    return [Row("scale", EVERY, (width,), start if init is None else init)]


def highway(*, gate: str = "scalar", bias: float = -2.0, **_: Any) -> list[Row]:
    width = {"scalar": 1, "channel": D}[gate]
    return [Row("weight", EVERY, (width, D), 0), Row("bias", EVERY, (width,), bias)]


def denseformer(*, dilation: int = 1, period: int = 1, block_sublayers: int = 2, **_: Any) -> list[Row]:
    starts: dict[tuple[int, int, int], dict[int, list[float]]] = {  # by ell, of L = 7 sublayers
        (1, 1, 2): {3: [0, 1], 5: [0, 0, 1], 7: [0, 0, 0, 1], 8: [0, 0, 0, 0, 1]},
        (2, 1, 2): {3: [1], 5: [0, 1], 7: [0, 1], 8: [0, 0, 1]},
        (1, 2, 2): {5: [0, 0, 1], 8: [0, 0, 0, 0, 1]},
        (2, 3, 2): {7: [0, 1]},
        (1, 1, 1): {ell: [0] * (ell - 1) + [1] for ell in READS},
        (1, 1, 3): {4: [0, 1], 7: [0, 0, 1], 8: [0, 0, 0, 1]},
        (3, 1, 1): {2: [1], 3: [1], 4: [0, 1], 5: [0, 1], 6: [0, 1], 7: [0, 0, 1], 8: [0, 0, 1]},
    }
    found = starts[dilation, period, block_sublayers]
    return [Row("weights", found, lambda ell: (len(found[ell]),), lambda ell: found[ell])]


def attnres(
    *,
    query: str = "static",
    query_init: float = 0.0,
    mixing: str = "softmax",
    key_norm: bool = True,
    heads: int = 1,
    window: int | None = None,
    where: Iterable[int] = READS,
    sources: Callable[[int], int] | None = None,
    **_: Any,
) -> list[Row]:
    def split(width: int) -> tuple[int, ...]:
        return (width,) if heads == 1 else (heads, width)

    def count(ell: int) -> int:
        return sources(ell) if sources else ell if window is None else min(ell, 1 + window)

    if mixing == "static":
        return [Row("logits", where, lambda ell: split(count(ell)), 0)]
    start = Normal(query_init) if query_init else 0
    static = query == "static"
    rows = [Row("query", where, split(D // heads), start) if static else Row("query_proj", where, (D, D), start)]
    return rows + [Row("key_weight", where, (D,), 1)] * (key_norm and mixing in ("softmax", "sigmoid"))


def block_attnres(*, block_sublayers: int | None = None, num_blocks: int | None = None, **options: Any) -> list[Row]:
    size = block_sublayers or -(-L // (num_blocks or L))
    return attnres(sources=lambda ell: 1 + -(-(ell - 1) // size), **options)


def delta_attnres(**options: Any) -> list[Row]:
    return attnres(where=LATER, **options)


def gate(bias: float) -> float:
    return 1 / (1 + math.exp(-bias))


def bias_of(gate: float) -> float:
    return math.log(gate / (1 - gate))


# Signs of "parted" at the sublayers 1, 2, … of one round; they change after each round.
PARTED = {2: ["+-"], 3: ["+0-", "+-0"], 4: ["++--", "+-+-", "+--+"], 5: ["++0--", "+-+0-", "+--+0", "+0--+"]}


def start_biases(start: str, m: int, ell: int) -> tuple[list[float], list[float]]:
    """Biases of H_pre and H_post: the table of starts on the page of mhc."""
    turn = [j == (ell - 1) % m for j in range(m)]
    rounds, place = divmod(ell - 1, m - 1)
    even, lite = [-math.log(m - 1)] * m, [1.0 if t else -1.0 for t in turn]
    signs = [{"+": 1, "0": 0, "-": -1}[sign] * (-1) ** rounds for sign in PARTED[m][place]]
    scale = (2 * gate(1) + (m - 1) * 2 * gate(-1)) / m
    return {
        "prenorm": (even, [0.0] * m),
        "parted": (even, [2.0 * sign for sign in signs]),
        "scaled": (even, [bias_of(scale / 2)] * m),
        "lite": (lite, lite),
        "paper": (lite, lite),
        "hyper": ([bias_of(15 / 16 * t + 1 / (16 * m)) for t in turn], [0.0] * m),
        "megatron": ([0.0] * m, [0.0] * m),
        "lucidrains": ([float(t) for t in turn], [1.0] * m),
    }[start]


def start_writes(start: str, m: int, ell: int, output_scale: float | None) -> list[float]:
    """H_post, or B: with an output scale they have this mean and the same ratios."""
    written = [2 * gate(bias) for bias in start_biases(start, m, ell)[1]]
    return written if output_scale is None else [w * output_scale * m / sum(written) for w in written]


def hyper_connections(
    *,
    streams: int = 4,
    dynamic: bool = True,
    transition: str = "full",
    readout: str = "mean",
    start: str = "hyper",
    output_scale: float | None = None,
    **_: Any,
) -> list[Row]:
    m, full = streams, transition == "full"
    if m == 1:
        return hyper_rows(1, dynamic, full, readout, lambda ell: [1.0], lambda ell: [1.0], [[1.0]])

    def reads(ell: int) -> list[float]:
        if start == "hyper":
            return [float(j == (ell - 1) % m) for j in range(m)]
        return [gate(bias) for bias in start_biases(start, m, ell)[0]]

    kept = [[1 / m if start == "megatron" else float(i == j) for i in range(m)] for j in range(m)]
    return hyper_rows(m, dynamic, full, readout, reads, lambda ell: start_writes(start, m, ell, output_scale), kept)


def hyper_rows(m: int, dynamic: bool, full: bool, readout: str, reads: Any, writes: Any, kept: Any) -> list[Row]:
    rows = [Row("alpha_m", LATER, (m,), reads), Row("beta", EVERY, (m,), writes)]
    if full:
        rows += [Row("alpha_r", EVERY, (m, m), kept)]
    if dynamic:
        rows += [
            Row("norm_weight", EVERY, (D,), 1),
            Row("w_m", LATER, (D,), 0),
            Row("w_b", EVERY, (D,), 0),
            Row("s_a", EVERY if full else LATER, (1,), 0.01),
            Row("s_b", EVERY, (1,), 0.01),
        ]
    if dynamic and full:
        rows += [Row("w_r", EVERY, (D, m), 0)]
    return rows + [Row("readout", OUT, (m,), 1 / m)] * (readout == "learned")


def streams_rows(
    m: int, res: list[float], readout: str, start: str, output_scale: float | None, scale_init: float | None
) -> list[Row]:
    """The table of mhc and mhc_lite: parts pre (not at sublayer 1), post and res."""
    random = start in ("prenorm", "parted", "scaled", "megatron")
    scale = 0.0 if start in ("prenorm", "parted", "scaled") else 0.01

    def bias(ell: int) -> list[float]:
        if ell == L + 1:
            return [-math.log(m - 1)] * m
        read, written = start_biases(start, m, ell)
        if output_scale is not None:
            written = [bias_of(w / 2) for w in start_writes(start, m, ell, output_scale)]
        return [*(read if ell > 1 else []), *written, *res]

    where = [*EVERY, *(OUT if readout == "learned" else [])]
    return [
        Row("projection", where, lambda ell: (len(bias(ell)), m * D), Normal((m * D) ** -0.5) if random else 0),
        Row("bias", where, lambda ell: (len(bias(ell)),), bias),
        Row(
            "scale",
            where,
            lambda ell: (1 if ell == L + 1 else (ell > 1) + 1 + bool(res),),
            scale if scale_init is None else scale_init,
        ),
    ]


def mhc(
    *,
    streams: int = 4,
    transition: str = "full",
    readout: str = "mean",
    start: str = "lite",
    output_scale: float | None = None,
    scale_init: float | None = None,
    **_: Any,
) -> list[Row]:
    m, x = streams, {"lite": -8, "hyper": -8, "megatron": 0, "lucidrains": -1}.get(start, -5)
    res = {2: [0, x, x, 0], 3: [0, x, x, x, 0, x, x, x, 0], 4: [0, *[x] * 4] * 3 + [0]}[m]
    return streams_rows(m, res if transition == "full" else [], readout, start, output_scale, scale_init)


def mhc_lite(
    *,
    streams: int = 4,
    transition: str = "full",
    readout: str = "mean",
    start: str = "lite",
    output_scale: float | None = None,
    **_: Any,
) -> list[Row]:
    others = {2: 2, 3: 6, 4: 24, 5: 120}[streams] - 1
    res = [0.0, *[0.0 if start == "megatron" else -8.0] * others]
    return streams_rows(streams, res if transition == "full" else [], readout, start, output_scale, None)


def mrla(*, form: str = "light", head_dim: int | None = None, **_: Any) -> list[Row]:
    key = (head_dim or 32) ** -0.5
    rows = [
        Row("gamma", READS, (D,), 0),
        Row("k_weight", EVERY, (D,), key),
        Row("embedding_k_weight", FIRST, (D,), key),
        Row("q_weight", EVERY if form == "light" else READS, (D,), 1),
    ]
    if form == "light":
        rows += [Row("decay", EVERY, (D,), 1), Row("embedding_q_weight", FIRST, (D,), 1)]
    return rows


def ddl(*, value_width: int = 1, beta: float = 1.0, target_bias: bool = False, **_: Any) -> list[Row]:
    rows = [
        Row("beta_weight", EVERY, (D,), 0),
        Row("beta_bias", EVERY, (1,), {0.5: -math.log(3), 1.0: 0.0, 1.5: math.log(3)}[beta]),
        Row("value_weight", EVERY, (value_width, D), Normal(D**-0.5)),
    ]
    rows += [Row("value_bias", EVERY, (value_width,), 0)] * target_bias
    return rows + [Row("readout", READS, (value_width,), 1 / value_width)] * (value_width > 1)


def linear_attention(*, rank: int = 4, rule: str = "plain", feature_map: str = "identity", **_: Any) -> list[Row]:
    identity = feature_map == "identity"
    unit = [1.0, *[0.0] * (rank - 1)] if identity else [0.0] * rank
    keys = Normal(D**-0.5, zero_rows=1 if identity else 0)
    rows = [
        Row("query", READS, (rank,), unit),
        Row("key_proj", EVERY, (rank, D), keys),
        Row("key_bias", EVERY, (rank,), unit),
        Row("embedding_key_proj", FIRST, (rank, D), keys),
        Row("embedding_key_bias", FIRST, (rank,), unit),
    ]
    if rule == "gated":
        rows += [Row("gate_proj", EVERY, (rank, D), 0), Row("gate_bias", EVERY, (rank,), 4)]
    if rule == "gated_delta":
        rows += [Row("gate_weight", EVERY, (D,), 0), Row("gate_bias", EVERY, (1,), 4)]
    if rule in ("delta", "gated_delta"):
        rows += [
            Row("beta_weight", EVERY, (D,), 0),
            Row("beta_bias", EVERY, (1,), 0),
            Row("embedding_beta_weight", FIRST, (D,), 0),
            Row("embedding_beta_bias", FIRST, (1,), 0),
        ]
    return rows


PAGES: dict[str, Callable[..., list[Row]]] = {
    "attnres": attnres,
    "block_attnres": block_attnres,
    "ddl": ddl,
    "delta_attnres": delta_attnres,
    "denseformer": denseformer,
    "highway": highway,
    "hyper_connections": hyper_connections,
    "linear_attention": linear_attention,
    "mhc": mhc,
    "mhc_lite": mhc_lite,
    "mrla": mrla,
    "residual": residual,
    "scaled_residual": scaled_residual,
}
# Beside the variants: options that change a start.
MORE: list[tuple[str, dict[str, Any]]] = [
    ("attnres", {"window": 2, "mixing": "static", "heads": 2}),
    ("attnres", {"query_init": 0.02, "heads": 2}),
    ("attnres", {"query_init": 0.5, "mixing": "linear", "key_norm": False}),
    ("block_attnres", {}),
    ("block_attnres", {"num_blocks": 3, "mixing": "static"}),
    ("denseformer", {"block_sublayers": 3}),
    ("denseformer", {"block_sublayers": 1, "dilation": 3}),
    ("ddl", {"beta": 1.5, "value_width": 2}),
    ("highway", {"gate": "channel", "bias": 0.5}),
    ("hyper_connections", {"streams": 3, "dynamic": False}),
    ("linear_attention", {"rule": "gated", "feature_map": "elu1", "rank": 2}),
    ("mhc", {"streams": 3, "scale_init": 0.01, "readout": "learned", "transition": "identity"}),
    ("mhc_lite", {"streams": 3, "start": "paper", "readout": "learned"}),
    ("mhc_lite", {"streams": 2, "start": "paper"}),
    *((n, {"start": s}) for n in ("mhc", "mhc_lite") for s in ("prenorm", "parted", "scaled", "hyper", "megatron")),
    *(("hyper_connections", {"start": s}) for s in ("prenorm", "parted", "scaled", "lite", "megatron")),
    ("mhc", {"start": "lucidrains"}),
    ("mhc", {"start": "lite", "scale_init": 0.5, "output_scale": 1.0}),
    ("mhc_lite", {"streams": 5, "start": "parted", "output_scale": 0.7}),
    ("hyper_connections", {"streams": 5, "start": "parted", "output_scale": 3.0}),
    ("mrla", {"head_dim": 8}),
    ("mrla", {"form": "base", "head_dim": 64}),
    ("scaled_residual", {"gate": "channel", "init": 0.5}),
    ("scaled_residual", {"gate": "channel", "init": 0.0}),
    ("scaled_residual", {"init": 0.25}),
]
CASES = [*ALL, *(pytest.param(*case, id=label(*case)) for case in MORE)]


def expand(rows: list[Row]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and start of each parameter by its name in the state dict."""
    return {
        f"{'out' if ell == L + 1 else f'mixers.{ell - 1}'}.{row.name}": (
            row.shape(ell) if callable(row.shape) else row.shape,
            row.start(ell) if callable(row.start) else row.start,
        )
        for row in rows
        for ell in row.where
    }


def check_normal(draws: list[Tensor], start: Normal) -> None:
    """Of all sites together: mean, deviation, tails, and no two sites alike. Five standard errors are allowed."""
    assert all((draw[: start.zero_rows] == 0).all() for draw in draws)
    drawn = [draw[start.zero_rows :] for draw in draws]
    x = torch.cat([draw.flatten() for draw in drawn]).double() / start.std
    if not len(x):  # rank 1: the one row is 0
        return
    assert abs(float(x.mean())) <= 5 / len(x) ** 0.5
    assert abs(float(x.std()) - 1) <= 5 / (2 * len(x)) ** 0.5
    assert 2.5 <= float(x.abs().max()) <= 6, "a normal law has tails, and neither long ones"
    firsts = [float(draw.flatten()[0]) for draw in drawn]
    assert len(set(firsts)) == len(firsts), "every site draws its own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_parameter_starts_as_its_page_says(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    want = expand(PAGES[name](**options))
    stack = dm.DepthStack(name, dim=D, depth=L, **options)
    if dtype == torch.float64:  # as after `to_empty`: the start is exact in the parameter's own dtype
        stack.to(dtype)
        with torch.no_grad():
            for parameter in stack.parameters():
                parameter.fill_(torch.nan)
        stack.reset_parameters()
    parameters = dict(stack.named_parameters())
    assert parameters.keys() == want.keys()
    drawn: dict[str, tuple[Normal, list[Tensor]]] = {}
    for key, parameter in parameters.items():
        shape, start = want[key]
        assert tuple(parameter.shape) == shape, key
        if isinstance(start, Normal):
            drawn.setdefault(key.rsplit(".", 1)[1], (start, []))[1].append(parameter.detach())
        else:
            exact = torch.tensor(start, dtype=dtype).expand(shape)
            torch.testing.assert_close(parameter.detach(), exact, rtol=8 * torch.finfo(dtype).eps, atol=0, msg=key)
    for start, draws in drawn.values():
        check_normal(draws, start)


def test_every_mechanism_has_a_page() -> None:
    assert PAGES.keys() == DEPTH.keys()
    assert KV_PAGES.keys() == KV.keys()


@pytest.mark.parametrize(
    ("blocks", "start"),
    [(1, 0.1), (12, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6), (36, 1e-6), (48, 1e-6)],
)
def test_layerscale_starts_smaller_in_deeper_networks(blocks: int, start: float) -> None:
    """The table of CaiT, by Transformer blocks; half a block counts as one."""
    for depth in (2 * blocks - 1, 2 * blocks):
        stack = dm.DepthStack("scaled_residual", dim=3, depth=depth, gate="channel").double()
        stack.reset_parameters()
        assert all(p.tolist() == [start] * 3 for p in stack.parameters())
        rezero = dm.DepthStack("scaled_residual", dim=3, depth=depth)
        assert all(p.tolist() == [0] for p in rezero.parameters())


@pytest.mark.parametrize(("dim", "width"), [(1, 1), (6, 2), (24, 8), (33, 1), (48, 16), (64, 32), (96, 32), (100, 4)])
@pytest.mark.parametrize("form", ["light", "base"])
def test_keys_of_mrla_start_by_the_width_of_a_head(dim: int, width: int, form: str) -> None:
    stack = dm.DepthStack("mrla", dim=dim, depth=3, form=form)
    keys = [p for name, p in stack.named_parameters() if name.endswith("k_weight")]
    assert len(keys) == 4
    for key in keys:
        assert key.tolist() == pytest.approx([width**-0.5] * dim, rel=1e-6)


@pytest.mark.parametrize("streams", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["mhc", "mhc_lite"])
def test_the_biases_of_mhc_read_the_mean_and_write_one(name: str, streams: int) -> None:
    """What the numbers of the table mean: H_pre is 1/m, H_post is 1."""
    stack = dm.DepthStack(name, dim=4, depth=3, streams=streams, start="prenorm").double()
    stack.reset_parameters()
    x = torch.randn(5, 4, dtype=torch.float64)
    state = stack.begin(x)
    for mixer in stack:
        c = mixer.coeff(state)
        assert (c.gain - 1).abs().max() <= 1e-15
        assert c.read is None or (c.read - 1 / streams).abs().max() <= 1e-15
        state = mixer.step(state, torch.tanh)


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0, 1.5, 1.9])
def test_ddl_starts_at_its_beta(beta: float) -> None:
    stack = dm.DepthStack("ddl", dim=4, depth=3, beta=beta).double()
    stack.reset_parameters()
    state = stack.begin(torch.randn(5, 4, dtype=torch.float64))
    for mixer in stack:
        assert (mixer.coeff(state).beta - beta).abs().max() <= 1e-14
        state = mixer.step(state, torch.tanh)


KV_PAGES: dict[str, Callable[..., dict[str, float]]] = {
    "depth_attention": lambda **_: {},
    "value_residual": lambda learned=True, own=0.5, first=0.5: {"own": own, "first": first} if learned else {},
}


@pytest.mark.parametrize("name", KV)
def test_every_parameter_inside_attention_starts_as_its_page_says(name: str) -> None:
    for options in (*kv_mechanism(name).variants, {} if name == "depth_attention" else {"own": 2.0, "first": -1.0}):
        mixers = dm.KVStack(name, head_dim=4, order=(0, 1, 2, 1, 2), **options)
        for index, mixer in enumerate(mixers):
            want = KV_PAGES[name](**options) if index else {}
            assert {key: p.tolist() for key, p in mixer.named_parameters()} == {k: [v] for k, v in want.items()}
