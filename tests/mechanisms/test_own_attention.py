"""Value mixers outside of the decoder: `dm.KVStack` in an attention of one's own, and hints where each kind belongs."""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import depthmix as dm
from depthmix.cli import main
from depthmix.mechanisms import kv_mechanism
from tests.reference import depth_attention as reference

SCRIPT = Path(__file__).parents[2] / "examples" / "own_attention.py"
EACH_KV = pytest.mark.parametrize("name", dm.list_mechanisms(kind="kv"))


def example() -> Any:
    spec = importlib.util.spec_from_file_location("own_attention", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_runs_and_decodes_the_same() -> None:
    out = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True).stdout
    assert "6 attention layers, 0 more parameters" in out
    assert float(re.search(r"differs by (\S+)", out)[1]) < 1e-12  # type: ignore[index]


@torch.no_grad()
def test_the_example_caches_what_the_paper_says() -> None:
    own = example()
    model, x = own.Model().double(), torch.randn(2, 5, own.DIM, dtype=torch.float64)
    heads: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
    for layer in model.layers:
        for part, kept in heads.items():
            getattr(layer, part).register_forward_hook(
                lambda _, __, y, kept=kept: kept.append(y.unflatten(-1, (-1, own.HEAD_DIM)).transpose(1, 2))
            )
    caches = [own.Cache() for _ in range(own.LAYERS)]
    model(x, caches)
    want = reference.mixed(heads["q"], heads["k"], heads["v"], order=list(range(own.LAYERS)))
    for cache, raw, mixed in zip(caches, heads["v"], want, strict=True):
        assert (cache.pair[1] - mixed).abs().max() < 1e-12
        assert cache is caches[0] or (raw - mixed).abs().max() > 1e-3


@EACH_KV
def test_the_decoder_holds_a_stack_under_the_names_that_it_always_had(name: str) -> None:
    config = dm.DecoderConfig(vocab_size=8, dim=16, layers=3, heads=2, hidden=8, kv_mixer=name)
    model = dm.Decoder(config)
    assert isinstance(model.kv_mixers, dm.KVStack)
    names = [key for key in model.state_dict() if key.startswith("kv_mixers.")]
    learned = ["own", "first"] if name == "value_residual" else []
    assert names == [f"kv_mixers.{i}.{key}" for i in (1, 2) for key in learned]
    alone = dm.KVStack(name, head_dim=8, depth=3)
    assert list(alone.state_dict()) == [key.removeprefix("kv_mixers.") for key in names]
    assert [key for key, _ in alone.named_children()] == ["0", "1", "2"]


@EACH_KV
def test_a_stack_of_value_mixers_is_a_list_with_a_beginning(name: str) -> None:
    stack = dm.KVStack(name, head_dim=4, order=(0, 1, 1, 2))
    assert len(stack) == 4
    assert [mixer.site.index for mixer in stack] == [0, 1, 2, 3]
    assert all(stack[i] is mixer for i, mixer in enumerate(stack))
    assert all(mixer.order == (0, 1, 1, 2) for mixer in stack)
    assert stack.begin() == ()
    assert [stack.spec(i) for i in range(4)] == [mixer.spec(mixer.site) for mixer in stack]
    assert dm.KVStack(name, head_dim=4, depth=4)[3].order == (0, 1, 2, 3)
    assert dm.KVStack(kv_mechanism(name), head_dim=4, depth=2).name == kv_mechanism(name).__name__
    for index in (-1, 4):
        with pytest.raises(IndexError, match=f"attention {index}; this stack holds 0 to 3"):
            stack[index]


def run(stack: dm.KVStack, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    kv, out = stack.begin(), []
    for i in range(len(stack)):
        u, kv = stack[i].mix(q[i], k[i], v[i], kv)
        out.append(u)
    return out


@EACH_KV
def test_a_stack_of_value_mixers_is_copied_moved_and_compiled_like_any_module(name: str) -> None:
    torch._dynamo.reset()
    with torch.device("meta"):
        stack = dm.KVStack(name, head_dim=4, depth=3)
    stack = stack.to_empty(device="cpu").double()
    stack.reset_parameters()
    q, k, v = (torch.randn(3, 2, heads, 5, 4, dtype=torch.float64) for heads in (4, 2, 2))
    want = run(dm.KVStack(name, head_dim=4, depth=3).double(), q, k, v)
    for found in (run(stack, q, k, v), run(copy.deepcopy(stack), q, k, v),
                  torch.compile(run, fullgraph=True, backend="eager")(stack, q, k, v)):  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"depth": 3, "order": (0, 1)}, r"depth=3 and order=\(0, 1\); expected exactly one of them"),
        ({}, "depth=None and order=None; expected exactly one of them"),
        ({"depth": 0}, "depth=0; expected 1 to"),
        ({"order": ()}, "depth=0; expected 1 to"),
        ({"order": 6}, "order=6; expected the layer of each execution"),
        ({"order": "01"}, "order='01'; expected the layer of each execution"),
        ({"depth": 2.0}, "depth=2.0; expected a whole number"),
        ({"depth": 2, "head_dim": 0}, "head_dim=0; expected 1 to"),
        ({"depth": 2, "stried": 1}, r"depth_attention has no option 'stried'\. Did you mean 'stride'"),
        ({"depth": 2, "sources": (5,)}, "depth_attention: sources=5; expected 0 to 1"),
    ],
)
def test_wrong_stacks_of_value_mixers_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dm.KVStack("depth_attention", **{"head_dim": 4, **given})
    with pytest.raises(TypeError, match="expected a name from list_mechanisms"):
        dm.KVStack(torch.nn.Linear, head_dim=4, depth=2)  # type: ignore[arg-type]


SMALL = {"vocab_size": 8, "dim": 16, "layers": 2, "heads": 2, "hidden": 8}
KV_HOME = (
    r"'depth_attention', a KV mechanism: .*DecoderConfig\(kv_mixer='depth_attention'\).*KVStack\('depth_attention'"
)
DEPTH_HOME = r"'attnres', a depth mechanism: .*DecoderConfig\(mixer='attnres'\).*DepthStack\('attnres'"


@pytest.mark.parametrize(
    "build",
    [
        lambda: dm.DepthStack("depth_attention", dim=8, depth=4),
        lambda: dm.DecoderConfig(**SMALL, mixer="depth_attention"),
        lambda: dm.mechanism("depth_attention"),
    ],
    ids=["DepthStack", "DecoderConfig", "mechanism"],
)
def test_a_value_mixer_in_the_place_of_a_depth_mechanism_is_told_where_it_belongs(build: Any) -> None:
    with pytest.raises(ValueError, match=KV_HOME.replace("',", "' is")) as caught:
        build()
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    "build",
    [
        lambda: dm.KVStack("attnres", head_dim=8, depth=4),
        lambda: dm.DecoderConfig(**SMALL, kv_mixer="attnres"),
    ],
    ids=["KVStack", "DecoderConfig"],
)
def test_a_depth_mechanism_in_the_place_of_a_value_mixer_is_told_where_it_belongs(build: Any) -> None:
    with pytest.raises(ValueError, match=DEPTH_HOME.replace("',", "' is")) as caught:
        build()
    assert "Did you mean" not in str(caught.value)


def test_a_misspelt_name_of_the_other_kind_is_answered_with_its_kind() -> None:
    with pytest.raises(ValueError, match=r"unknown mechanism 'depht_attention'\. Did you mean " + KV_HOME):
        dm.DepthStack("depht_attention", dim=8, depth=4)
    with pytest.raises(ValueError, match=r"unknown mechanism 'atnres'\. Did you mean " + DEPTH_HOME):
        dm.KVStack("atnres", head_dim=8, depth=4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "depht_attention"], "Did you mean " + KV_HOME),
        (["train", "--mixer", "depht_attention"], "Did you mean " + KV_HOME),
        (["train", "--set", "model.mixer=depth_attention"], KV_HOME.replace("',", "' is")),
        (["train", "--set", "model.kv_mixer=attnres"], DEPTH_HOME.replace("',", "' is")),
        (["train", "--mixer", "attnres+mhc"], "'attnres.mhc' has two depth mechanisms, attnres and mhc"),
        (["train", "--mixer", "depth_attention+value_residual"], "two KV mechanisms, depth_attention and value_resid"),
        (["verify", "depth_attention"], KV_HOME.replace("',", "' is")),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_the_command_line_tells_where_each_kind_belongs(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 4, 3, 16), (2, 4, 3, 16), (2, 4, 3, 16)),  # heads of another width
        ((2, 3, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)),  # 3 query heads over 2 key heads
        ((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8)),  # [B, T, H, d]
        ((2, 4, 5, 8), (2, 4, 5, 8), (2, 2, 5, 8)),
        ((5, 8), (5, 8), (5, 8)),
    ],
    ids=["width", "groups", "layout", "values", "no heads"],
)
def test_heads_of_another_shape_are_refused(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    for name in dm.list_mechanisms(kind="kv"):
        stack = dm.KVStack(name, head_dim=8, depth=2)
        with pytest.raises(ValueError, match=r"attention 0 got q \[.*\]; expected \[\.\.\., heads, tokens, head_dim\]"):
            stack[0].mix(torch.ones(q), torch.ones(k), torch.ones(v), stack.begin())
