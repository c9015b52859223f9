"""Functions of one's own as kernel and as score, by their name."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm
from depthmix.analysis.invariants import make_probe, verify
from depthmix.cli import main
from tests.decoders import some_tokens, tiny, tiny_config

HERE = "tests.mechanisms.test_functions"
number = 3


def quadratic(x: Tensor) -> Tensor:
    """Three features of each vector, whatever its width."""
    square = x.square().sum(-1)
    return torch.stack([1 + square, torch.exp(x[..., 0]), torch.ones_like(square)], -1)


def closeness(query: Tensor, key: Tensor) -> Tensor:
    """Minus the squared distance: not constant at a query of 0."""
    return -(query - key).square().sum(-1)


def capped(query: Tensor, key: Tensor) -> Tensor:
    return 2 * torch.tanh((query * key).sum(-1) / 2)


def raw(x: Tensor) -> Tensor:
    return x


def summed(x: Tensor) -> Tensor:
    return x.exp().sum()


def pairs(query: Tensor, key: Tensor) -> Tensor:
    return query * key


def failing(*tensors: Tensor) -> Tensor:
    raise RuntimeError("out of ideas")


def says_yes(*tensors: Tensor) -> bool:
    return True


def normed(v: Tensor) -> Tensor:
    return v / torch.sqrt((v * v).mean() + 1e-6)


def split(v: Tensor, heads: int) -> list[Tensor]:
    return [v[g * (len(v) // heads) : (g + 1) * (len(v) // heads)] for g in range(heads)]


@pytest.mark.parametrize("name", ["attnres", "block_attnres", "delta_attnres"])
@pytest.mark.parametrize("query", ["static", "input"])
def test_a_kernel_of_ones_own_weighs_as_the_page_says(name: str, query: str) -> None:
    """α_i = ⟨φ(w), φ(k_i)⟩ / Σ_j ⟨φ(w), φ(k_j)⟩ per head, here with three features for any width."""
    probe = make_probe(name, {"mixing": "linear", "kernel": f"{HERE}:quadratic", "heads": 2, "query": query}, depth=4)
    states = probe.states()
    for mixer, state in zip(list(probe.stack)[1:], states[1:], strict=False):
        found = mixer.weights(state)
        for token in ((0, 0), (1, 2)):
            sources = [v[token] for v in state]
            origin = mixer.query.flatten() if query == "static" else mixer.query_proj @ normed(sources[-1])
            for g in range(2):
                products = [
                    quadratic(split(origin, 2)[g]) @ quadratic(split(normed(v), 2)[g]) for v in sources
                ]  # per source
                wanted = torch.stack(products) / sum(products)
                assert (found[(*token, g)] - wanted).abs().max() <= 1e-12


@pytest.mark.parametrize(("function", "mixing"), [(closeness, "softmax"), (capped, "sigmoid")])
def test_a_score_of_ones_own_weighs_as_the_page_says(function: Any, mixing: str) -> None:
    options = {"score": f"{HERE}:{function.__name__}", "mixing": mixing, "scale": 0.5, "heads": 2}
    probe = make_probe("attnres", options, depth=4)
    for mixer, state in zip(list(probe.stack)[1:], probe.states()[1:], strict=False):
        sources = [v[1, 2] for v in state]
        for g in range(2):
            keys = [split(mixer.key_weight * normed(v), 2)[g] for v in sources]
            scores = torch.stack([0.5 * function(mixer.query[g], k) for k in keys])
            wanted = torch.softmax(scores, 0) if mixing == "softmax" else torch.sigmoid(scores)
            assert (mixer.weights(state)[1, 2, g] - wanted).abs().max() <= 1e-12


@pytest.mark.parametrize(
    ("options", "claim", "rank"),
    [
        ({"mixing": "linear", "kernel": f"{HERE}:quadratic"}, "no", 3),
        ({"score": f"{HERE}:closeness"}, "no", 4),
        ({"score": f"{HERE}:capped"}, "up to scale", 4),
        ({"score": f"{HERE}:capped", "scale_by_count": True}, "exact", 4),
    ],
)
def test_facts_follow_from_the_function(options: dict[str, Any], claim: str, rank: int) -> None:
    """A score that is constant at a query of 0 keeps PreNorm; a kernel of r features has a rank of at most r."""
    stack = dm.DepthStack("attnres", dim=8, depth=7, **options)
    assert (stack.facts.preserves_prenorm, stack.facts.rank, stack.facts.two_phase) == (claim, rank, False)
    assert [check.name for check in verify("attnres", options) if not check.holds] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixing": "linear", "kernel": "elu"}, r"kernel='elu'; expected elu1 or package\.module:function, such as"),
        ({"score": "mine"}, r"score='mine'; expected package\.module:function"),
        ({"score": "no_such_package.scores:mine"}, r"cannot be imported \(ModuleNotFoundError: .*on PYTHONPATH"),
        ({"score": f"{HERE}:nothing"}, r"cannot be imported \(AttributeError: .*nothing"),
        ({"score": f"{HERE}:number"}, r"is a int; expected a function"),
        ({"score": f"{HERE}:failing"}, r"failed on tensors \[2, 4\] and \[5, 2, 4\] \(RuntimeError: out of ideas\)"),
        (
            {"score": f"{HERE}:pairs"},
            r"returned shape \[5, 2, 4\] for a query \[2, 4\] and a key \[5, 2, 4\]; expected \[5, 2\]",
        ),
        ({"score": f"{HERE}:says_yes"}, r"returned a bool .*; expected a floating-point tensor"),
        (
            {"mixing": "linear", "kernel": f"{HERE}:summed"},
            r"returned shape \[\] for a tensor of shape \[5, 2, 4\]; expected \[5, 2, r\]",
        ),
        ({"mixing": "linear", "kernel": f"{HERE}:raw"}, r"returned -[\d.]+; expected positive features"),
        ({"kernel": "torch:exp"}, r"kernel='torch:exp' with mixing='softmax'; expected mixing='linear'"),
        ({"mixing": "linear", "score": "torch:dot"}, r"score='torch:dot' with mixing='linear'; expected softmax or"),
        ({"query_from": "sum"}, r"query_from='sum' with query='static'; expected query='input'"),
        ({"query": "input", "query_from": "sum", "window": 2}, r"query_from='sum' with window=2; the sum needs all 6"),
        ({"query_init": -1.0}, r"query_init=-1\.0; expected at least 0"),
        ({"query_init": 0.1, "mixing": "static"}, r"query_init=0\.1 with mixing='static', which has no query"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_runs(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)attnres: .*{words}"):
        dm.DepthStack("attnres", dim=8, depth=6, heads=2, **options)


def test_a_window_as_long_as_the_network_keeps_the_sum() -> None:
    dm.DepthStack("attnres", dim=8, depth=6, query="input", query_from="sum", window=6)


def test_a_mixer_with_a_function_copies_and_pickles() -> None:
    stack = dm.DepthStack("attnres", dim=8, depth=3, score=f"{HERE}:closeness").double()
    x, sublayers = torch.randn(2, 8, dtype=torch.float64), [torch.tanh] * 3
    for twin in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        assert torch.equal(twin(x, sublayers), stack(x, sublayers))


def test_a_configuration_stores_the_name_and_a_file_imports_it_only_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny(mixer={"name": "attnres", "mixing": "linear", "kernel": "torch:exp"})
    dm.save_model(model, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["model"]["mixer"]
    assert (saved["kernel"], saved["score"]) == ("torch:exp", None)
    with pytest.raises(ValueError, match=r"names the function torch:exp \(mixer\.kernel\).*functions=True"):
        dm.load_model(tmp_path)
    assert main(["generate", str(tmp_path), "-p", "a", "-n", "1"]) == 2
    assert "depthmix generate --functions" in capsys.readouterr().err
    again = dm.load_model(tmp_path, functions=True)
    assert torch.equal(again(some_tokens(1, 4)), model(some_tokens(1, 4)))


def test_no_module_is_imported_unless_a_function_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal comes before the import."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_marker.py").write_text("def phi(x): return x.exp()\n")
    config = tiny_config(mixer={"name": "attnres", "mixing": "linear", "kernel": "torch:exp"})
    dm.save_model(dm.Decoder(config), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("torch:exp", "own_marker:phi"))
    with pytest.raises(ValueError, match="names the function own_marker:phi"):
        dm.load_model(tmp_path)
    assert "own_marker" not in sys.modules
    with pytest.raises(ValueError, match="kernel is 'torch:exp' in the state dict and 'own_marker:phi' here"):
        dm.load_model(tmp_path, functions=True)  # weights belong to the function that they were trained with
    assert sys.modules.pop("own_marker").phi
