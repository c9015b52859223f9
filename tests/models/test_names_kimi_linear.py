"""Whole Kimi Linear checkpoints: the tensors under their public names compute what the loops say, and come back.

The tables here are written by hand and not from the package: names, shapes and fields are those of the public files.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import depthmix as dm
from depthmix.models import preset
from depthmix.models.names import checkpoint, convert_checkpoint, read_checkpoint, save_converted, write_checkpoint
from depthmix.models.names.kimi_linear import places
from depthmix.models.names.kimi_linear_config import read_config, write_config
from depthmix.models.names.shards import parse_size
from depthmix.models.names.tensor_file import Entry, TensorFile
from tests.models.test_names import shard
from tests.reference import kimi_linear
from tests.runs import CHILD

NAME = "kimi_linear"
V, D, H, HIDDEN, EXPERTS = 37, 18, 3, 30, 5
KDA_HEADS, d, WIDTH = 2, 6, 3  # of KDA
RANK, NOPE, SHARED, VALUE = 10, 9, 3, 5  # of MLA
EXPERT, SHARED_EXPERTS = 7, 2
P = KDA_HEADS * d
KINDS = ["mla", "kda", "kda", "mla", "kda", "mla"]
DENSE = 2  # first layers without experts
OPTIONS: dict[str, Any] = {
    **{"attention": KINDS, "heads": H, "kda_heads": KDA_HEADS, "active": 3, "scale": 1.7, "eps": 1e-2},
    "kv_norm_eps": 1e-6,
}
CONFIG: dict[str, Any] = {  # every size is another one, so that none can stand for another
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "head_dim": 72,  # no size of anything
    "hidden_act": "silu",
    "hidden_size": D,
    "intermediate_size": HIDDEN,
    "kv_lora_rank": RANK,
    "linear_attn_config": {
        "full_attn_layers": [1, 4, 6],
        "head_dim": d,
        "kda_layers": [2, 3, 5],
        "num_heads": KDA_HEADS,
        "short_conv_kernel_size": WIDTH,
    },
    "mla_use_nope": True,
    "moe_intermediate_size": EXPERT,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": H,
    "num_expert_group": 1,
    "num_experts": EXPERTS,
    "num_experts_per_token": 3,
    "num_hidden_layers": len(KINDS),
    "num_key_value_heads": H,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": SHARED_EXPERTS,
    "first_k_dense_replace": DENSE,
    "q_lora_rank": None,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": SHARED,
    "rms_norm_eps": 1e-2,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.7,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": VALUE,
    "vocab_size": V,
}


def swiglu(hidden: int) -> dict[str, tuple[int, ...]]:
    return {"gate_proj": (hidden, D), "up_proj": (hidden, D), "down_proj": (D, hidden)}


def attention_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    if kind == "mla":
        return {
            "q_proj.weight": (H * (NOPE + SHARED), D),
            "kv_a_proj_with_mqa.weight": (RANK + SHARED, D),
            "kv_a_layernorm.weight": (RANK,),
            "kv_b_proj.weight": (H * (NOPE + VALUE), RANK),
            "o_proj.weight": (D, H * VALUE),
        }
    return {
        **{f"{part}_proj.weight": (P, D) for part in "qkv"},
        **{f"{part}_conv1d.weight": (P, 1, WIDTH) for part in "qkv"},
        **{"f_a_proj.weight": (d, D), "f_b_proj.weight": (P, d)},
        **{"g_a_proj.weight": (d, D), "g_b_proj.weight": (P, d)},
        **{"A_log": (1, 1, KDA_HEADS, 1), "dt_bias": (P,), "b_proj.weight": (KDA_HEADS, D)},
        **{"o_norm.weight": (d,), "o_proj.weight": (D, P)},
    }


def public_shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for i, kind in enumerate(KINDS):
        layer = f"model.layers.{i}"
        found |= {f"{layer}.{norm}_layernorm.weight": (D,) for norm in ("input", "post_attention")}
        found |= {f"{layer}.self_attn.{name}": shape for name, shape in attention_shapes(kind).items()}
        if i < DENSE:
            found |= {f"{layer}.mlp.{name}.weight": shape for name, shape in swiglu(HIDDEN).items()}
            continue
        moe = f"{layer}.block_sparse_moe"
        found |= {f"{moe}.gate.weight": (EXPERTS, D), f"{moe}.gate.e_score_correction_bias": (EXPERTS,)}
        for e in range(EXPERTS):
            w = {"w1": (EXPERT, D), "w2": (D, EXPERT), "w3": (EXPERT, D)}
            found |= {f"{moe}.experts.{e}.{name}.weight": shape for name, shape in w.items()}
        shared = swiglu(SHARED_EXPERTS * EXPERT)
        found |= {f"{moe}.shared_experts.{name}.weight": shape for name, shape in shared.items()}
    return {**found, "model.norm.weight": (D,), "lm_head.weight": (V, D)}


def public_tensors(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """As the public files have them: A_log, dt_bias and the bias of the experts in float32 beside bfloat16."""
    generator = torch.Generator().manual_seed(5)
    made = {}
    for name, shape in public_shapes().items():
        wide = name.endswith(("A_log", "dt_bias", "e_score_correction_bias")) and dtype == torch.bfloat16
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4
        made[name] = (values + (1 if "norm" in name else 0)).to(torch.float32 if wide else dtype)
    return made


def place(folder: Path, tensors: dict[str, Tensor] | None = None, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    save_file(public_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def transformers_spelling(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in tensors.items()}


def transformers_fields() -> dict[str, Any]:
    """The configuration that `save_pretrained` writes for the same model."""
    fields = {k: v for k, v in CONFIG.items() if k not in ("linear_attn_config", "first_k_dense_replace", "rope_theta")}
    types = {"kda": "linear_attention", "mla": "full_attention"}
    return {
        **fields,
        "layer_types": [types[kind] for kind in KINDS],
        "mlp_layer_types": ["dense"] * DENSE + ["sparse"] * (len(KINDS) - DENSE),
        "linear_head_dim": d,
        "linear_num_heads": KDA_HEADS,
        "linear_conv_kernel_dim": WIDTH,
        "qk_head_dim": NOPE + SHARED,
    }


def some_tokens() -> Tensor:
    return torch.randint(0, V, (2, 11), generator=torch.Generator().manual_seed(1))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def small(**changes: Any) -> dm.Decoder:
    """A decoder away from its start, with a bias of the experts that decides choices."""
    torch.manual_seed(0)
    sizes = {"dim": 32, "heads": 2, "hidden": 32, "norm_eps": 1e-5, "vocab_size": V}
    model = dm.Decoder(dm.DecoderConfig.from_depth(12, backbone="kimi_linear", **{**sizes, **changes})).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor), alpha=0.2)
    return model


# What the names mean


@torch.no_grad()
@pytest.mark.parametrize("written_by", ["public", "transformers"])
def test_logits_are_those_of_the_loops_on_the_public_tensors(written_by: str, tmp_path: Path) -> None:
    tensors = public_tensors()
    expected = kimi_linear.logits(some_tokens(), tensors, **OPTIONS)
    if written_by == "transformers":
        place(tmp_path, transformers_spelling(tensors))
        (tmp_path / "config.json").write_text(json.dumps(transformers_fields()))
    else:
        place(tmp_path, tensors)
    found = read_checkpoint(tmp_path, NAME)
    assert (found.module(some_tokens()) - expected).abs().max() <= 1e-10
    assert expected.abs().max() > 1e-2
    assert (found.tensors, found.notes) == (len(tensors), ())
    assert found.module.depth.registered == "residual"


@torch.no_grad()
def test_what_is_written_computes_by_the_loops_what_the_decoder_does(tmp_path: Path) -> None:
    model = small().double()
    assert write_checkpoint(model, tmp_path / "public", NAME).files == ("model.safetensors", "config.json")
    kinds = list(model.config.attention_kinds)
    options = {"attention": kinds, "heads": 2, "active": 2, "scale": 2.446, "eps": 1e-5}
    weights = {name: tensor.double() for name, tensor in load_file(tmp_path / "public" / "model.safetensors").items()}
    expected = kimi_linear.logits(some_tokens(), weights, **options)
    assert (model(some_tokens()) - expected).abs().max() <= 1e-10


def test_names_shapes_and_dtypes_of_what_is_written_are_the_public_ones(tmp_path: Path) -> None:
    tensors = public_tensors(torch.bfloat16)
    model = read_checkpoint(place(tmp_path / "public", tensors), NAME).module
    write_checkpoint(model, tmp_path / "again", NAME)
    again = load_file(tmp_path / "again" / "model.safetensors")
    about = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in again.items()} == about
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    fields = json.loads((tmp_path / "again" / "config.json").read_text())
    for field in CONFIG.keys() - {"head_dim", "rope_scaling", "rope_theta", "use_grouped_topk"}:
        if field != "num_nextn_predict_layers":
            assert fields[field] == CONFIG[field], field


PUBLISHED: dict[str, Any] = {  # what decides the function of the published 48B model
    "model_type": "kimi_linear",
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def test_the_published_configuration_is_the_preset(tmp_path: Path) -> None:
    source = checkpoint.Checkpoint(folder=tmp_path, config=PUBLISHED, files={})
    ours = preset("kimi-linear-48b", mixer="residual")
    assert read_config(source) == (ours, ())
    written = write_config(ours, "bfloat16")
    assert {name: written[name] for name in PUBLISHED} == PUBLISHED


def test_the_48_billion_parameters_have_20493_tensors() -> None:
    config = preset("kimi-linear-48b", mixer="residual")
    with torch.device("meta"):
        own = dm.Decoder(config).state_dict()
    table = list(places(config))
    assert len({row.theirs for row in table}) == len(table) == 20_493
    elements = sum(math.prod(row.shape(tuple(own[row.ours].shape))) for row in table)
    assert elements == 49_122_675_072 + 26 * 256  # and the biases of the experts, which are no parameters


# There and back


def test_a_checkpoint_in_three_shards_comes_back_bit_for_bit_in_a_new_process(tmp_path: Path) -> None:
    tensors = public_tensors(torch.bfloat16)
    assert len(set(shard(place(tmp_path / "public", tensors)).values())) == 3
    code = (
        "import depthmix as dm\n"
        "from depthmix.models.names import convert_checkpoint, write_checkpoint\n"
        f"convert_checkpoint('public', 'ours', '{NAME}')\n"
        f"write_checkpoint(dm.load_model('ours'), 'again', '{NAME}', shard_size='20KB')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=CHILD, check=True)
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())
    again: dict[str, Tensor] = {}
    for file in set(index["weight_map"].values()):
        held = load_file(tmp_path / "again" / file)
        assert all(index["weight_map"][name] == file for name in held)
        assert sum(tensor.nbytes for tensor in held.values()) <= 20_000
        again |= held
    assert len(set(index["weight_map"].values())) >= 3
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert again.keys() == tensors.keys()
    assert all(again[name].dtype == t.dtype and torch.equal(again[name], t) for name, t in tensors.items())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": True},
        {"moe": None},
        {"attention": ("kda",) * 6, "mla": None},
        {"attention": ("mla",) * 6, "kda": None},
        {"kda": {"heads": 3, "head_dim": 8, "conv": 2}},
    ],
)
def test_a_residual_decoder_goes_there_and_back_exactly(changes: dict[str, Any], tmp_path: Path) -> None:
    model = small(**changes)
    dm.save_model(model, tmp_path / "ours")
    write_checkpoint(model, tmp_path / "public", NAME, shard_size="60KB")
    convert_checkpoint(tmp_path / "public", tmp_path / "back", NAME)
    back = dm.load_model(tmp_path / "back")
    assert back.config.canonical() == model.config.canonical()
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "ours" / file).read_bytes()
    assert torch.equal(back(some_tokens()), model(some_tokens()))


def test_a_conversion_in_parts_writes_the_bytes_of_one_in_memory(tmp_path: Path) -> None:
    place(tmp_path / "public", public_tensors(torch.bfloat16))
    converted = convert_checkpoint(tmp_path / "public", tmp_path / "parts", NAME)
    save_converted(read_checkpoint(tmp_path / "public", NAME), tmp_path / "whole")
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    assert all(parameter.is_meta for parameter in converted.module.parameters())


def test_experts_that_are_balanced_by_a_loss_are_written_with_a_bias_of_zero(tmp_path: Path) -> None:
    model = small()
    moe = dataclasses.replace(model.config.moe, balance="loss")  # type: ignore[type-var]
    config = dataclasses.replace(model.config, moe=moe)
    other = dm.Decoder(config).eval()
    other.load_state_dict({k: v for k, v in model.state_dict().items() if not k.endswith("balance_bias")})
    notes = write_checkpoint(other, tmp_path, NAME).notes
    assert any("zeros were written" in note for note in notes)
    assert torch.equal(read_checkpoint(tmp_path, NAME).module(some_tokens()), other(some_tokens()))


def test_narrow_tensors_that_the_decoder_keeps_wide_are_widened(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in public_tensors().items()}
    own = read_checkpoint(place(tmp_path, tensors), NAME).module.state_dict()
    wide = {name for name, tensor in own.items() if tensor.dtype == torch.float32}
    assert {name.rpartition(".")[2] for name in wide} == {"A_log", "dt_bias", "balance_bias"}
    assert torch.equal(own["sublayers.2.dt_bias"].bfloat16(), tensors["model.layers.1.self_attn.dt_bias"])


# Memory


def test_few_tensors_are_in_memory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(place(tmp_path / "public"))
    inner, alive, most, opened = checkpoint.open_file, [], [0], [0, 0]

    class Watched:
        def __init__(self, content: Any) -> None:
            self.content = content

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self.content, attribute)

        def get_tensor(self, name: str) -> Tensor:
            tensor = self.content.get_tensor(name)
            alive.append(weakref.ref(tensor.untyped_storage()))
            alive[:] = [ref for ref in alive if ref() is not None]
            most[0] = max(most[0], len(alive))
            return tensor

    @checkpoint.contextlib.contextmanager
    def counted(path: Path) -> Any:
        opened[0] += 1
        opened[1] = max(opened)
        with inner(path) as content:
            yield Watched(content)
        opened[0] -= 1

    monkeypatch.setattr(checkpoint, "open_file", counted)
    convert_checkpoint(tmp_path / "public", tmp_path / "ours", NAME)
    assert opened[1] == 1
    assert 1 <= most[0] <= 3


MEASURED = """
from depthmix.models.io import map_model
from depthmix.models.names import convert_checkpoint, write_checkpoint
from depthmix.models.names.tensor_file import TensorFile

def memory():  # what is not backed by a file
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

peak, inner = [0.0], TensorFile.put

def put(*args):
    inner(*args)
    peak[0] = max(peak[0], memory())

convert_checkpoint("tiny", "warm", "kimi_linear")  # what is imported on the way
TensorFile.put = put
before = memory()
convert_checkpoint("public", "ours", "kimi_linear")
write_checkpoint(map_model("ours"), "again", "kimi_linear", shard_size="40MB")
print(peak[0] - before)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_conversion_does_not_grow_with_the_model(tmp_path: Path) -> None:
    model = small(dim=512, hidden=2048, vocab_size=256)
    megabytes = sum(tensor.nbytes for tensor in model.state_dict().values()) / 2**20
    write_checkpoint(model, tmp_path / "public", NAME, shard_size="40MB")
    place(tmp_path / "tiny")
    command = [sys.executable, "-c", MEASURED]
    done = subprocess.run(command, cwd=tmp_path, env=CHILD, check=True, capture_output=True, text=True)
    assert megabytes > 150
    assert float(done.stdout) < 20
    for path in (tmp_path / "public").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_a_file_in_parts_has_the_bytes_that_safetensors_writes(tmp_path: Path) -> None:
    dtypes = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    tensors = {f"{i}.ü": torch.arange(6).reshape(3, 2).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    with TensorFile(tmp_path / "ours", {name: Entry(t.dtype, tuple(t.shape)) for name, t in tensors.items()}) as file:
        for name in reversed(tensors):
            rows = len(tensors[name]) if tensors[name].dim() else 0
            for part in reversed(range(rows)):
                file.put(name, tensors[name][part], part)
            if not rows:
                file.put(name, tensors[name])
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("2GiB", 2**31), ("1.5KB", 1500), ("7", 7), ("7B", 7)]
)
def test_sizes_of_shards_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0GB", "-1GB", "5 parsecs", "1e9", "0.1B", "9" * 40 + "GB"])
def test_a_size_that_cannot_be_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"shard size .* expected a number of bytes above 0 with a unit, such as 5GB"):
        write_checkpoint(small(), tmp_path / "new", NAME, shard_size=text)
    assert not (tmp_path / "new").exists()


# Refused on reading: the error says what, and nothing is written


def refused(folder: Path, words: str, kind: type[Exception] = ValueError) -> None:
    new = folder.parent / "new"
    with pytest.raises(kind, match=words):
        convert_checkpoint(folder, new, NAME)
    with pytest.raises(kind, match=words):
        read_checkpoint(folder, NAME)
    assert not new.exists()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("q_lora_rank", 8, "q_lora_rank=8, which cannot be read: the decoder has no q_lora_rank"),
        ("num_expert_group", 4, "num_expert_group=4, .* the decoder has num_expert_group=1 only"),
        ("n_group", 4, "two values of num_expert_group, 1 and 4"),
        ("topk_group", 2, "topk_group=2, "),
        ("moe_renormalize", False, "moe_renormalize=False, "),
        ("moe_router_activation_func", "softmax", "moe_router_activation_func='softmax', .*='sigmoid' only"),
        ("moe_layer_freq", 2, "moe_layer_freq=2, "),
        ("mla_use_nope", False, "mla_use_nope=False, which cannot be read: the decoder has mla_use_nope=True only"),
        ("rope_scaling", {"type": "yarn"}, "rope_scaling={'type': 'yarn'}"),
        ("num_nextn_predict_layers", 1, "num_nextn_predict_layers=1"),
        ("num_key_value_heads", 1, "num_key_value_heads=1, .* expected num_attention_heads=3, not 1"),
        ("attention_bias", True, "attention_bias=True"),
        ("hidden_act", "gelu", "hidden_act='gelu', .*'silu' only"),
        ("quantization_config", {"bits": 4}, "quantization_config="),
        ("hidden_act", "situ", "hidden_act='situ'"),
        ("gate_lower_bound", -5.0, "gate_lower_bound=-5.0, .* which Kimi K3 added to Kimi Linear"),
        ("use_full_rank_gate", True, "use_full_rank_gate=True, .* which Kimi K3 added"),
        ("mla_use_output_gate", True, "mla_use_output_gate=True, .* which Kimi K3 added"),
        ("routed_expert_hidden_size", 9, "routed_expert_hidden_size=9, .* which Kimi K3 added"),
        ("attn_res_block_size", 3, "attn_res_block_size=3, .* depth mixing of Kimi K3 is read by --from kimi_k3"),
        ("model_type", "kimi_k3", "model_type='kimi_k3'; .*expected kimi_linear with --from kimi_linear"),
        ("vocab_size", 0, "vocab_size=0; expected a whole number above 0"),
        ("hidden_size", 2.5, "hidden_size=2.5; expected a whole number"),
        ("num_hidden_layers", 10**9, "num_hidden_layers=1000000000"),
        ("num_experts", 10**5, "describes a model that the decoder cannot be: moe.experts=100000"),
        ("num_experts", 60_000, "does not match its config.json, by which it has model.layers.2.block_sparse_moe.exp"),
        ("num_experts_per_token", 6, "describes a model that the decoder cannot be: moe.active=6"),
        ("routed_scaling_factor", None, "routed_scaling_factor=None; expected a number above 0"),
        ("kv_lora_rank", None, "kv_lora_rank=None"),
        ("linear_attn_config", None, "does not say which layers have which attention; expected linear_attn_config"),
        ("linear_attn_config", 3, "linear_attn_config=3; expected an object"),
        ("layer_types", ["full_attention"] * 6, "linear_attn_config and layer_types that contradict each other"),
        ("layer_types", ["full_attention"] * 5, "layer_types=.* expected a list of 6"),
        ("mlp_layer_types", ["sparse"] * 5 + ["dense"], "expected 6 names, 'dense' for the first layers"),
        ("linear_head_dim", 7, "two values of head_dim, 6 and 7"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name_and_value(
    field: str, value: Any, words: str, tmp_path: Path
) -> None:
    refused(place(tmp_path / "public", **{field: value}), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kda_layers": [2, 3]}, "layer 5 in neither kda_layers nor full_attn_layers"),
        ({"kda_layers": [2, 3, 4, 5]}, "layer 4 in both kda_layers and full_attn_layers"),
        ({"kda_layers": [1, 2, 4], "full_attn_layers": [0, 3, 5]}, "full_attn_layers=.*expected a list of layers from"),
        ({"kda_layers": None}, "kda_layers=None; expected a list of layers from 1 to 6"),
        ({"gate_lower_bound": -5}, "gate_lower_bound=-5, .* which Kimi K3 added"),
        ({"num_heads": None}, "num_heads=None; expected a whole number above 0. It is one of linear_attn_config"),
    ],
)
def test_lists_of_layers_and_sizes_of_kda_are_checked(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    refused(place(tmp_path / "public", linear_attn_config={**CONFIG["linear_attn_config"], **changes}), words)


def test_layers_count_from_1_so_that_other_lists_need_other_tensors(tmp_path: Path) -> None:
    shifted = {"kda_layers": [1, 2, 4], "full_attn_layers": [3, 5, 6]}  # as if they counted from 0
    folder = place(tmp_path / "public", linear_attn_config={**CONFIG["linear_attn_config"], **shifted})
    refused(folder, r"does not match its config.json, by which it has model.layers.0.self_attn.k_proj.weight, ")


def test_fields_that_are_not_known_are_named_and_others_are_not(tmp_path: Path) -> None:
    folder = place(tmp_path, my_new_field=3, eos_token_id=5, use_cache=True, gate_lower_bound=None)
    (note,) = read_checkpoint(folder, NAME).notes
    assert note == "fields of config.json that depthmix does not know and did not use: my_new_field"


def test_two_spellings_at_once_are_refused(tmp_path: Path) -> None:
    tensors = public_tensors()
    one = "model.layers.1.mlp.up_proj.weight"
    tensors[one.replace(".mlp.", ".block_sparse_moe.")] = tensors.pop(one)
    words = r"mixes two spellings: it has model.layers.\d.mlp.\S+ and model.layers.1.block_sparse_moe.up_proj|"
    words += r"mixes two spellings: it has model.layers.1.block_sparse_moe.up_proj.weight and model.layers.\d.mlp"
    refused(place(tmp_path / "public", tensors), words)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.self_attn.A_log",
        "model.layers.3.self_attn.kv_a_layernorm.weight",
        "model.layers.4.block_sparse_moe.experts.3.w2.weight",
        "model.layers.5.block_sparse_moe.gate.e_score_correction_bias",
        "lm_head.weight",
    ],
)
def test_a_missing_tensor_and_a_wrong_shape_are_named(name: str, tmp_path: Path) -> None:
    tensors = public_tensors()
    want = str(list(tensors[name].shape)).replace("[", r"\[")
    wrong = {**tensors, name: tensors[name].reshape(-1, 1)}
    refused(place(tmp_path / "shape", wrong), rf"{name} has shape \[\d+, 1\], expected {want} \(model.safetensors\)")
    del tensors[name]
    refused(place(tmp_path / "missing", tensors), rf"does not match its config.json, by which it has {name} too")


def test_a_tensor_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    for i, (name, hint) in enumerate(
        {
            "model.layers.1.self_attn.g_b_proj.bias": "Check its sizes and its lists of layers",
            "model.layers.6.input_layernorm.weight": "Check its sizes",
            "model.layers.2.block_sparse_moe.experts.5.w1.weight": "Check its sizes",
            "model.layers.0.self_attention_res_proj.weight": "Depth mixing of Kimi K3 is read by --from kimi_k3",
        }.items()
    ):
        folder = place(tmp_path / str(i), {**public_tensors(), name: torch.zeros(1, D)})
        refused(folder, rf"has {name}, which a Kimi Linear model with this config.json does not have. {hint}")
    constant = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    assert read_checkpoint(place(tmp_path / "old", {**public_tensors(), **constant}), NAME).notes == ()


def test_experts_of_different_dtypes_are_refused(tmp_path: Path) -> None:
    tensors = public_tensors()
    name = "model.layers.4.block_sparse_moe.experts.3.w2.weight"
    folder = place(tmp_path / "public", {**tensors, name: tensors[name].float()})
    refused(folder, rf"has {name} in torch.float32 and other experts of its layer in torch.float64; expected one dtype")
    refused(place(tmp_path / "whole", {**tensors, name: tensors[name].to(torch.int8)}), rf"{name} has dtype I8")


def test_a_truncated_shard_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    folder = place(tmp_path / "public")
    for file in sorted(set(shard(folder).values())):
        data = (folder / file).read_bytes()
        for size in (len(data) - 4, 20, 0):
            (folder / file).write_bytes(data[:size])
            refused(folder, rf"{file} is truncated, damaged or not a safetensors file")
        (folder / file).write_bytes(data)


def test_an_index_that_names_a_missing_shard_is_an_error_about_the_shard(tmp_path: Path) -> None:
    folder = place(tmp_path / "public")
    held = shard(folder)
    (folder / held["model.norm.weight"]).unlink()
    refused(folder, rf"{held['model.norm.weight']} is missing; it holds ", FileNotFoundError)


# Refused on writing


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mixer": "block_attnres"}, "mixer='block_attnres' cannot be written .* expected mixer='residual', since"),
        ({"attention": ("kda", "mla", "gqa")}, r"attention=\('kda', 'mla', 'gqa'\) cannot .* 'kda' and 'mla' only"),
        ({"loop": {"first": 0, "last": 2, "repeats": 2}}, r"loop=LoopConfig\(first=0.* expected loop=None"),
        ({"kda": {"heads": 2, "head_dim": 8, "bound": -5.0}}, r"kda.bound=-5.0 cannot .* expected kda.bound=None"),
        (
            {"mla": {"rank": 8, "nope": 8, "shared": 4, "value": 8, "norm_eps": 1e-5}},
            r"mla.norm_eps=1e-05 cannot be written as kimi_linear; expected mla.norm_eps=1e-06, which is a constant",
        ),
        ({"moe": {"hidden": 8, "scoring": "softmax"}}, "moe.scoring='softmax' cannot .* moe.scoring='sigmoid'"),
    ],
)
def test_a_decoder_that_the_names_cannot_express_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"a decoder with {words}"):
        write_checkpoint(small(**changes), tmp_path / "new", NAME)
    assert not (tmp_path / "new").exists()


def test_a_stack_has_nothing_of_it(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="got a DepthStack, of which kimi_linear has nothing; expected a Decoder"):
        write_checkpoint(dm.DepthStack("residual", dim=8, depth=4), tmp_path / "new", NAME)


# What is on disk when it is interrupted


@pytest.mark.parametrize("tensors", [0, 1, 40])
def test_an_interrupted_conversion_leaves_what_was_there(
    tensors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(tmp_path / "public")
    dm.save_model(small(), tmp_path / "ours")
    before, inner, done = files(tmp_path / "ours"), TensorFile.put, []

    def until_the_power_fails(*args: Any) -> None:
        if len(done) == tensors:
            raise KeyboardInterrupt
        done.append(1)
        inner(*args)

    with monkeypatch.context() as patch:
        patch.setattr(TensorFile, "put", until_the_power_fails)
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(tmp_path / "public", tmp_path / "ours", NAME)
        done.clear()
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(small(), tmp_path / "new", NAME, shard_size="10KB")
    assert files(tmp_path / "ours") == before
    assert {path.name for path in tmp_path.iterdir()} == {"public", "ours"}
    convert_checkpoint(tmp_path / "public", tmp_path / "ours", NAME)
    assert dm.load_model(tmp_path / "ours").config.dim == D


def test_shards_are_written_to_a_new_or_empty_folder_only(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_checkpoint(small(), tmp_path / "empty", NAME, shard_size="60KB")
    dm.save_model(small(), tmp_path / "model")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "notes.txt").write_text("mine")
    for folder, words in (("empty", "it holds kimi_linear"), ("model", "it holds model"), ("text", "it has notes.txt")):
        before = files(tmp_path / folder)
        with pytest.raises(ValueError, match=rf"{folder} is not empty: {words}. .* nothing was written"):
            write_checkpoint(small(), tmp_path / folder, NAME)
        assert files(tmp_path / folder) == before


def test_load_model_refuses_a_public_checkpoint_and_names_the_command(tmp_path: Path) -> None:
    shard(place(tmp_path))
    with pytest.raises(ValueError, match=r"Kimi Linear as a whole .* depthmix convert SOURCE TARGET --from NAME"):
        dm.load_model(tmp_path)


def test_the_configuration_of_a_checkpoint_is_not_changed_by_reading(tmp_path: Path) -> None:
    found = checkpoint.Checkpoint.open(place(tmp_path))
    before = copy.deepcopy(found.config)
    read_checkpoint(tmp_path, NAME)
    assert found.config == before == json.loads((tmp_path / "config.json").read_text())
