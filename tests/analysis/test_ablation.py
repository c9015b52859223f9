"""Causal importance: planted routes are found, weight without effect is told apart, controls are matched."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import depthmix as dm
from depthmix.analysis.cuts import families, parse_cut, source_cut
from depthmix.analysis.invariants import make_probe
from depthmix.analysis.routes import Columns
from tests.cases import EVERY_MECHANISM
from tests.decoders import some_tokens, tiny

READABLE, READABLE24 = ([range(row + 1) for row in range(depth + 1)] for depth in (9, 24))
SURE = 40.0  # a logit beside which the others have no weight in float64


def plant(model: dm.Decoder, routes: dict[int, int]) -> dm.Decoder:
    """Sublayer `reader` (from 1) reads only source `source`, by learned scalars."""
    with torch.no_grad():
        for reader, source in routes.items():
            logits = model.depth[reader - 1].logits
            logits.zero_()
            logits[source] = SURE
    return model


@pytest.fixture(scope="module")
def planted() -> dm.Decoder:
    """Sublayer 7 reads only source 2. Sublayer 5 reads only source 1, but what it computes is thrown away."""
    model = plant(tiny(layers=4, mixer={"name": "attnres", "mixing": "static"}), {7: 2, 5: 1})
    with torch.no_grad():
        model.sublayers[4].o_proj.weight.zero_()
        for mixer in model.depth.all_mixers():
            if mixer.site.index not in (0, 4, 6):
                mixer.logits.zero_()
    return model


def test_the_planted_route_is_the_one_that_matters(planted: dm.Decoder) -> None:
    found = dm.ablate(planted, some_tokens(6, 12), [f"route {i}→7" for i in range(7)], controls=0)
    by_effect = sorted(found.effects, key=lambda e: -e.kl.mean)
    assert by_effect[0].name == "route 2→7"
    assert by_effect[0].kl.low is not None
    assert by_effect[0].kl.low > 1e-3
    assert all(e.kl.mean < 1e-12 for e in by_effect[1:])
    assert [e.mass for e in found.effects] == pytest.approx([0, 0, 1, 0, 0, 0, 0], abs=1e-12)


def test_a_route_with_a_large_weight_but_no_effect_is_told_apart(planted: dm.Decoder) -> None:
    found = dm.ablate(planted, some_tokens(6, 12), routes=6)
    routes = [e for e in found.effects if e.kind == "route"]
    assert {"route 2→7", "route 1→5"} <= {e.name for e in routes[:3]}  # the strongest come first
    matters, idle = found["route 2→7"], found["route 1→5"]
    assert matters.mass == pytest.approx(idle.mass)
    assert matters.kl.mean > 1e-3
    assert abs(idle.loss.mean) + idle.kl.mean < 1e-12


@EVERY_MECHANISM
def test_every_mechanism_can_be_cut_and_its_families_cover_its_routes_once(name: str, options: dict[str, Any]) -> None:
    model = tiny(mixer={"name": name, **options})
    found = dm.ablate(model, some_tokens(3, 8), controls=1, routes=3)
    n = model.config.depth + 1
    edges = [edge for cut in families(model.depth) for edge in cut.edges]
    assert sorted(edges) == [(row, source) for row in range(3, n) for source in range(row + 1)]  # four sources and more
    assert [e.name for e in found.effects if e.kind == "source"] == [f"source {i}" for i in range(n)]
    assert sum(e.kind == "route" for e in found.effects) == 3
    for effect in found.effects:
        assert math.isfinite(effect.loss.mean)
        assert effect.kl.mean >= -1e-9
        assert effect.loss.low is not None
        assert effect.loss.high is not None
        assert effect.loss.low <= effect.loss.mean <= effect.loss.high
        assert (effect.controls is not None) == (effect.kind == "family")


def test_blocks_have_a_partial_sum_as_a_family() -> None:
    stack = dm.DepthStack("block_attnres", dim=8, depth=6, block_sublayers=3)
    found = {cut.name: cut.edges for cut in families(stack)}
    assert found["partial"] == {(4, 4), (5, 4), (5, 5)}
    assert found["recent"] == {(3, 3), (6, 6)}  # a finished block is read; its newest output is recent
    plain = {cut.name for cut in families(dm.DepthStack("residual", dim=8, depth=6))}
    assert plain == {"embedding", "recent", "older"}


def test_controls_cut_as_many_other_edges_in_each_row() -> None:
    stack = dm.DepthStack("residual", dim=8, depth=9)
    for cut in (*families(stack), source_cut(4, READABLE)):
        for k in range(5):
            control = cut.shuffled(3, k, READABLE)
            assert control == cut.shuffled(3, k, READABLE)
            for row in range(10):
                own, other = ({i for r, i in c.edges if r == row} for c in (cut, control))
                assert len(own) == len(other)
                assert all(0 <= i <= row for i in other)
                if 2 * len(own) < row + 1:
                    assert not own & other
    assert len({families(stack)[0].shuffled(0, k, READABLE).edges for k in range(8)}) == 8


@pytest.mark.parametrize(
    ("name", "options"), [("attnres", {"window": 2}), ("denseformer", {"dilation": 2}), ("block_attnres", {})]
)
def test_only_routes_that_exist_are_cut_by_families_sources_and_controls(name: str, options: dict[str, Any]) -> None:
    probe = make_probe(name, options, depth=9)
    M = dm.trace(probe.stack, probe.x, probe.sublayers).M.flatten(0, -3)
    exist = {(r, i) for r in range(10) for i in range(r + 1) if M[:, r, i].any()}
    columns = Columns(probe.stack)
    assert {(r, i) for r, sources in enumerate(columns.readable) for i in sources} == exist
    for cut in (*families(probe.stack), *(source_cut(i, columns.readable) for i in range(10))):
        assert cut.edges <= exist
        for k in range(4):
            assert cut.shuffled(0, k, columns.readable).edges <= exist


@pytest.mark.parametrize("name", ["attnres", "block_attnres", "mhc", "ddl"])
def test_mass_is_the_mean_share_of_the_rows_that_were_cut(name: str) -> None:
    """Recomputed from traces of all sequences, whatever the size of a batch."""
    model, tokens = tiny(mixer=name), some_tokens(5, 8)
    traced = dm.trace(model, tokens)
    if traced.kind == "operator":
        norms = torch.stack([traced.contributions(r).norm(dim=-1).mean((1, 2)) for r in range(7)])
        shares = norms / norms.sum(-1, keepdim=True)
    else:
        shares = (traced.M.abs() / traced.M.abs().sum(-1, keepdim=True)).mean((0, 1))
    found = dm.ablate(model, tokens, ["older", "source 2", "1->4"], controls=0, batch=2)
    edges = {cut.name: cut.edges for cut in families(model.depth)}["older"]
    older = sum(float(shares[edge]) for edge in edges) / len({row for row, _ in edges})
    source = sum(float(shares[r, 2]) for r in range(2, 7)) / 5
    assert found["older"].mass == pytest.approx(older, rel=1e-6)
    assert found["source 2"].mass == pytest.approx(source, rel=1e-6)
    assert found["route 1→4"].mass == pytest.approx(float(shares[3, 1]), rel=1e-6)


def test_the_strongest_routes_are_those_along_the_read_or_against_it() -> None:
    model, tokens = tiny(mixer="denseformer"), some_tokens(4, 8)
    torch.manual_seed(3)  # one of the routes points against its read
    with torch.no_grad():
        for parameter in model.depth.parameters():
            parameter.copy_(torch.randn_like(parameter))
    traced = dm.trace(model, tokens)
    cosine = torch.stack(
        [
            ((traced.contributions(r) * traced.inputs[r]).sum(-1) / traced.inputs[r].square().sum(-1)).mean((1, 2))
            for r in range(7)
        ]
    )
    edges = sorted(((r, i) for r in range(1, 7) for i in range(r + 1)), key=lambda e: -abs(float(cosine[e])))
    edges = [e for e in edges if float(cosine[e])]
    assert any(float(cosine[e]) < 0 for e in edges[:-1]), "not only the weakest"
    routes = [e for e in dm.ablate(model, tokens, routes=len(edges)).effects if e.kind == "route"]
    assert [(e.row, e.source) for e in routes] == edges


def test_words_that_a_model_excludes_count_nothing_and_submodules_keep_their_mode() -> None:
    class Masked(Wrapped):
        def forward(self, tokens: Tensor) -> Any:
            return torch.cat([self.model(tokens), torch.full((*tokens.shape, 2), -torch.inf)], -1)

    model = tiny(mixer="attnres")
    masked = Masked(model).train()
    model.norm.eval()
    found = dm.ablate(masked, some_tokens(3, 8), ["recent"])["recent"]
    assert found.kl.mean == pytest.approx(dm.ablate(model, some_tokens(3, 8), ["recent"])["recent"].kl.mean)
    assert model.depth.training
    assert not model.norm.training


def test_a_control_is_never_the_only_choice_of_its_row() -> None:
    """Else it would be the same few early routes every time, which matter most."""
    stack = dm.DepthStack("residual", dim=8, depth=24)
    for cut in families(stack):
        for row in {row for row, _ in cut.edges}:
            drawn = {frozenset(e for e in cut.shuffled(0, k, READABLE24).edges if e[0] == row) for k in range(60)}
            assert len(drawn) > 1, (cut.name, row)


def test_loss_and_divergence_are_those_of_the_cut_model() -> None:
    model, tokens = tiny(mixer="block_attnres"), some_tokens(4, 9)
    n = model.config.depth + 1
    scale = torch.ones(n, n, dtype=torch.float64)
    scale[5, 0] = 0
    with torch.no_grad():
        whole = model(tokens).log_softmax(-1)
        with dm.editing(model, scale, renormalise=True):
            cut = model(tokens).log_softmax(-1)
    found = dm.ablate(model, tokens, ["0→6"], renormalise=True, batch=3)  # in two batches
    effect = found["route 0→6"]
    losses = [nn.functional.nll_loss(p[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) for p in (whole, cut)]
    assert found.loss == pytest.approx(float(losses[0]), abs=1e-12)
    assert effect.loss.mean == pytest.approx(float(losses[1] - losses[0]), abs=1e-12)
    assert effect.kl.mean == pytest.approx(float((whole.exp() * (whole - cut)).sum(-1).mean()), abs=1e-12)
    assert "softmax" in found.how
    assert found.renormalise


def test_intervals_are_over_sequences_and_one_sequence_has_none() -> None:
    model = tiny(mixer="attnres")
    effect = dm.ablate(model, some_tokens(1, 9), ["embedding"], controls=0)["embedding"]
    assert (effect.loss.low, effect.loss.high) == (None, None)
    same = some_tokens(1, 9).expand(4, 9)
    effect = dm.ablate(model, same, ["embedding"], controls=0)["embedding"]
    assert effect.loss.low == pytest.approx(effect.loss.mean, abs=1e-9)


def test_values_mixed_over_depth_can_be_cut() -> None:
    model = tiny(kv_mixer={"name": "depth_attention", "stride": 1})
    found = dm.ablate(model, some_tokens(4, 9), ["value 1→3", "value 2→3"], controls=0)
    assert [e.kind for e in found.effects] == ["value", "value"]
    assert all(e.kl.mean > 1e-6 for e in found.effects)
    assert 0 < found["value 1→3"].mass < 1
    names = [e.name for e in dm.ablate(model, some_tokens(2, 6), routes=2).effects if e.kind == "value"]
    assert len(names) == 2


class Wrapped(nn.Module):
    """A user's model that returns an object with logits, as those of Hugging Face do."""

    def __init__(self, model: dm.Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Any:
        return type("Output", (), {"logits": self.model(tokens)})()


def test_any_model_that_returns_logits_can_be_measured_and_is_left_as_it_was() -> None:
    model = tiny(mixer="attnres").train()
    tokens = some_tokens(3, 8)
    assert dm.ablate(Wrapped(model).train(), tokens, ["recent"]).effects == dm.ablate(model, tokens, ["recent"]).effects
    assert model.training
    assert not any("read" in vars(mixer) for mixer in model.depth.all_mixers())


def test_files_round_trip_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    found = dm.ablate(tiny(mixer="attnres"), some_tokens(3, 8), routes=2)
    path = tmp_path / "ablation.json"
    found.save(path)
    assert dm.Ablation.load(path) == found
    content = json.loads(path.read_text())
    assert content["effects"][0]["name"] == "embedding"
    path.write_text(path.read_text()[:-40])
    with pytest.raises(ValueError, match="is damaged"):
        dm.Ablation.load(path)
    path.write_text(json.dumps({**content, "format": 9}))
    with pytest.raises(ValueError, match="format 9; expected 1"):
        dm.Ablation.load(path)
    path.write_text(json.dumps({**content, "effects": [{"name": "embedding"}]}))
    with pytest.raises(ValueError, match="is damaged"):
        dm.Ablation.load(path)


@pytest.mark.parametrize(
    ("text", "name", "edges"),
    [
        ("embedding", "embedding", 4),
        ("source 3", "source 3", 4),
        ("3", "source 3", 4),
        ("2->5", "route 2→5", 1),
        ("route 2 → 7", "route 2→7", 1),
        (" Recent", "recent", 4),
        ("embedding -> head", "route 0→7", 1),
        ("source 0", "source 0", 6),
        ("value 1→3", "value 1→3", 1),
    ],
)
def test_cuts_are_named_in_words(text: str, name: str, edges: int) -> None:
    cut = parse_cut(text, dm.DepthStack("attnres", dim=8, depth=6), attention_layers=3)
    assert (cut.name, len(cut.edges)) == (name, edges)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("embeding", "Did you mean 'embedding'"),
        ("source 9", "there is no source 9"),
        ("5→5", "expected A→B with 0 ≤ A < B ≤ 7"),
        ("2→9", "7 is the head"),
        ("value 3→1", "1 ≤ A ≤ B ≤ 3"),
        ("head->2", "unknown"),
        ("", "unknown"),
    ],
)
def test_unknown_cuts_are_refused_with_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_cut(text, dm.DepthStack("attnres", dim=8, depth=6), attention_layers=3)


def test_wrong_input_is_refused() -> None:
    model = tiny(mixer="attnres")
    with pytest.raises(ValueError, match="expected ids"):
        dm.ablate(model, some_tokens(3, 8).double())
    with pytest.raises(ValueError, match="at least 2 tokens"):
        dm.ablate(model, some_tokens(3, 1))
    with pytest.raises(KeyError, match="was not cut"):
        dm.ablate(model, some_tokens(3, 8), ["recent"])["older"]
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        dm.ablate(model, some_tokens(3, 8), ["recent"])
