"""transformers: its Kimi Linear, against the plain loops of tests/reference that read a checkpoint's public names."""

from __future__ import annotations

import json
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
from tests.reference import block_attnres, kimi_counts, kimi_linear

pytest.importorskip("transformers.models.kimi_linear", reason="this version of transformers has no Kimi Linear")

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kimi_linear")
    command = [sys.executable, "-m", "tests.conformance.kimi_linear_model", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[str, Written]:
    return {form: read(folder / form) for form in theirs.SIZES}


def mixers(sublayers: int, *, size: float) -> dict[str, Tensor]:
    """Parameters of block_attnres with queries of this size. The first sublayer has none."""
    generator = torch.Generator().manual_seed(5)
    params = {}
    for site in [*(f"mixers.{i}" for i in range(1, sublayers)), "out"]:
        query, key_weight = torch.randn(2, 24, generator=generator, dtype=torch.float64)
        params |= {f"{site}.query": size * query, f"{site}.key_weight": 1 + 0.2 * key_weight}
    return params


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
def test_block_attention_residuals_give_their_logits_with_queries_at_zero_only(
    blocks: int, written: dict[str, Written], agree: Any
) -> None:
    def logits(size: float) -> Tensor:
        def depth(x: Tensor, sublayers: list[kimi_linear.Sublayer]) -> list[Tensor]:
            params = mixers(len(sublayers), size=size)  # scale_by_count: with equal weights a read is the plain sum
            return block_attnres.inputs(x, sublayers, params, num_blocks=blocks, scale_by_count=True, eps=1e-5)

        first = theirs.packed()[:, : theirs.LENGTHS[0]]
        return kimi_linear.logits(first, written["kimi"].weights, depth=depth, **theirs.OPTIONS["kimi"])

    expected = written["kimi"].results["packed"][:, : theirs.LENGTHS[0]]
    agree("reference of Kimi Linear with block_attnres at zero", [logits(0.0)], [expected])
    assert (logits(0.3) - expected).abs().max() > 1e-2


def test_both_names_of_a_dense_mlp_are_read(written: dict[str, Written]) -> None:
    given = written["kimi"].weights
    inner, outer = "model.layers.0.block_sparse_moe.", "model.layers.0.mlp."
    spellings = [
        {name.replace(*pair): tensor for name, tensor in given.items()} for pair in ((inner, outer), (outer, inner))
    ]
    assert spellings[0].keys() != spellings[1].keys()
    ours = [kimi_linear.logits(theirs.packed(), each, **theirs.OPTIONS["kimi"]) for each in spellings]
    torch.testing.assert_close(*ours, rtol=0, atol=0)


def test_names_and_shapes_of_the_checkpoint_are_those_that_are_counted(written: dict[str, Written]) -> None:
    size = theirs.SIZES["kimi"]
    model = kimi_counts.Model(
        attention=tuple(theirs.OPTIONS["kimi"]["attention"]),
        dim=size["hidden_size"],
        heads=size["num_attention_heads"],
        dense_hidden=size["intermediate_size"],
        expert_hidden=size["moe_intermediate_size"],
        experts=size["num_local_experts"],
        vocabulary=theirs.VOCABULARY,
        head_dim=size["linear_head_dim"],
        rank=size["kv_lora_rank"],
        own_key=size["qk_nope_head_dim"],
        shared_key=size["qk_rope_head_dim"],
        value=size["v_head_dim"],
    )
    # they write the dense MLP under the name of experts
    saved, public = "layers.0.block_sparse_moe.", "layers.0.mlp."
    shapes = {name.replace(saved, public): tuple(tensor.shape) for name, tensor in written["kimi"].weights.items()}
    assert shapes == kimi_counts.shapes(model)


def test_the_released_size_has_the_number_of_parameters_that_is_counted(folder: Path) -> None:
    theirs_48b = json.loads((folder / "48b.json").read_text())["parameters"]
    assert theirs_48b == kimi_counts.total(kimi_counts.KIMI_LINEAR_48B)
