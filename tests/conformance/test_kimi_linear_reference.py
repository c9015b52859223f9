"""transformers: its Kimi Linear, against the plain loops of tests/reference that read a checkpoint's public names."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.conformance import kimi_linear_model as theirs
from tests.reference import block_attnres, kimi_linear

pytest.importorskip("transformers.models.kimi_linear", reason="transformers 5.22 is the first that has it")

PEER = "transformers"
ROOT = Path(__file__).parents[2]
EVERY_FORM = pytest.mark.parametrize("form", theirs.SIZES)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What their process left of one form."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    results: dict[str, Tensor]


def read(folder: Path) -> Written:
    return Written(
        weights=load_file(folder / "weights" / "model.safetensors"),
        gradients=load_file(folder / "gradients" / "model.safetensors"),
        results=load_file(folder / "results.safetensors"),
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    folder = tmp_path_factory.mktemp("kimi_linear")
    command = [sys.executable, "-m", "tests.conformance.kimi_linear_model", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {form: read(folder / form) for form in theirs.SIZES}


def mean_of_blocks(sublayers: int) -> dict[str, Tensor]:
    """Queries at zero: with scale_by_count every read is the sum of all outputs, whatever the key weights."""
    sites = [f"mixers.{i}" for i in range(1, sublayers)] + ["out"]
    dim = theirs.SIZES["kimi"]["hidden_size"]
    queries = {f"{site}.query": torch.zeros(dim, dtype=torch.float64) for site in sites}
    return queries | {f"{site}.key_weight": torch.rand(dim, dtype=torch.float64) for site in sites}


@EVERY_FORM
def test_logits_are_theirs(form: str, written: dict[str, Written], agree: Any) -> None:
    ours = kimi_linear.logits(theirs.whole(), written[form].weights, **theirs.OPTIONS[form])
    expected = written[form].results["whole"]
    assert expected.dtype == torch.float64
    assert (ours - expected).abs().max() <= 1e-10
    agree("reference of Kimi Linear, logits", [ours], [expected])


@EVERY_FORM
def test_gradients_of_every_tensor_of_the_checkpoint_are_theirs(
    form: str, written: dict[str, Written], agree: Any
) -> None:
    weights, expected = dict(written[form].weights), dict(written[form].gradients)
    for name in [name for name in expected if name.endswith("e_score_correction_bias")]:
        del expected[name]  # a buffer: it decides a choice and has no gradient
    leaves = {name: weights[name].requires_grad_() for name in expected}
    logits = kimi_linear.logits(theirs.whole(), weights, **theirs.OPTIONS[form])
    ours = torch.autograd.grad(theirs.project(logits), list(leaves.values()), materialize_grads=True)
    agree("reference of Kimi Linear, gradients", list(ours), list(expected.values()), tolerance=1e-10)


@EVERY_FORM
def test_logits_of_rows_that_begin_or_end_with_padding_are_theirs(
    form: str, written: dict[str, Written], agree: Any
) -> None:
    valid = theirs.VALID
    ours = kimi_linear.logits(theirs.padded(), written[form].weights, valid=valid, **theirs.OPTIONS[form])
    agree("reference of Kimi Linear, padding", [ours[valid]], [written[form].results["padded"][valid]])


@EVERY_FORM
def test_packed_documents_are_theirs_one_at_a_time(form: str, written: dict[str, Written], agree: Any) -> None:
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(theirs.LENGTHS))[None]
    ours = kimi_linear.logits(theirs.packed(), written[form].weights, documents=documents, **theirs.OPTIONS[form])
    agree("reference of Kimi Linear, packed documents", [ours], [written[form].results["packed"]])


@EVERY_FORM
def test_the_bias_of_the_experts_changes_what_is_chosen(form: str, written: dict[str, Written]) -> None:
    # otherwise the tests above would not see a bias that also enters the weights
    weights = written[form].weights
    unbiased = {name: torch.zeros_like(t) if name.endswith("bias") else t for name, t in weights.items()}
    unbiased.update({name: t for name, t in weights.items() if name.endswith("dt_bias")})
    tokens = theirs.packed()
    ours, other = (kimi_linear.logits(tokens, each, **theirs.OPTIONS[form]) for each in (weights, unbiased))
    assert (ours - other).abs().max() > 1e-3


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_block_attention_residuals_with_zero_queries_give_their_logits(
    blocks: int, written: dict[str, Written], agree: Any
) -> None:
    def depth(x: Tensor, sublayers: list[kimi_linear.Sublayer]) -> list[Tensor]:
        mixers = mean_of_blocks(len(sublayers))
        return block_attnres.inputs(x, sublayers, mixers, num_blocks=blocks, scale_by_count=True, eps=1e-5)

    ours = kimi_linear.logits(theirs.packed()[:, :5], written["kimi"].weights, depth=depth, **theirs.OPTIONS["kimi"])
    agree("reference of Kimi Linear with block_attnres", [ours], [written["kimi"].results["packed"][:, :5]])


def test_both_names_of_a_dense_mlp_are_read(written: dict[str, Written]) -> None:
    given = written["kimi"].weights
    inner, outer = "model.layers.0.block_sparse_moe.", "model.layers.0.mlp."
    spellings = [
        {name.replace(*pair): tensor for name, tensor in given.items()} for pair in ((inner, outer), (outer, inner))
    ]
    assert spellings[0].keys() != spellings[1].keys()
    ours = [kimi_linear.logits(theirs.packed(), each, **theirs.OPTIONS["kimi"]) for each in spellings]
    torch.testing.assert_close(*ours, rtol=0, atol=0)
