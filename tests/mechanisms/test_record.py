"""A state dict says which options it was made with: it loads into the same function, or not at all."""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

import depthmix as dm
from depthmix.mechanisms import list_mechanisms, mechanism
from depthmix.models import io as model_io
from tests.decoders import some_tokens, tiny

KEY = "_extra_state"
OTHER = r"num_blocks is 4 in the state dict and 3 here"


def blocks(count: int, depth: int = 12) -> dm.DepthStack:
    torch.manual_seed(count)
    return dm.DepthStack("block_attnres", dim=8, depth=depth, num_blocks=count)


def old(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As 0.1.0 wrote it."""
    return {name: tensor for name, tensor in state.items() if not name.endswith(KEY)}


class Network(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.depth = blocks(count)


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


# What is recorded


def test_the_record_is_one_tensor_of_json_under_the_names_that_were_there_before() -> None:
    stack = blocks(4)
    state = stack.state_dict()
    assert set(state) == {KEY, *(name for name, _ in stack.named_parameters())}
    assert (state[KEY].dtype, state[KEY].device.type, len(state[KEY])) == (torch.uint8, "cpu", 1024)
    found = json.loads(bytes(state[KEY].tolist()))
    assert {key: found[key] for key in ("format", "mechanism", "block_sublayers", "num_blocks", "eps")} == {
        "format": 2,
        "mechanism": "block_attnres",
        "block_sublayers": 3,
        "num_blocks": 4,
        "eps": 1e-6,
    }


@pytest.mark.parametrize("name", list_mechanisms())
def test_every_variant_of_a_mechanism_is_told_from_the_others_that_compute_something_else(name: str) -> None:
    def made(options: Any) -> dm.DepthStack:
        return dm.DepthStack(name, dim=8, depth=6, **options)

    stacks = [made(options) for options in mechanism(name).variants]
    for stack, options in zip(stacks, mechanism(name).variants, strict=True):
        made(options).load_state_dict(stack.state_dict())
        shapes = {key: tensor.shape for key, tensor in stack.state_dict().items()}
        for other in stacks:
            if other.record() != stack.record() and {k: t.shape for k, t in other.state_dict().items()} == shapes:
                with pytest.raises(ValueError, match="belongs to a different function"):
                    other.load_state_dict(stack.state_dict())


def test_the_same_function_asked_for_in_another_way_is_the_same(no_warning: None) -> None:
    blocks(4).load_state_dict(dm.DepthStack("block_attnres", dim=8, depth=12, block_sublayers=3).state_dict())
    by_class = dm.DepthStack(mechanism("attnres"), dim=8, depth=4, scale=1)
    dm.DepthStack("attnres", dim=8, depth=4).load_state_dict(by_class.state_dict())


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("attnres", {"query_init": 0.5}),
        ("ddl", {"beta": 0.5}),
        ("highway", {"bias": 1.0}),
        ("scaled_residual", {"init": 1.0}),
        ("mhc", {"scale_init": 0.01}),
        ("mhc_lite", {"start": "paper"}),
    ],
)
def test_options_that_decide_the_start_alone_do_not_matter(name: str, start: Any, no_warning: None) -> None:
    stack = dm.DepthStack(name, dim=8, depth=4, **start)
    dm.DepthStack(name, dim=8, depth=4).load_state_dict(stack.state_dict())


def test_rules_that_came_later_leave_the_records_and_digests_of_linear_attention_as_they_were() -> None:
    before = {"rank": 4, "rule": "delta", "feature_map": "identity", "normalize": False, "eps": 1e-6}
    stack = dm.DepthStack("linear_attention", dim=8, depth=4, rule="delta")
    assert stack.record() == {"mechanism": "linear_attention", **before}
    for options in ({}, {"rule": "gated"}, {"rule": "delta", "rank": 2}):
        mixer = {"name": "linear_attention", **options}
        assert dm.DecoderConfig.from_depth(4, mixer=mixer).fingerprint()["mixer"] == mixer


def without(state: dict[str, Tensor], *options: str) -> dict[str, Tensor]:
    """As a version wrote it that did not have these options yet."""
    record = {k: v for k, v in json.loads(bytes(state[KEY].tolist())).items() if k not in options}
    return {**state, KEY: torch.tensor(list(json.dumps(record).encode().ljust(1024)), dtype=torch.uint8)}


def test_a_record_without_a_later_option_means_what_was_computed_then(no_warning: None) -> None:
    """An option that came later has the value that computes the same; another value is another function."""
    later = ("query_from", "kernel", "score")
    state = without(dm.DepthStack("attnres", dim=8, depth=4, query="input").state_dict(), *later)
    dm.DepthStack("attnres", dim=8, depth=4, query="input").load_state_dict(state)
    with pytest.raises(ValueError, match="query_from is 'newest' in the state dict and 'read' here"):
        dm.DepthStack("attnres", dim=8, depth=4, query="input", query_from="read").load_state_dict(state)
    other = {**state, KEY: blocks(4, depth=4).state_dict()[KEY]}
    with pytest.raises(ValueError, match=r"mechanism is 'block_attnres' in the state dict and 'attnres' here\. "):
        dm.DepthStack("attnres", dim=8, depth=4, query="input").load_state_dict(other)


# Ways to load


def test_a_state_dict_of_other_blocks_is_refused_with_both_values() -> None:
    stack, before = blocks(3), copy.deepcopy(blocks(3).state_dict())
    words = rf"block_sublayers is 3 in the state dict and 4 here, {OTHER}\. "
    words += r"Build it with .* load_converted\(state_dict\)"
    with pytest.raises(ValueError, match=words):
        stack.load_state_dict(blocks(4).state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in stack.state_dict().items())
    with pytest.raises(ValueError, match=r"mechanism is 'block_attnres' in the state dict and 'attnres' here"):
        dm.DepthStack("attnres", dim=8, depth=12).load_state_dict(blocks(4).state_dict())
    with pytest.raises(ValueError, match=r"eps is 0\.001 in the state dict and 1e-06 here"):
        dm.DepthStack("attnres", dim=8, depth=4).load_state_dict(
            dm.DepthStack("attnres", dim=8, depth=4, eps=1e-3).state_dict()
        )


def test_inside_a_network_it_is_refused_too(no_warning: None) -> None:
    with pytest.raises(ValueError, match=OTHER):
        Network(3).load_state_dict(Network(4).state_dict())
    Network(4).load_state_dict(Network(4).state_dict())


def test_safetensors_carry_it(tmp_path: Path, no_warning: None) -> None:
    save_model(Network(4), str(tmp_path / "a"))
    save_file(Network(4).state_dict(), tmp_path / "b")
    assert load_model(Network(4), tmp_path / "a") == (set(), [])
    Network(4).load_state_dict(load_file(tmp_path / "b"))
    with pytest.raises(ValueError, match=OTHER):
        load_model(Network(3), tmp_path / "a")
    with pytest.raises(ValueError, match=OTHER):
        Network(3).load_state_dict(load_file(tmp_path / "b"))


def test_torch_save_carries_it(no_warning: None) -> None:
    buffer = io.BytesIO()
    torch.save(Network(4).state_dict(), buffer)
    buffer.seek(0)
    found = torch.load(buffer, weights_only=True)
    Network(4).load_state_dict(found)
    with pytest.raises(ValueError, match=OTHER):
        Network(3).load_state_dict(found)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_distributed_checkpoints_carry_it(tmp_path: Path) -> None:
    dcp.save({"model": Network(4).state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    for count in (4, 3):
        network = Network(count)
        state = {"model": network.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        if count == 4:
            network.load_state_dict(state["model"])
        else:
            with pytest.raises(ValueError, match=OTHER):
                network.load_state_dict(state["model"])


def test_a_sharded_model_carries_it(tmp_path: Path, no_warning: None) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        four, again, three = (fully_shard(Network(count), mesh=mesh) for count in (4, 4, 3))
        state = get_model_state_dict(four)
        assert torch.equal(state[f"depth.{KEY}"], blocks(4).state_dict()[KEY])
        set_model_state_dict(again, state)
        with pytest.raises(ValueError, match=OTHER):
            set_model_state_dict(three, state)
    finally:
        dist.destroy_process_group()


def test_a_model_of_transformers_carries_it(tmp_path: Path, no_warning: None) -> None:
    transformers = pytest.importorskip("transformers")

    class Config(transformers.PretrainedConfig):  # type: ignore[misc, name-defined]
        model_type = "depthmix-test"
        count = 4

    class Model(transformers.PreTrainedModel):  # type: ignore[misc, name-defined]
        config_class = Config

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.network = Network(config.count)
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            pass

    made = Model(Config(count=4))
    made.save_pretrained(tmp_path)
    found, report = Model.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for (name, a), b in zip(made.state_dict().items(), found.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(Exception, match=OTHER):
        Model.from_pretrained(tmp_path, config=Config(count=3))


def test_a_deep_copy_a_meta_device_and_a_cast_keep_it(no_warning: None) -> None:
    stack = blocks(4)
    twin = copy.deepcopy(stack).double()
    assert torch.equal(twin.state_dict()[KEY], stack.state_dict()[KEY])
    with torch.device("meta"):
        empty = blocks(4)
    empty.to_empty(device="cpu").load_state_dict(stack.state_dict())
    with torch.device("meta"):
        blocks(4).load_state_dict(stack.state_dict(), assign=True)


def test_a_slice_has_the_record_of_the_whole(no_warning: None) -> None:
    whole, other = blocks(4), blocks(3)
    part = whole.slice(3, 6)
    assert torch.equal(part.state_dict()[KEY], whole.state_dict()[KEY])
    blocks(4).slice(3, 6).load_state_dict(part.state_dict())
    blocks(4).load_state_dict(part.state_dict(), strict=False)
    with pytest.raises(ValueError, match=OTHER):
        other.slice(3, 6).load_state_dict(part.state_dict())
    with pytest.raises(ValueError, match=OTHER):
        other.load_state_dict(part.state_dict(), strict=False)


# Without a record


def test_weights_of_0_1_0_load_with_one_warning_and_no_missing_key() -> None:
    for make in (blocks, Network):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            left = make(4).load_state_dict(old(make(4).state_dict()))
        assert not left.missing_keys
        assert not left.unexpected_keys
        assert [w.category for w in caught] == [UserWarning]
        assert "Check that it was trained with these: mechanism='block_attnres'" in str(caught[0].message)
        assert "num_blocks=4" in str(caught[0].message)


def test_no_warning_where_nothing_could_differ_or_nothing_is_loaded(no_warning: None) -> None:
    dm.DepthStack("residual", dim=8, depth=4).load_state_dict({})
    adapter = {"inner.weight": torch.zeros(8, 8)}  # as PEFT loads: some parameters, and none of the stack
    Network(4).load_state_dict(adapter, strict=False)


def test_a_damaged_or_later_record_is_named() -> None:
    state = blocks(4).state_dict()
    broken = torch.zeros_like(state[KEY])
    for bad in (broken, state[KEY][:10], state[KEY].float() + 0.5, "text"):
        with pytest.raises(ValueError, match=r"the record of options in this state dict \(_extra_state\) is damaged"):
            blocks(4).load_state_dict({**state, KEY: bad})
    text = json.dumps({"format": 3}).encode()
    with pytest.raises(ValueError, match=r"has format 3; this version reads 2\. Install a newer depthmix"):
        blocks(4).load_state_dict({**state, KEY: torch.tensor(list(text), dtype=torch.uint8)})


# On purpose


def test_conversion_is_explicit_and_loads_all_parameters(no_warning: None) -> None:
    source = blocks(4)
    for target in (blocks(3), dm.DepthStack("attnres", dim=8, depth=12)):
        for state in (source.state_dict(), old(source.state_dict())):
            target.load_converted(state)
            for name, parameter in target.named_parameters():
                assert torch.equal(parameter, source.get_parameter(name))
    assert json.loads(bytes(target.state_dict()[KEY].tolist()))["mechanism"] == "attnres"


def test_what_cannot_be_converted_is_named_and_nothing_is_loaded() -> None:
    target = blocks(3)
    before = copy.deepcopy(target.state_dict())
    cases = [
        (
            blocks(4, depth=10).state_dict(),
            r"missing: mixers\.10\.key_weight, .* \(4\)",
        ),
        (dm.DepthStack("mhc", dim=8, depth=12).state_dict(), "not in this module: "),
        (
            dm.DepthStack("block_attnres", dim=16, depth=12).state_dict(),
            r"different shape: .* \[16\], here \[8\]",
        ),
    ]
    for state, words in cases:
        with pytest.raises(ValueError, match=words):
            target.load_converted(state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


# Decoders and their files


def test_a_decoder_is_told_by_its_value_mixer_too() -> None:
    made = {
        stride: tiny(mixer="attnres", kv_mixer=stride and {"name": "depth_attention", "stride": stride})
        for stride in (None, 1, 2)
    }
    with pytest.raises(ValueError, match="stride is 1 in the state dict and 2 here"):
        made[2].load_state_dict(made[1].state_dict())
    with pytest.raises(ValueError, match="kv_mixer is None in the state dict and 'depth_attention' here"):
        made[2].load_state_dict(made[None].state_dict())
    made[2].load_converted(made[1].state_dict())


def test_files_of_a_model_need_no_warning_and_a_foreign_record_is_refused(tmp_path: Path, no_warning: None) -> None:
    model = tiny(mixer={"name": "block_attnres", "num_blocks": 3}, kv_mixer="depth_attention")
    model_io.save_model(model, tmp_path)
    assert torch.equal(model_io.load_model(tmp_path)(some_tokens(1, 4)), model(some_tokens(1, 4)))
    assert f"depth.{KEY}" in load_file(tmp_path / "model.safetensors")
    about = json.loads((tmp_path / "config.json").read_text())
    about["model"]["mixer"]["num_blocks"] = 2
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="num_blocks is 3 in the state dict and 2 here"):
        model_io.load_model(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_state_dict_whose_tensors_were_all_cast_still_knows_its_options(dtype: torch.dtype) -> None:
    saved = dm.DepthStack("block_attnres", dim=8, depth=12, num_blocks=4).state_dict()
    cast = {name: tensor.to(dtype) for name, tensor in saved.items()}
    dm.DepthStack("block_attnres", dim=8, depth=12, num_blocks=4).load_state_dict(cast)
    with pytest.raises(ValueError, match="num_blocks is 4 in the state dict and 3 here"):
        dm.DepthStack("block_attnres", dim=8, depth=12, num_blocks=3).load_state_dict(cast)
