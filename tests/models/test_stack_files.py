"""A bare stack on disk: a loaded one computes what the saved one did, and what cannot be loaded is not saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm
from tests.cases import DEFAULTS, label
from tests.decoders import tiny

MORE: list[tuple[str, dict[str, Any]]] = [
    ("block_attnres", {"num_blocks": 3, "eps": 1e-5}),
    ("attnres", {"window": 2, "heads": 2, "group_sublayers": None}),
    ("mhc", {"readout": "learned", "streams": 2, "eps": 1e-6}),
]
STACKS = [*(case.values for case in DEFAULTS), *MORE]
EVERY_STACK = pytest.mark.parametrize(("name", "options"), [pytest.param(*c, id=label(*c)) for c in STACKS])


def random_stack(name: str, *, dim: int = 8, depth: int = 6, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """With parameters that no start has."""
    torch.manual_seed(0)
    stack = dm.DepthStack(name, dim=dim, depth=depth, **options).to(dtype)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return stack


def output(stack: dm.DepthStack) -> Tensor:
    x = torch.randn(2, 3, stack.dim, generator=torch.Generator().manual_seed(1)).to(torch.float64)
    return stack(x, [torch.tanh] * stack.depth)


def assert_same(found: dm.DepthStack, stack: dm.DepthStack) -> None:
    left, right = found.state_dict(), stack.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert left[name].dtype == tensor.dtype, name
        assert torch.equal(left[name], tensor), name


@EVERY_STACK
@torch.no_grad()
def test_a_saved_stack_comes_back_bit_for_bit(name: str, options: Any, tmp_path: Path) -> None:
    stack = random_stack(name, **options)
    dm.save_stack(stack, tmp_path / "new" / "stack")
    found = dm.load_stack(tmp_path / "new" / "stack")
    assert_same(found, stack)
    assert torch.equal(output(found), output(stack))
    assert {path.name for path in (tmp_path / "new" / "stack").iterdir()} == {"config.json", "model.safetensors"}
    assert found.config.resolved(dim=8, depth=6) == stack.config.resolved(dim=8, depth=6)
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in found.parameters())


@pytest.mark.parametrize("order", [(0, 1, 0, 1, 2, 3), (0, 1, 2, 1, 2, 3)], ids=str)
@torch.no_grad()
def test_shared_mixers_kinds_and_dtypes_come_back(order: Any, tmp_path: Path) -> None:
    kinds = ["mlp", "attn", "attn", "mlp", "attn", "mlp"]
    stack = random_stack("block_attnres", block_sublayers=3, order=order, kinds=kinds, dtype=torch.bfloat16)
    dm.save_stack(stack, tmp_path)
    found = dm.load_stack(tmp_path)
    assert_same(found, stack)
    assert [mixer.site.kind for mixer in found] == kinds
    assert found.order == order
    assert found[1] is not found[0]
    wide = dm.load_stack(tmp_path, dtype=torch.float64)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float64}
    assert torch.equal(output(wide), output(stack.double()))


def test_the_configuration_has_every_option_and_a_format(tmp_path: Path) -> None:
    dm.save_stack(random_stack("block_attnres"), tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["format"] == 2
    assert about["stack"]["mixer"]["name"] == "block_attnres"
    assert about["stack"]["mixer"]["block_sublayers"] == 2
    assert about["stack"]["mixer"]["eps"] == 1e-6
    assert {key: about["stack"][key] for key in ("dim", "depth", "order")} == {"dim": 8, "depth": 6, "order": None}


@torch.no_grad()
def test_a_loaded_stack_goes_into_a_decoder_of_the_same_depth(tmp_path: Path) -> None:
    first = tiny(mixer={"name": "block_attnres", "block_sublayers": 2})
    dm.save_stack(first.depth, tmp_path)
    torch.manual_seed(5)
    second = dm.Decoder(first.config).double()
    second.depth.load_state_dict(dm.load_stack(tmp_path).state_dict())
    assert_same(second.depth, first.depth)


def test_slices_joined_again_are_saved_as_the_whole(tmp_path: Path) -> None:
    stack = random_stack("block_attnres")
    dm.save_stack(dm.DepthStack.joined([stack.slice(0, 2), stack.slice(2, 6)]), tmp_path)
    assert_same(dm.load_stack(tmp_path), stack)
    with pytest.raises(ValueError, match=r"save_stack got a slice, sublayers 0 to 1 of 6; expected the whole stack"):
        dm.save_stack(stack.slice(0, 2), tmp_path / "slice")
    assert not (tmp_path / "slice").exists()


def test_a_class_that_nobody_could_find_again_is_not_saved(tmp_path: Path) -> None:
    class Own(dm.mechanism("residual")):  # type: ignore[misc]
        pass

    with pytest.raises(ValueError, match=r"mixers of the class Own, which is not registered"):
        dm.save_stack(dm.DepthStack(Own, dim=8, depth=2), tmp_path)
    with pytest.raises(TypeError, match="save_stack got a Linear; expected a DepthStack"):
        dm.save_stack(torch.nn.Linear(2, 2), tmp_path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_stack_that_names_functions_is_loaded_only_when_asked(tmp_path: Path) -> None:
    stack = random_stack("attnres", mixing="linear", kernel="torch.nn.functional:softplus")
    dm.save_stack(stack, tmp_path)
    words = r"names the function torch.nn.functional:softplus \(mixer.kernel\); loading this stack .* use load_stack\("
    with pytest.raises(ValueError, match=words):
        dm.load_stack(tmp_path)
    assert_same(dm.load_stack(tmp_path, functions=True), stack)


def test_damage_has_a_name(tmp_path: Path) -> None:
    dm.save_stack(random_stack("block_attnres"), tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    about, data = json.loads(config.read_text()), weights.read_bytes()
    weights.write_bytes(data[:-8])
    with pytest.raises(ValueError, match=r"model.safetensors has \d+ bytes; config.json expects \d+. It is truncated"):
        dm.load_stack(tmp_path)
    weights.write_bytes(data)
    for field, value in (("depth", "six"), ("kinds", ["attn"]), ("mixer", {"name": "nothing"}), ("dim", None)):
        config.write_text(json.dumps({**about, "stack": {**about["stack"], field: value}}))
        with pytest.raises(ValueError, match=r"config.json is not a valid configuration|unknown mechanism 'nothing'"):
            dm.load_stack(tmp_path)
    config.write_text(json.dumps({**about, "stack": {k: v for k, v in about["stack"].items() if k != "order"}}))
    with pytest.raises(ValueError, match=r"config.json has no stack.order"):
        dm.load_stack(tmp_path)
    config.write_text(json.dumps({**about, "stack": {**about["stack"], "dim": 9}}))
    with pytest.raises(ValueError, match=r"mixers.1.query has shape \[8\], expected \[9\]"):
        dm.load_stack(tmp_path)


def test_models_and_stacks_are_told_apart(tmp_path: Path) -> None:
    dm.save_stack(random_stack("block_attnres"), tmp_path / "stack")
    dm.save_model(tiny(), tmp_path / "model")
    with pytest.raises(ValueError, match=r"holds a stack, not a model: save_stack wrote it. Load it with load_stack"):
        dm.load_model(tmp_path / "stack")
    with pytest.raises(ValueError, match=r"holds a model, not a stack: save_model wrote it. Load it with load_model"):
        dm.load_stack(tmp_path / "model")
    with pytest.raises(FileNotFoundError, match="which save_stack writes"):
        dm.load_stack(tmp_path)
    with pytest.raises(FileNotFoundError, match="expected a folder that save_stack wrote"):
        dm.load_stack(tmp_path / "none")
