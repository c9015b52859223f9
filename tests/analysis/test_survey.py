"""A survey of a text agrees with a trace of the same tokens, however the text is divided, and its files load again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import depthmix as dm
from depthmix.analysis import Survey, measuring, survey, tally
from depthmix.analysis.histogram import Histogram
from depthmix.analysis.surveyor import QUANTILES
from depthmix.mechanisms.residual import Residual
from depthmix.ops.memory import LiveBytes
from tests.cases import EVERY_MECHANISM
from tests.decoders import some_tokens, tiny

ROWS = some_tokens(5, 12)
GROUPED = [
    ("attnres", {"heads": 2}),
    ("block_attnres", {"heads": 4, "mixing": "sigmoid"}),
    ("delta_attnres", {"heads": 2, "query": "input"}),
    ("highway", {"gate": "channel"}),
    ("mrla", {"form": "base"}),
    ("ddl", {"value_width": 3}),
]


def mixer(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, **options}


def by_token(tensor: Tensor, kept: int) -> Tensor:
    """[token, ..., kept axes] with the axis of groups or heads, which a trace leaves out where there is one."""
    flat = tensor.flatten(0, 1)
    return flat.unsqueeze(1) if flat.dim() == kept + 1 else flat


def compare(model: dm.Decoder, measured: Survey, tokens: Tensor) -> None:
    """Every statistic against those of one trace of the same tokens."""
    traced = dm.trace(model, tokens, channels=measured.figures["channels"])
    whole = dm.trace(model, tokens)
    n = model.config.depth + 1
    M = by_token(traced.M, 2)
    assert measured.figures["kind"] == traced.kind
    close(measured["M_mean"], M.mean(0))
    close(measured["M_std"], M.std(0, correction=0))
    for q, found in zip(QUANTILES, measured["M_quantiles"], strict=True):
        exact = M.sort(0).values[max(1, math.ceil(q * len(M))) - 1]
        bound = 0.037 * exact.abs() + 1.001e-4
        assert ((found - exact).abs() <= bound).all()
    parts = torch.stack([whole.contributions(r) for r in range(n)]).flatten(2, 3)  # [row, i, token, D]
    reads = whole.inputs.flatten(1, 2)
    close(measured["contribution"], parts.norm(dim=-1).mean(-1))
    cosine = (parts * reads.unsqueeze(1)).sum(-1) / reads.square().sum(-1).unsqueeze(1)
    close(measured["share"], cosine.mean(-1))
    close(measured["share"].sum(-1), torch.ones(n))
    for name in ("entropy", "locality", "embedding_share", "spread"):
        exact = getattr(traced, name)().reshape(-1, n).mean(0)
        empty = [not row for row in traced.reads] or [False] * n
        assert [x is None for x in measured.figures["rows"][name]] == empty
        for e, x, y in zip(empty, measured.figures["rows"][name], exact.tolist(), strict=True):
            assert e or abs(x - y) <= 1e-12, name
    sinks = traced.sinks()
    close(torch.tensor(measured.figures["sinks"], dtype=torch.float64), sinks.reshape(-1, sinks.shape[-1]).mean(0))
    assert measured.figures["shares_of"] == traced.shares_of
    assert measured.figures["source_names"] == traced.source_names
    if traced.weights is not None:
        weights = by_token(traced.weights, 2)
        close(measured["weights_mean"], weights.mean(0))
        close(measured["weights_std"], weights.std(0, correction=0))
        close(measured["table_weights"], weights[: len(measured["table_weights"])])
        assert measured.figures["reads"] == traced.reads
    close(measured["table_M"], M[: len(measured["table_M"])])
    if traced.values is not None:
        close(measured["values_mean"], traced.values.flatten(0, 1).mean(0))
    assert ("values_mean" in measured.tensors) == (traced.values is not None)


def close(found: Tensor, exact: Tensor, bound: float = 1e-12) -> None:
    assert found.shape == exact.shape
    assert (found.double() - exact.double()).abs().max() <= bound * exact.abs().max().clamp(min=1)


@EVERY_MECHANISM
def test_a_survey_has_the_statistics_of_a_trace(name: str, options: dict[str, Any]) -> None:
    model = tiny(mixer=mixer(name, options))
    compare(model, survey(model, [ROWS]), ROWS)


@pytest.mark.parametrize(("name", "options"), GROUPED, ids=[f"{n}-{o}" for n, o in GROUPED])
def test_heads_channels_and_matrices_are_kept_apart(name: str, options: dict[str, Any]) -> None:
    model = tiny(mixer=mixer(name, options))
    compare(model, survey(model, [ROWS]), ROWS)


@pytest.mark.parametrize("kv_mixer", dm.list_mechanisms(kind="kv"))
def test_the_mixing_of_values_is_averaged_by_head(kv_mixer: str) -> None:
    model = tiny(kv_mixer=kv_mixer, mixer="attnres")
    measured = survey(model, [ROWS])
    compare(model, measured, ROWS)
    assert measured.figures["kv_mechanism"] == kv_mixer
    assert measured["values_mean"].shape == (2, 3, 3)


@pytest.mark.parametrize(
    ("name", "options"), [("block_attnres", {}), ("mrla", {}), ("ddl", {}), ("attnres", {"heads": 2})]
)
def test_the_same_text_in_other_batches_gives_the_same_result(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(mixer=mixer(name, options), kv_mixer="depth_attention")
    short = some_tokens(1, 5)
    whole = survey(model, [ROWS, short], table=30, ranked=9)
    monkeypatch.setattr(tally, "GROUP_BYTES", 1)  # a row of M at a time
    monkeypatch.setattr(tally, "REPLAY_BYTES", 1)  # and a source at a time
    parts = survey(model, [*ROWS.split(1), short], table=30, ranked=9)
    for key in whole.tensors:
        close(parts[key], whole[key])
    assert parts.figures["samples"] == whole.figures["samples"]
    assert parts.figures["table"]["ids"] == whole.figures["table"]["ids"]
    assert parts.figures["loss"] == pytest.approx(whole.figures["loss"], rel=1e-12)
    for key in ("rank", "rows", "magnitudes", "effective_rank"):
        assert flat(parts.figures[key]) == pytest.approx(flat(whole.figures[key]), rel=1e-9, abs=1e-12), key
    assert whole.figures["tokens"] == 65


def flat(tree: Any) -> list[float]:
    if isinstance(tree, dict):
        tree = [*tree.values()]
    if isinstance(tree, list):
        return [x for part in tree for x in flat(part)]
    return [-1.0 if tree is None else float(tree)]


def test_a_short_last_row_counts() -> None:
    model = tiny()
    short = some_tokens(1, 3)
    measured = survey(model, [ROWS, short])
    losses = [
        nn.functional.cross_entropy(model(t)[:, :-1].flatten(0, 1), t[:, 1:].flatten(), reduction="sum")
        for t in (ROWS, short)
    ]
    assert measured.figures["loss"] == pytest.approx(float(sum(losses).detach()) / (5 * 11 + 2), rel=1e-12)
    assert measured.figures["tokens"] == 63
    M = torch.cat([dm.trace(model, t).M.flatten(0, 1) for t in (ROWS, short)])
    close(measured["M_mean"][0], M.mean(0))


@EVERY_MECHANISM
def test_contributions_of_a_trained_model_add_up_to_what_each_row_reads(name: str, options: dict[str, Any]) -> None:
    model = tiny(mixer=mixer(name, options), dtype=torch.float32).train()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(12):
        optimizer.zero_grad()
        model.loss(ROWS).backward()
        optimizer.step()
    traced = dm.trace(model.eval(), ROWS)
    for row, h in enumerate(traced.inputs):
        assert (traced.contributions(row).sum(0) - h).abs().max() <= 1e-5 * h.abs().max().clamp(min=1)
    shares = survey(model, [ROWS])["share"]
    assert (shares.sum(-1) - 1).abs().max() <= 1e-5


def test_rank_is_that_of_evenly_spread_tokens() -> None:
    model = tiny(mixer=mixer("attnres", {}))
    measured = survey(model, [ROWS], ranked=10)
    M = dm.trace(model, ROWS).M.flatten(0, 1)[::8]  # 60 tokens: every 8th, at most 10
    assert measured.figures["samples"]["rank"] == len(M) == 8
    found = measured.figures["rank"]
    assert found["mean"] == float(dm.semiseparable_rank(M, 1e-9).double().mean())
    assert found["declared"] == model.depth.facts.rank
    assert measured.figures["effective_rank"]["std"] == pytest.approx(float(dm.effective_rank(M).std(correction=0)))


def test_norms_and_gradients_are_those_of_the_first_rows() -> None:
    model = tiny(mixer=mixer("mhc", {}))
    measured = survey(model, [ROWS], gradient_tokens=30)
    with measuring(model.depth) as exact:
        model.loss(ROWS[:2]).backward()
    assert measured.figures["samples"]["gradients"] == 24
    assert flat(measured.figures["magnitudes"]) == pytest.approx(flat(exact.to_dict()), rel=1e-10)
    assert min(measured.figures["magnitudes"]["gradient_norm"]) > 0


def test_a_survey_leaves_the_model_as_it_was() -> None:
    model = tiny(mixer=mixer("attnres", {})).train()
    model.sublayers[0].eval()
    model.embed.weight.requires_grad_(False)
    model.checkpoint_every = 2
    kept = [torch.ones_like(p) for p in model.parameters()]
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient
    keys = [(set(vars(m)), m.training) for m in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    survey(model, [ROWS])
    assert [(set(vars(m)), m.training) for m in model.modules()] == keys
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))
    assert all(bool((g == 1).all()) for g in kept)
    assert model.checkpoint_every == 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-9e3, 9e3) | st.floats(-1e-3, 1e-3), min_size=1, max_size=80),
    st.floats(0, 1),
    st.integers(1, 7),
)
def test_a_quantile_is_within_the_stated_error(values: list[float], q: float, chunk: int) -> None:
    histogram = Histogram(2)
    numbers = torch.tensor([values, [-x for x in values]], dtype=torch.float64)
    for part in numbers.split(chunk, 1):
        histogram.add(part)
    found = histogram.quantiles([q])[0]
    exact = numbers.sort(1).values[:, max(1, math.ceil(q * len(values))) - 1]
    bound = torch.maximum(histogram.relative_error * exact.abs(), torch.full((2,), histogram.absolute_error))
    assert histogram.relative_error <= 0.037
    assert ((found - exact).abs() <= bound.double()).all()


def test_many_quantities_get_coarser_bins_and_say_so() -> None:
    few, many = Histogram(10), Histogram(200_000, "meta")
    assert many.counts.numel() * 8 <= 1 << 28
    assert many.relative_error > few.relative_error


def batches(tokens: int) -> Iterator[Tensor]:
    for _ in range(tokens // 512):
        yield some_tokens(8, 64)


def test_memory_does_not_grow_with_the_text() -> None:
    model = tiny(dtype=torch.float32, mixer="block_attnres", kv_mixer="value_residual")
    peaks = []
    for tokens in (4096, 32_768):
        with LiveBytes() as live:
            survey(model, batches(tokens))
        peaks.append(live.peak)
    assert peaks[1] <= 1.02 * peaks[0]


def test_a_user_model_without_a_loss_and_with_its_own_mechanism_is_surveyed(tmp_path: Path) -> None:
    class Twice(Residual):
        def combine(self, state: dm.State, c: Any) -> Tensor:
            return 2 * state[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(61, 8)
            self.depth = dm.DepthStack(Twice, dim=8, depth=3)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.head = nn.Linear(8, 61)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.depth(self.embedding(tokens), self.layers))

    measured = survey(Model(), [ROWS])
    assert torch.equal(measured["M_mean"][0], 2 * torch.ones(4, 4, dtype=torch.float64).tril())
    assert measured.figures["loss"] > 0
    assert min(measured.figures["magnitudes"]["gradient_norm"]) > 0
    measured.save(tmp_path)
    assert Survey.load(tmp_path).figures["mechanism"] == "Twice", "the figures mean the same without its code"


def test_figures_that_are_not_finite_are_null_and_said_to_be() -> None:
    model = tiny(dtype=torch.float32)
    with torch.no_grad():
        model.sublayers[1].down_proj.weight.fill_(1e38)
    measured = survey(model, [ROWS])
    assert not measured.figures["finite"]
    assert measured.figures["loss"] is None
    json.dumps(measured.figures, allow_nan=False)
    assert survey(tiny(), [ROWS]).figures["finite"]


def test_texts_that_are_too_short_and_batches_of_another_form_are_refused() -> None:
    for nothing in ([], [some_tokens(1, 1)]):
        with pytest.raises(ValueError, match="expected at least 2"):
            survey(tiny(), nothing)
    with pytest.raises(TypeError, match=r"shape \[12\]; expected tokens \[rows, tokens\]"):
        survey(tiny(), ROWS)
    with pytest.raises(TypeError, match="Module that runs a DepthStack"):
        survey(print, [ROWS])  # type: ignore[arg-type]


# Files.


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    survey(tiny(mixer="attnres", kv_mixer="value_residual"), [ROWS], source="a text").save(tmp_path)
    return tmp_path


def test_a_saved_survey_comes_back(saved: Path) -> None:
    measured = survey(tiny(mixer="attnres", kv_mixer="value_residual"), [ROWS], source="a text")
    back = Survey.load(saved)
    assert back.figures == measured.figures
    assert back.tensors.keys() == measured.tensors.keys()
    assert all(torch.equal(back[key], measured[key].float()) for key in back.tensors)
    assert {path.name for path in saved.iterdir()} == {"trace.json", "trace.safetensors"}
    with pytest.raises(KeyError, match="has no M; it has M_mean"):
        back["M"]


def edit(folder: Path, **fields: Any) -> None:
    figures = json.loads((folder / "trace.json").read_text())
    (folder / "trace.json").write_text(json.dumps({**figures, **fields}))


@pytest.mark.parametrize("share", [0, 0.3, 0.99])
def test_truncated_files_are_named(saved: Path, share: float) -> None:
    for name in ("trace.safetensors", "trace.json"):
        path = saved / name
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(ValueError, match=rf"{name} is damaged.*Make it again with `depthmix trace`"):
            Survey.load(saved)
        path.write_bytes(content)
    Survey.load(saved)


def test_foreign_and_later_files_are_refused(saved: Path) -> None:
    tensors = (saved / "trace.safetensors").read_bytes()
    probe = tiny(mixer="attnres")
    dm.trace(probe, ROWS).save(saved / "trace.safetensors")
    with pytest.raises(ValueError, match="a safetensors file but not one of `depthmix trace`"):
        Survey.load(saved)
    (saved / "trace.safetensors").write_bytes(tensors)
    for fields, message in (
        ({"format": 2, "depthmix": "9.0"}, "has format 2, written by depthmix 9.0; .* Install a newer depthmix"),
        ({"format": "x"}, "has format 'x'; expected 1"),
        ({"kind": "spectral"}, "has kind 'spectral'; expected one of scalar, head, channel, operator"),
        ({"mechanism": None}, "has mechanism None and depth 6; expected a name"),
        ({"tokens": 7}, "are of different traces"),
        ({"kv_mechanism": None}, "these differ: values_mean"),
        ({"source_names": ["embedding"]}, r"weights_mean is .*\[1, 7, 7\]; expected floats \[1, 7, 1\]"),
        ({"table": {}}, "trace.json is damaged"),
    ):
        kept = (saved / "trace.json").read_text()
        edit(saved, **fields)
        with pytest.raises(ValueError, match=message):
            Survey.load(saved)
        (saved / "trace.json").write_text(kept)
    (saved / "trace.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no .*trace\.json; expected the two files of `depthmix trace`"):
        Survey.load(saved)
