"""Checkpoints of other projects: names, shapes and units are theirs, and what is read computes what theirs does.

Axes: ... any leading shape, D channel, m stream, S source.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import depthmix as dm
from depthmix.models.names import checkpoint, find_format, read_checkpoint, save_converted, write_checkpoint
from tests.models.test_stack_files import assert_same, random_stack
from tests.runs import CHILD

D = 8
STACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_k3": ("block_attnres", {"block_sublayers": 4, "eps": 1e-5}),
    "fla": ("attnres", {"eps": 1e-5}),
    "deepseek_v4": ("mhc", {"readout": "learned", "eps": 1e-6, "norm_eps": 1e-5, "iterations": 3, "streams": 3}),
}
EVERY_FORMAT = pytest.mark.parametrize("name", STACKS)


def stack_for(name: str, **changes: Any) -> Any:
    mechanism, options = STACKS[name]
    return random_stack(mechanism, dim=D, **{**options, **changes})


def written(name: str, folder: Path, **changes: Any) -> Any:
    stack = stack_for(name, **changes)
    write_checkpoint(stack, folder, name)
    return stack


def rewrite(folder: Path, tensors: dict[str, Tensor], **fields: Any) -> None:
    """As somebody else would have written it: without depthmix's fields."""
    about = json.loads((folder / "config.json").read_text())
    about = {key: value for key, value in about.items() if not key.startswith("depthmix") and key != "weights"}
    (folder / "config.json").write_text(json.dumps({**about, **fields}))
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path, count: int = 3, **other: Tensor) -> dict[str, str]:
    """Divide the weights of a checkpoint among `count` shards, in turn."""
    tensors = {**load_file(folder / "model.safetensors"), **other}
    rewrite(folder, tensors)
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    files = {name: names[i % count] for i, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


def shapes(folder: Path) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}


# Names, shapes, units


def test_the_names_and_shapes_of_kimi_k3(tmp_path: Path) -> None:
    written("kimi_k3", tmp_path, depth=4)
    assert shapes(tmp_path) == {
        "language_model.model.layers.0.self_attention_res_proj.weight": [1, D],
        "language_model.model.layers.0.self_attention_res_norm.weight": [D],
        "language_model.model.layers.0.mlp_res_proj.weight": [1, D],
        "language_model.model.layers.0.mlp_res_norm.weight": [D],
        "language_model.model.layers.1.self_attention_res_proj.weight": [1, D],
        "language_model.model.layers.1.self_attention_res_norm.weight": [D],
        "language_model.model.layers.1.mlp_res_proj.weight": [1, D],
        "language_model.model.layers.1.mlp_res_norm.weight": [D],
        "language_model.model.output_attn_res_proj.weight": [1, D],
        "language_model.model.output_attn_res_norm.weight": [D],
    }
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["model_type"] == "kimi_k3"
    assert about["text_config"]["attn_res_block_size"] == 2
    assert about["text_config"]["rms_norm_eps"] == 1e-5
    assert (about["text_config"]["hidden_size"], about["text_config"]["num_hidden_layers"]) == (D, 2)


def test_the_names_and_shapes_of_flash_linear_attention(tmp_path: Path) -> None:
    written("fla", tmp_path, depth=4)
    assert shapes(tmp_path) == {
        "model.layers.0.attn_res_proj.weight": [1, D],
        "model.layers.0.attn_res_norm.weight": [D],
        "model.layers.0.mlp_res_proj.weight": [1, D],
        "model.layers.0.mlp_res_norm.weight": [D],
        "model.layers.1.attn_res_proj.weight": [1, D],
        "model.layers.1.attn_res_norm.weight": [D],
        "model.layers.1.mlp_res_proj.weight": [1, D],
        "model.layers.1.mlp_res_norm.weight": [D],
        "model.res_proj.weight": [1, D],
        "model.res_norm.weight": [D],
    }
    about = json.loads((tmp_path / "config.json").read_text())
    assert (about["attnres_block_size"], about["norm_eps"], about["num_hidden_layers"]) == (1, 1e-5, 2)


def test_the_names_and_shapes_of_deepseek_v4(tmp_path: Path) -> None:
    written("deepseek_v4", tmp_path, depth=2)
    assert shapes(tmp_path) == {
        "layers.0.hc_attn_fn": [15, 3 * D],
        "layers.0.hc_attn_base": [15],
        "layers.0.hc_attn_scale": [3],
        "layers.0.hc_ffn_fn": [15, 3 * D],
        "layers.0.hc_ffn_base": [15],
        "layers.0.hc_ffn_scale": [3],
        "hc_head_fn": [3, 3 * D],
        "hc_head_base": [3],
        "hc_head_scale": [1],
    }
    about = json.loads((tmp_path / "config.json").read_text())
    fields = ("hc_mult", "hc_sinkhorn_iters", "hc_eps", "rms_norm_eps", "num_hidden_layers", "hidden_size")
    assert [about[field] for field in fields] == [3, 3, 1e-6, 1e-5, 1, D]


@pytest.mark.parametrize("name", ["kimi_k3", "fla"])
def test_what_site_0_never_uses_is_written_as_zeros_and_ones(name: str, tmp_path: Path) -> None:
    stack = written(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (query, key_weight, second, *_) = find_format(name).table(  # type: ignore[attr-defined]
        find_format(name).mixing_of(stack),  # type: ignore[attr-defined]
        find_format(name).spellings[0],  # type: ignore[attr-defined]
    )
    assert (query.ours, key_weight.ours, second.ours) == (None, None, "mixers.1.query")
    assert not tensors[query.theirs].any()
    assert tensors[key_weight.theirs].eq(1).all()


def test_the_unread_gates_of_deepseek_v4_are_written_such_that_they_sum_to_one(tmp_path: Path) -> None:
    written("deepseek_v4", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert not tensors["layers.0.hc_attn_fn"][:3].any()
    assert (tensors["layers.0.hc_attn_base"][:3].sigmoid() + 1e-6).sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("size", "mechanism", "sublayers"), [(1, "attnres", 1), (2, "block_attnres", 2), (6, "block_attnres", 6)]
)
def test_blocks_of_flash_linear_attention_count_sublayers(
    size: int, mechanism: str, sublayers: int, tmp_path: Path
) -> None:
    written("fla", tmp_path, depth=12)
    rewrite(tmp_path, load_file(tmp_path / "model.safetensors"), attnres_block_size=size)
    found = read_checkpoint(tmp_path, "fla")
    assert found.module.registered == mechanism
    assert found.units == {"attnres_block_size (sublayers)": size, "block_sublayers": sublayers}


@pytest.mark.parametrize(("size", "sublayers"), [(1, 2), (3, 6), (6, 12), (40, 12)])
def test_blocks_of_kimi_k3_count_layers(size: int, sublayers: int, tmp_path: Path) -> None:
    written("kimi_k3", tmp_path, depth=12)
    text = {"hidden_size": D, "num_hidden_layers": 6, "attn_res_block_size": size, "rms_norm_eps": 1e-5}
    rewrite(tmp_path, load_file(tmp_path / "model.safetensors"), text_config=text)
    stack = read_checkpoint(tmp_path, "kimi_k3").module
    assert stack.config.block_sublayers == sublayers


def test_a_single_block_is_read_whatever_lies_beyond_the_last_layer(tmp_path: Path) -> None:
    """A block larger than the network is one block of the whole network, which is the same function."""
    written("fla", tmp_path, depth=6)
    rewrite(tmp_path, load_file(tmp_path / "model.safetensors"), attnres_block_size=64)
    assert read_checkpoint(tmp_path, "fla").module.config.block_sublayers == 6


# There and back


def test_every_format_comes_back_bit_for_bit_in_a_new_process(tmp_path: Path) -> None:
    stacks = {name: written(name, tmp_path / name, dtype=torch.bfloat16) for name in STACKS}
    code = (
        "import depthmix as dm\n"
        "from depthmix.models.names import read_checkpoint, save_converted, write_checkpoint\n"
        f"for name in {list(STACKS)}:\n"
        "    save_converted(read_checkpoint(name, name), f'{name}-read')\n"
        "    write_checkpoint(dm.load_stack(f'{name}-read'), f'{name}-again', name)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=CHILD, check=True)
    for name, stack in stacks.items():
        assert_same(dm.load_stack(tmp_path / f"{name}-read"), stack)
        for file in ("model.safetensors", "config.json"):
            assert (tmp_path / f"{name}-again" / file).read_bytes() == (tmp_path / name / file).read_bytes()


@EVERY_FORMAT
def test_three_shards_give_what_one_file_does(name: str, tmp_path: Path) -> None:
    stack = written(name, tmp_path)
    files = shard(tmp_path)
    assert len(set(files.values())) == 3
    assert_same(read_checkpoint(tmp_path, name).module, stack)


@EVERY_FORMAT
def test_only_the_mixers_are_read_and_only_one_shard_is_open_at_a_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards that hold none of the mixers need not be there."""
    stack = written(name, tmp_path)
    mixers = set(load_file(tmp_path / "model.safetensors"))
    files = shard(tmp_path, 3, **{f"model.layers.{i}.mlp.weight": torch.zeros(4) for i in range(3)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**files, "model.embed.weight": "model-absent.safetensors"}}))
    inner, open_now, most, read = checkpoint.open_file, [0], [0], []

    class Watched:
        def __init__(self, content: Any) -> None:
            self.content = content

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self.content, attribute)

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            return self.content.get_tensor(name)

    @checkpoint.contextlib.contextmanager
    def counted(path: Path) -> Any:
        open_now[0] += 1
        most[0] = max(most[0], open_now[0])
        with inner(path) as content:
            yield Watched(content)
        open_now[0] -= 1

    monkeypatch.setattr(checkpoint, "open_file", counted)
    assert_same(read_checkpoint(tmp_path, name).module, stack)
    assert most == [1]
    assert sorted(read) == sorted(mixers)


@settings(max_examples=25, deadline=None)
@given(layers=st.integers(1, 7), size=st.integers(1, 14), name=st.sampled_from(["kimi_k3", "fla"]))
def test_any_block_comes_back_or_is_refused_by_its_value(
    layers: int, size: int, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    size = min(size, 2 * layers)
    stack = random_stack("block_attnres", dim=4, depth=2 * layers, block_sublayers=size)
    if size % 2 and not (name == "fla" and size == 1):
        with pytest.raises(ValueError, match=rf"block_sublayers={size} cannot be written as {name}: expected"):
            write_checkpoint(stack, folder, name)
        assert list(folder.iterdir()) == []
        return
    write_checkpoint(stack, folder, name)
    found = read_checkpoint(folder, name).module
    if size == 1:
        assert found.registered == "attnres"
        found = dm.DepthStack("block_attnres", dim=4, depth=2 * layers, block_sublayers=1).double()
        found.load_converted(read_checkpoint(folder, name).module.state_dict())
    assert_same(found, stack)


# What the names mean, by plain loops over tensors with these names


def rms(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def read_over_depth(tensors: dict[str, Tensor], name: str, sources: list[Tensor], eps: float) -> Tensor:
    """Σ softmax_s(proj · (norm ⊙ rms(source_s))) source_s."""
    query, gamma = tensors[name.replace("?", "proj")][0], tensors[name.replace("?", "norm")]
    logits = torch.stack([(query * gamma * rms(source, eps)).sum(-1) for source in sources])
    return (logits.softmax(0).unsqueeze(-1) * torch.stack(sources)).sum(0)


def run_attnres(
    x: Tensor,
    sublayers: list[Callable[[Tensor], Tensor]],
    tensors: dict[str, Tensor],
    names: tuple[str, str, str],
    opens_block: Callable[[int], bool],
    eps: float,
) -> Tensor:
    """`names` are those of attention, MLP and the output; `opens_block` takes the number of a sublayer."""
    bank: list[Tensor] = []
    partial = x
    for g, f in enumerate(sublayers):
        name = names[g % 2].replace("#", str(g // 2))
        sources = [*bank, partial]
        h = x if g == 0 else read_over_depth(tensors, name, sources, eps)
        if opens_block(g):
            bank, partial = sources, f(h)
        else:
            partial = partial + f(h)
    return read_over_depth(tensors, names[2], [*bank, partial], eps)


FLA = ("model.layers.#.attn_res_?.weight", "model.layers.#.mlp_res_?.weight", "model.res_?.weight")
K3 = (
    "language_model.model.layers.#.self_attention_res_?.weight",
    "language_model.model.layers.#.mlp_res_?.weight",
    "language_model.model.output_attn_res_?.weight",
)


def random_checkpoint(names: tuple[str, str, str], layers: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sites = [name.replace("#", str(i)) for i in range(layers) for name in names[:2]] + [names[2]]
    draw = {"proj": (1, D), "norm": (D,)}
    return {
        site.replace("?", part): torch.randn(shape, generator=generator, dtype=torch.float64)
        for site in sites
        for part, shape in draw.items()
    }


def sublayers(count: int) -> list[Callable[[Tensor], Tensor]]:
    generator = torch.Generator().manual_seed(4)
    matrices = [torch.randn(D, D, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [lambda h, W=W: torch.tanh(h @ W) for W in matrices]  # type: ignore[misc]


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("prefix", ["model.", "backbone."])
def test_what_is_read_of_flash_linear_attention_computes_what_its_tensors_mean(
    size: int, prefix: str, tmp_path: Path
) -> None:
    tensors, layers = random_checkpoint(FLA, 5), 5
    x, fs = torch.randn(3, D, dtype=torch.float64), sublayers(2 * layers)
    expected = run_attnres(x, fs, tensors, FLA, lambda g: g % size == 0, 1e-2)
    save_file({name.replace("model.", prefix, 1): t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    sizes = {"hidden_size": D, "num_hidden_layers": layers, "norm_eps": 1e-2, "attnres_block_size": size}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gla" if "m" in prefix else "samba", **sizes}))
    stack = read_checkpoint(tmp_path, "fla").module
    assert torch.allclose(stack(x, fs), expected, rtol=0, atol=1e-13)


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("nested", [True, False])
def test_what_is_read_of_kimi_k3_computes_what_its_tensors_mean(size: int, nested: bool, tmp_path: Path) -> None:
    tensors, layers = random_checkpoint(K3, 5), 5
    x, fs = torch.randn(3, D, dtype=torch.float64), sublayers(2 * layers)
    expected = run_attnres(x, fs, tensors, K3, lambda g: g % 2 == 0 and (g // 2) % size == 0, 1e-2)
    start = 0 if nested else len("language_model.")
    save_file({name[start:]: tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    sizes = {"hidden_size": D, "num_hidden_layers": layers, "rms_norm_eps": 1e-2, "attn_res_block_size": size}
    about = {"model_type": "kimi_k3", "text_config": sizes} if nested else {"model_type": "kimi_linear", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(about))
    stack = read_checkpoint(tmp_path, "kimi_k3").module
    assert torch.allclose(stack(x, fs), expected, rtol=0, atol=1e-13)


# DeepSeek-V4 against transformers


@pytest.fixture(scope="module")
def deepseek() -> Any:
    """A tiny model of theirs, with hyper-connections that no start has."""
    pytest.importorskip("transformers", reason="pip install 'depthmix[hf]'")
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "head_dim": 8, "num_attention_heads": 2}
    small = {"q_lora_rank": 8, "o_lora_rank": 8, "o_groups": 1, "index_n_heads": 1, "index_head_dim": 8}
    experts = {"moe_intermediate_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1}
    config = DeepseekV4Config(**sizes, **small, **experts, partial_rotary_factor=0.5, hc_mult=3, hc_sinkhorn_iters=4)
    model = DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_hc" in name or "hc_head" in name:
                parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.dim() == 1 else 0.1))
    return model


class Branch(torch.nn.Module):
    """Takes the place of attention, which returns a pair, or of the experts."""

    def __init__(self, *, pair: bool) -> None:
        super().__init__()
        self.map, self.pair = torch.nn.Linear(16, 16, bias=False), pair

    def forward(self, h: Tensor, **kwargs: Any) -> Any:
        y = torch.tanh(self.map(h))
        return (y, None) if self.pair else y


@torch.no_grad()
def theirs_and_sublayers(model: Any, x: Tensor) -> tuple[Tensor, list[Callable[[Tensor], Tensor]]]:
    """What the head of their model reads, computed by its own layers, and their sublayers with their norms."""
    import copy

    torch.manual_seed(1)
    layers, found = copy.deepcopy(model.model.layers), []
    streams = x.unsqueeze(2).expand(-1, -1, model.config.hc_mult, -1).contiguous()
    for layer in layers:
        layer.self_attn, layer.mlp = Branch(pair=True), Branch(pair=False)
        found += [
            lambda h, layer=layer: layer.self_attn(layer.input_layernorm(h))[0],
            lambda h, layer=layer: layer.mlp(layer.post_attention_layernorm(h)),
        ]
        streams = layer(streams)
    return model.model.hc_head(streams), found


@torch.no_grad()
@pytest.mark.parametrize("spelling", ["modules", "save_pretrained", "files"])
def test_what_is_read_of_deepseek_v4_computes_what_transformers_does(
    spelling: str, deepseek: Any, tmp_path: Path
) -> None:
    deepseek.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    if spelling == "modules":
        saved = {name: tensor.contiguous() for name, tensor in deepseek.state_dict().items() if "hc" in name}
    elif spelling == "files":
        renamed = {name: name.removeprefix("model.").replace("hc_head.hc_", "hc_head_") for name in saved}
        saved = {renamed[name]: tensor for name, tensor in saved.items() if "hc_" in name}
    save_file(saved, tmp_path / "model.safetensors")
    stack = read_checkpoint(tmp_path, "deepseek_v4").module
    x = torch.randn(2, 3, 16)
    expected, fs = theirs_and_sublayers(deepseek, x)
    assert torch.allclose(stack(x, fs), expected, rtol=0, atol=2e-5)
    other = random_stack("mhc", dim=16, depth=4, streams=3, readout="learned", dtype=torch.float32)
    assert not torch.allclose(other(x, fs), expected, rtol=0, atol=1e-2)


@torch.no_grad()
def test_what_is_written_loads_into_deepseek_v4_of_transformers(deepseek: Any, tmp_path: Path) -> None:
    config = deepseek.config
    options = {"streams": config.hc_mult, "iterations": config.hc_sinkhorn_iters, "eps": config.hc_eps}
    stack = random_stack("mhc", dim=16, depth=4, readout="learned", dtype=torch.float32, **options)
    write_checkpoint(stack, tmp_path / "mixers", "deepseek_v4")
    deepseek.save_pretrained(tmp_path / "model")
    rest = {k: v for k, v in load_file(tmp_path / "model" / "model.safetensors").items() if "hc_" not in k}
    bare = {name.removeprefix("model."): tensor for name, tensor in rest.items()}  # as in the published files
    mixers = load_file(tmp_path / "mixers" / "model.safetensors")
    save_file({**bare, **mixers}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    model, notes = type(deepseek).from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not [name for name in (*notes["missing_keys"], *notes["unexpected_keys"]) if "hc" in name]
    x = torch.randn(2, 3, 16)
    expected, fs = theirs_and_sublayers(model, x)
    assert torch.allclose(stack(x, fs), expected, rtol=0, atol=2e-5)


# Refused


def test_mechanisms_and_options_that_a_format_cannot_express_are_refused(tmp_path: Path) -> None:
    plain = {"dim": D, "depth": 4}
    block = {**plain, "block_sublayers": 2}
    for name, stack, words in (
        ("fla", dm.DepthStack("mhc", **plain), "a stack of mhc cannot be written as fla: flash-linear-attention has"),
        ("kimi_k3", dm.DepthStack("attnres", **plain), "a stack of attnres cannot be written as kimi_k3: Kimi K3 has"),
        ("deepseek_v4", dm.DepthStack("residual", **plain), "a stack of residual cannot be written as deepseek_v4"),
        ("fla", dm.DepthStack("attnres", window=2, **plain), "attnres with window=2 cannot .* has window=None only"),
        ("kimi_k3", dm.DepthStack("block_attnres", heads=2, **block), "block_attnres with heads=2 cannot be written"),
        ("fla", dm.DepthStack("block_attnres", scale_by_count=True, **block), "with scale_by_count=True cannot"),
        ("fla", dm.DepthStack("block_attnres", query="input", **block), "with query='input' cannot"),
        ("deepseek_v4", dm.DepthStack("mhc", **plain), "mhc with readout='mean' cannot be written as deepseek_v4"),
        ("deepseek_v4", dm.DepthStack("mhc", readout="learned", eps=0.25, **plain), "eps=0.25 with streams=4 cannot"),
        ("fla", dm.DepthStack("attnres", dim=D, depth=3), "a stack of 3 sublayers .* two sublayers in each layer"),
        ("fla", dm.DepthStack("attnres", kinds=["attn"] * 4, **plain), r"4 sublayers \(attn, attn, attn, attn"),
        ("fla", dm.DepthStack("attnres", order=(0, 1, 0, 1), **plain), "executions share mixers"),
        ("fla", dm.DepthStack("attnres", **plain).slice(0, 2), "write_checkpoint got a slice, sublayers 0 to 1 of 4"),
    ):
        with pytest.raises(ValueError, match=words):
            write_checkpoint(stack, tmp_path / "new", name)
    with pytest.raises(TypeError, match=r"write_checkpoint got a Linear; expected a DepthStack, such as model.depth"):
        write_checkpoint(torch.nn.Linear(2, 2), tmp_path / "new", "fla")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown format of checkpoints 'flash'"):
        write_checkpoint(stack, tmp_path / "new", "flash")
    assert not (tmp_path / "new").exists()


@EVERY_FORMAT
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    written(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = list(tensors)[3]
    rewrite(tmp_path, {key: tensor for key, tensor in tensors.items() if key != gone})
    with pytest.raises(ValueError, match=rf"does not match its config.json, by which it has {gone} too"):
        read_checkpoint(tmp_path, name)


@EVERY_FORMAT
def test_a_wrong_shape_or_dtype_is_named(name: str, tmp_path: Path) -> None:
    written(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = list(tensors)[3]
    rewrite(tmp_path, {**tensors, key: torch.zeros(7, 7)})
    want = str(list(tensors[key].shape)).replace("[", r"\[")
    with pytest.raises(ValueError, match=rf"{key} has shape \[7, 7\], expected {want} \(model.safetensors\)"):
        read_checkpoint(tmp_path, name)
    rewrite(tmp_path, {**tensors, key: tensors[key].to(torch.int8)})
    with pytest.raises(ValueError, match=rf"{key} has dtype I8, expected one of float64, float32, bfloat16, float16"):
        read_checkpoint(tmp_path, name)


@EVERY_FORMAT
def test_layers_that_the_configuration_does_not_have_are_refused(name: str, tmp_path: Path) -> None:
    written(name, tmp_path, depth=6)
    about = json.loads((tmp_path / "config.json").read_text())
    short = {"num_hidden_layers": 2}
    nested = {"text_config": {**about["text_config"], **short}} if "text_config" in about else short
    rewrite(tmp_path, load_file(tmp_path / "model.safetensors"), **nested)
    words = r"has \S*layers.2.\S+, but config.json says num_hidden_layers=2; expected tensors of layers 0 to 1"
    with pytest.raises(ValueError, match=words):
        read_checkpoint(tmp_path, name)


def test_a_truncated_shard_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    written("fla", tmp_path)
    for file in sorted(set(shard(tmp_path).values())):
        data = (tmp_path / file).read_bytes()
        for size in (len(data) - 4, 20, 3, 0):
            (tmp_path / file).write_bytes(data[:size])
            with pytest.raises(ValueError, match=rf"{file} is truncated, damaged or not a safetensors file"):
                read_checkpoint(tmp_path, "fla")
        (tmp_path / file).write_bytes(data)


def test_an_index_that_names_a_missing_shard_is_an_error_about_the_shard(tmp_path: Path) -> None:
    written("fla", tmp_path)
    files = shard(tmp_path)
    name, file = next(iter(files.items()))
    (tmp_path / file).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{file} is missing; it holds {name}"):
        read_checkpoint(tmp_path, "fla")


def test_an_index_that_is_wrong_about_a_shard_is_an_error_about_the_tensor(tmp_path: Path) -> None:
    written("fla", tmp_path)
    files = shard(tmp_path)
    name, file = next(iter(files.items()))
    other = next(each for each in files.values() if each != file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**files, name: other}}))
    with pytest.raises(ValueError, match=rf"{name} is not in its file, though the index says so \({other}\)"):
        read_checkpoint(tmp_path, "fla")
    for content in ("{}", "[]", '{"weight_map": []}', '{"weight_map": {}}'):
        index.write_text(content)
        with pytest.raises(ValueError, match=r"index.json is damaged: it has no weight_map"):
            read_checkpoint(tmp_path, "fla")


@pytest.mark.parametrize("file", ["../other.safetensors", "/tmp/other.safetensors", "a\\b.safetensors", "a.bin", "", 3])
def test_an_index_cannot_name_files_outside_its_folder(file: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    written("fla", folder)
    files = shard(folder)
    save_file(load_file(folder / next(iter(files.values()))), tmp_path / "other.safetensors")
    index = {"weight_map": {**files, "model.embed.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"expected the name of a safetensors file in the same folder"):
        read_checkpoint(folder, "fla")


def test_two_spellings_at_once_are_refused(tmp_path: Path) -> None:
    written("fla", tmp_path / "fla")
    tensors = load_file(tmp_path / "fla" / "model.safetensors")
    rewrite(tmp_path / "fla", {**tensors, "backbone.res_norm.weight": torch.ones(D)})
    words = r"mixes two spellings: it has model.layers.0.attn_res_proj.weight and backbone.res_norm.weight"
    with pytest.raises(ValueError, match=words):
        read_checkpoint(tmp_path / "fla", "fla")
    written("deepseek_v4", tmp_path / "v4")
    tensors = load_file(tmp_path / "v4" / "model.safetensors")
    rewrite(tmp_path / "v4", {**tensors, "model.layers.0.attn_hc.fn": torch.ones(15, 24)})
    with pytest.raises(ValueError, match=r"mixes two spellings: it has layers.0.hc_attn_fn and model.layers.0.attn_hc"):
        read_checkpoint(tmp_path / "v4", "deepseek_v4")


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    written("fla", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, tensors, model_type="gated_deltanett")
    with pytest.raises(ValueError, match=r"model_type='gated_deltanett'; Did you mean 'gated_deltanet'\? expected one"):
        read_checkpoint(tmp_path, "fla")
    rewrite(tmp_path, tensors, model_type="transformer")
    with pytest.raises(ValueError, match=r"model_type='transformer'; expected one of kimi_k3, kimi_linear with --from"):
        read_checkpoint(tmp_path, "kimi_k3")
    rewrite(tmp_path, {"model.embed.weight": torch.zeros(3)})
    with pytest.raises(
        ValueError, match=r"has no depth mixing of flash-linear-attention; expected tensors such as mod"
    ):
        read_checkpoint(tmp_path, "fla")


def test_yoco_reads_over_depth_at_one_more_place_and_is_refused(tmp_path: Path) -> None:
    written("fla", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, tensors, model_type="yoco")
    with pytest.raises(ValueError, match="is a yoco model, which reads over depth at one more place"):
        read_checkpoint(tmp_path, "fla")
    rewrite(tmp_path, {**tensors, "model.shared_kv_res_norm.weight": torch.ones(D)}, model_type="transformer")
    with pytest.raises(ValueError, match=r"is a yoco model \(it has model.shared_kv_res_norm.weight\)"):
        read_checkpoint(tmp_path, "fla")


@pytest.mark.parametrize(
    ("name", "field", "value", "words"),
    [
        ("fla", "attnres_block_size", None, "A model without it has plain residuals"),
        ("fla", "attnres_block_size", 3, "has attnres_block_size=3; expected 1 or an even number"),
        ("fla", "attnres_block_size", 0, "attnres_block_size=0; expected a whole number above 0"),
        ("fla", "num_hidden_layers", 3.5, "num_hidden_layers=3.5; expected a whole number above 0"),
        ("fla", "num_hidden_layers", 10**30, "num_hidden_layers=1000"),
        ("fla", "hidden_size", True, "hidden_size=True; expected a whole number"),
        ("fla", "norm_eps", "1e-6", "norm_eps='1e-6'; expected a number above 0"),
        ("deepseek_v4", "hc_mult", 1, "hc_mult=1; expected 2 to"),
        ("deepseek_v4", "hc_eps", -1e-6, "hc_eps=-1e-06; expected a number from 0"),
        ("deepseek_v4", "hc_sinkhorn_iters", None, "hc_sinkhorn_iters=None; expected a whole number"),
        ("kimi_k3", "text_config", 5, "text_config=5; expected the fields of the language model"),
    ],
)
def test_a_field_that_cannot_be_is_named(name: str, field: str, value: Any, words: str, tmp_path: Path) -> None:
    written(name, tmp_path)
    rewrite(tmp_path, load_file(tmp_path / "model.safetensors"), **{field: value})
    with pytest.raises(ValueError, match=words):
        read_checkpoint(tmp_path, name)


def test_folders_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none does not exist or is not a folder"):
        read_checkpoint(tmp_path / "none", "fla")
    with pytest.raises(FileNotFoundError, match=r"no config.json in"):
        read_checkpoint(tmp_path, "fla")
    written("fla", tmp_path / "fla")
    (tmp_path / "fla" / "model.safetensors").unlink()
    (tmp_path / "fla" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin is pickled, which can run code and is never read"):
        read_checkpoint(tmp_path / "fla", "fla")
    dm.save_stack(stack_for("fla"), tmp_path / "ours")
    with pytest.raises(ValueError, match=r"was written by save_model or save_stack; .* use --to NAME"):
        read_checkpoint(tmp_path / "ours", "fla")


# The folder that is written


def test_a_folder_with_anything_else_in_it_is_left_as_it_is(tmp_path: Path) -> None:
    stack = stack_for("fla")
    converted = write_checkpoint(stack, tmp_path / "fla", "fla")
    dm.save_stack(stack, tmp_path / "stack")
    dm.save_model(dm.Decoder(dm.DecoderConfig.from_depth(2)), tmp_path / "model")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "notes.txt").write_text("mine")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('{"model_type": "transformer"}')
    (tmp_path / "file").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for target, words in (
        ("text", "is not empty: it has notes.txt, which was not converted. Choose another folder"),
        ("foreign", "is not empty: it holds files of another origin"),
        ("model", "is not empty: it holds model"),
        ("file", "file is a file; expected a folder"),
    ):
        with pytest.raises(ValueError, match=words):
            write_checkpoint(stack, tmp_path / target, "fla")
        with pytest.raises(ValueError, match=words):
            save_converted(converted, tmp_path / target)
    with pytest.raises(ValueError, match="is not empty: it holds stack, and what is to be written is fla"):
        write_checkpoint(stack, tmp_path / "stack", "fla")
    with pytest.raises(ValueError, match="is not empty: it holds fla, and what is to be written is stack"):
        save_converted(converted, tmp_path / "fla")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_conversion_that_is_interrupted_leaves_one_checkpoint_whole(
    renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same shapes with other blocks: a mixture of the two would not show."""
    old, new = (random_stack("block_attnres", block_sublayers=size) for size in (2, 4))
    with torch.no_grad():
        old.out.query.zero_()
    write_checkpoint(old, tmp_path, "fla")
    rename, done = Path.replace, []

    def until_the_power_fails(self: Path, target: Path) -> Path:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(target)
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", until_the_power_fails)
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(new, tmp_path, "fla")
    assert_same(read_checkpoint(tmp_path, "fla").module, new if renames == 2 else old)
    write_checkpoint(new, tmp_path, "fla")
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert_same(read_checkpoint(tmp_path, "fla").module, new)


def test_damage_to_what_depthmix_wrote_is_noticed_in_every_byte(tmp_path: Path) -> None:
    written("fla", tmp_path)
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"its SHA-256 is not the one in config.json"):
        read_checkpoint(tmp_path, "fla")


def test_notes_say_what_was_taken_and_what_was_not(tmp_path: Path) -> None:
    config = dm.DecoderConfig.from_depth(4, mixer="attnres", kv_mixer="value_residual")
    notes = write_checkpoint(dm.Decoder(config), tmp_path, "fla").notes
    assert any("only the mixers were written" in note for note in notes)
    assert any("the KV mechanism value_residual has no place in them and was left out" in note for note in notes)
    notes = read_checkpoint(tmp_path, "fla").notes
    assert any("the rest of the model is another architecture" in note for note in notes)
