"""A decoder in segments is the decoder: cut anywhere, run from the plain tensors, each with its own parameters."""

from __future__ import annotations

import gc
import itertools
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import depthmix as dm
from depthmix.analysis.invariants import distance
from depthmix.models import io
from depthmix.models.bounds import divide
from depthmix.models.counting import execution_flops
from depthmix.models.moe import MixtureOfExperts
from depthmix.support.files import read_tensors
from depthmix.training import flops_per_token
from depthmix.training.checkpoint import load_latest, save
from tests.cases import ALL, label
from tests.mechanisms.test_kv import KV

MOE = {"experts": 3, "active": 2, "shared": 1, "hidden": 4}
LOOP = {"first": 0, "last": 2, "repeats": 2}  # layers 0, 1, 0, 1, 2
BLOCKS = {"name": "block_attnres", "block_sublayers": 3}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "looped": {"loop": LOOP, "kv_mixer": "depth_attention"},
    "shared": {"loop": {**LOOP, "share_mixers": True}, "kv_mixer": "value_residual"},
    "tied": {"tie_embeddings": True, "kv_heads": 1},
    "experts": {"moe": MOE},
    "auxiliary loss": {"moe": {**MOE, "balance": "loss", "balance_rate": 0.5}},
    "all": {
        "moe": {**MOE, "balance": "loss", "balance_rate": 0.5},
        "loop": LOOP,
        "tie_embeddings": True,
        "kv_mixer": {"name": "depth_attention", "stride": 1},
    },
}
EVERY_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
TOKENS = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(3))
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]])
VALID = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()


def make_config(**fields: Any) -> dm.DecoderConfig:
    sizes = {"vocab_size": 11, "dim": 8, "layers": 3, "heads": 2, "head_dim": 4, "hidden": 6, "mixer": BLOCKS}
    return dm.DecoderConfig(**{**sizes, **fields})


def make_decoder(config: dm.DecoderConfig) -> dm.Decoder:
    """In double precision, every parameter away from its start."""
    model = dm.Decoder(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def cut(model: dm.Decoder, *cuts: int) -> list[dm.Segment]:
    """The segments between these places, each built by itself, with the decoder's weights."""
    weights, segments = model.state_dict(), []
    for lo, hi in itertools.pairwise([0, *cuts, model.config.depth]):
        with torch.device("meta"):
            segment = dm.Segment(model.config, lo, hi)
        segment.load_state_dict({name: weights[name].clone() for name in segment.state_dict()}, assign=True)
        segment.checkpoint_every = model.checkpoint_every
        segments.append(segment)
    return segments


def run_segments(segments: Sequence[dm.Segment], **inputs: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, loss and summed gradients; between segments there are only tensors, as between processes."""
    state, runs = (TOKENS,), []
    for segment in segments:
        state = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in state)
        last = {"tokens": TOKENS} if segment is segments[-1] else {}
        runs.append((state, segment(*state, **inputs, **last)))
        state = runs[-1][1]
    with torch.no_grad():
        logits = segments[-1].logits(segments[-1](*runs[-1][0], **inputs)[0])
    grads: tuple[Tensor | None, ...] = (torch.ones_like(state[0]),)
    for taken, given in reversed(runs):
        read = [(t, g) for t, g in zip(given, grads, strict=True) if t.requires_grad and g is not None]
        torch.autograd.backward(*zip(*read, strict=True))
        grads = tuple(t.grad for t in taken)
    return logits, state[0].detach(), summed_gradients(segments)


def summed_gradients(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, torch.zeros_like(parameter)) + parameter.grad
    return total


def check_cuts(model: dm.Decoder, cuts: Sequence[Sequence[int]], **inputs: Any) -> None:
    loss, logits = model.loss(TOKENS, **inputs), model(TOKENS, **inputs).detach()
    loss.backward()
    want = summed_gradients([model])
    for places in cuts:
        found = run_segments(cut(model, *places), **inputs)
        assert distance(found[0], logits) <= 1e-12, places
        assert distance(found[1], loss.detach()) <= 1e-12, places
        assert found[2].keys() == want.keys()
        for name, gradient in found[2].items():
            assert distance(gradient, want[name]) <= 1e-11, (places, name)


def some_cuts(depth: int, count: int) -> list[list[int]]:
    draw = random.Random(depth)
    return [sorted(draw.sample(range(1, depth), draw.randint(1, depth - 1))) for _ in range(count)]


# The same function


CASES = [(*case.values, KV[i % len(KV)]) for i, case in enumerate(ALL)]


@pytest.mark.parametrize(("name", "options", "kv"), CASES, ids=[f"{label(n, o)}-{label(*kv)}" for n, o, kv in CASES])
def test_a_decoder_cut_at_any_place_is_the_decoder(
    name: str, options: dict[str, Any], kv: tuple[str, dict[str, Any]]
) -> None:
    model = make_decoder(make_config(mixer={"name": name, **options}, kv_mixer={"name": kv[0], **kv[1]}))
    check_cuts(model, [[place] for place in range(1, 6)])


@EVERY_FORM
@pytest.mark.parametrize("mixer", [BLOCKS, "attnres"], ids=["block_attnres", "attnres"])
def test_every_form_of_decoder_cut_at_several_places_is_the_decoder(form: dict[str, Any], mixer: Any) -> None:
    model = make_decoder(make_config(**{"layers": 3, **form, "mixer": mixer}))
    check_cuts(model, [range(1, model.config.depth), *some_cuts(model.config.depth, 4)])


@pytest.mark.parametrize("inputs", [{"documents": DOCUMENTS}, {"valid": VALID}], ids=["documents", "padding"])
def test_documents_and_padding_reach_every_segment(inputs: dict[str, Tensor]) -> None:
    model = make_decoder(make_config(**FORMS["all"]))
    check_cuts(model, some_cuts(model.config.depth, 4), **inputs)


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("form", [FORMS["all"], FORMS["experts"]], ids=["all", "experts"])
def test_activation_checkpointing_changes_nothing(form: dict[str, Any], every: int) -> None:
    model = make_decoder(make_config(**form))
    model.checkpoint_every = every
    check_cuts(model, some_cuts(model.config.depth, 3))


def test_a_segment_counts_the_load_of_its_experts_as_the_decoder_does() -> None:
    model = make_decoder(make_config(**FORMS["experts"]))
    model.loss(TOKENS)
    whole = {name: module.load for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}
    state, counted = (TOKENS,), 0
    for lo, hi in ((0, 2), (2, 5), (5, 6)):
        segment = dm.Segment(model.config, lo, hi).double()
        segment.load_state_dict({name: model.state_dict()[name] for name in segment.state_dict()})
        state = segment(*state)
        for name, module in segment.named_modules():
            if isinstance(module, MixtureOfExperts):
                assert module.load is not None
                assert torch.equal(module.load, whole[name])
                counted += int(module.load.sum())
    assert counted == 3 * 2 * TOKENS.numel()


def test_a_compiled_segment_is_the_segment() -> None:
    first, last = cut(make_decoder(make_config(**FORMS["looped"])), 5)
    state = first(TOKENS)
    compiled = [torch.compile(s, fullgraph=True, backend="eager") for s in (first, last)]
    for a, b in zip(compiled[0](TOKENS), state, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(compiled[1](*state, tokens=TOKENS)[0], last(*state, tokens=TOKENS)[0])


# What is passed on


@EVERY_FORM
@pytest.mark.parametrize("mixer", [BLOCKS, {"name": "mrla", "form": "light"}, "mhc"], ids=["blocks", "mrla", "mhc"])
def test_what_a_segment_returns_has_the_stated_shapes_and_can_be_sent(form: dict[str, Any], mixer: Any) -> None:
    segments = cut(make_decoder(make_config(**{**form, "mixer": mixer})), *range(1, 6))
    state: tuple[Tensor, ...] = (TOKENS,)
    for segment, after in itertools.pairwise(segments):
        state = segment(*state)
        assert [tuple(t.shape) for t in state] == segment.shapes(segment.hi, 2, 6) == after.shapes(after.lo, 2, 6)
        assert all(t.is_contiguous() and not t._is_view() for t in state)


@EVERY_FORM
def test_a_segment_runs_on_the_meta_device(form: dict[str, Any]) -> None:
    with torch.device("meta"):
        first, last = dm.Segment(config := make_config(**form), 0, 3), dm.Segment(config, 3, config.depth)
        state = first(TOKENS.to("meta"))
        assert [tuple(t.shape) for t in state] == first.shapes(3, 2, 6)
        assert last(*state)[0].shape == (2, 6, 8)


# Names and starts


@EVERY_FORM
def test_segments_have_the_names_and_values_of_the_decoder_and_no_others(form: dict[str, Any]) -> None:
    config = make_config(**form)
    model = dm.Decoder(config)
    model.reset_parameters(seed=5)
    whole, places = model.state_dict(), itertools.combinations(range(config.depth + 1), 2)
    for lo, hi in places:
        segment = dm.Segment(config, lo, hi)
        segment.reset_parameters(seed=5)
        own = segment.state_dict()
        assert all(torch.equal(own[name], whole[name]) for name in own)
        used = {2 * config.layer_order[i // 2] + i % 2 for i in range(lo, hi)}
        assert {int(name.split(".")[1]) for name in own if name.startswith("sublayers.")} == used
        assert ("embed.weight" in own) == (lo == 0 or (config.tie_embeddings and hi == config.depth))
        assert ("norm.weight" in own) == (hi == config.depth)


@EVERY_FORM
def test_the_state_dicts_of_segments_merge_to_that_of_the_decoder(form: dict[str, Any]) -> None:
    model = make_decoder(make_config(**form))
    merged: dict[str, Tensor] = {}
    for segment in cut(model, 1, 2, 5):
        merged |= segment.state_dict()
    whole = model.state_dict()
    assert merged.keys() == whole.keys()
    assert all(torch.equal(merged[name], whole[name]) for name in whole)
    dm.Decoder(model.config).double().load_state_dict(merged)


@pytest.mark.parametrize("mixer", ["hyper_connections", "mhc", "attnres"])
def test_shared_mixers_start_alike_in_every_segment(mixer: str) -> None:
    """Some starts depend on the site; that of the first execution holds, though it may be in another segment."""
    config = make_config(loop={"first": 1, "last": 2, "repeats": 3, "share_mixers": True}, mixer=mixer)
    model = dm.Decoder(config)
    model.reset_parameters(seed=1)
    whole = model.state_dict()
    for lo in range(config.depth):
        segment = dm.Segment(config, lo, config.depth)
        segment.reset_parameters(seed=1)
        assert all(torch.equal(tensor, whole[name]) for name, tensor in segment.state_dict().items()), lo


@pytest.mark.parametrize("form", [FORMS["looped"], FORMS["shared"]], ids=["looped", "shared"])
def test_a_segment_keeps_no_parameter_of_the_others_in_memory(form: dict[str, Any]) -> None:
    gc.collect()
    before = {id(o) for o in gc.get_objects() if type(o) is nn.Parameter}
    segment = dm.Segment(make_config(**form), 2, 5)
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o) is nn.Parameter and id(o) not in before]
    assert {id(p) for p in alive} == {id(p) for p in segment.parameters()}


# Files


@pytest.mark.parametrize("form", ["plain", "shared", "all", "experts"])
@torch.no_grad()
def test_a_segment_of_a_saved_model_has_its_weights_and_reads_no_others(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_decoder(make_config(**FORMS[form])).eval()
    dm.save_model(model, tmp_path)
    read: set[str] = set()

    def spy(*args: Any) -> Any:
        tensors, metadata = read_tensors(*args)
        read.update(tensors)
        return tensors, metadata

    monkeypatch.setattr(io, "read_tensors", spy)
    for lo, hi in ((0, 1), (1, 4), (3, model.config.depth)):
        read.clear()
        segment = dm.load_segment(tmp_path, lo, hi)
        own = segment.state_dict()
        assert read == own.keys()
        assert not segment.training
        assert all(torch.equal(own[name], tensor) for name, tensor in model.state_dict().items() if name in own)
        assert not any(tensor.is_meta for tensor in (*segment.parameters(), *segment.buffers()))
    state = dm.load_segment(tmp_path, 0, 3)(TOKENS)
    last = dm.load_segment(tmp_path, 3, model.config.depth)
    assert distance(last.logits(last(*state)[0]), model(TOKENS)) <= 1e-12
    assert dm.load_segment(tmp_path, 1, 2, dtype=torch.float32).depth.dim == 8


def test_a_tensor_that_a_saved_model_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dm.save_model(dm.Decoder(make_config()), tmp_path)

    def without(*args: Any) -> Any:
        tensors, metadata = read_tensors(*args)
        return {name: t for name, t in tensors.items() if name != "sublayers.3.up_proj.weight"}, metadata

    monkeypatch.setattr(io, "read_tensors", without)
    dm.load_segment(tmp_path, 0, 3)
    with pytest.raises(ValueError, match=r"missing: sublayers\.3\.up_proj\.weight"):
        dm.load_segment(tmp_path, 0, 4)
    with pytest.raises(ValueError, match="segment lo=4, hi=9; expected 0 <= lo < hi <= 6"):
        dm.load_segment(tmp_path, 4, 9)


def test_a_segment_of_a_model_of_0_1_0_has_its_weights() -> None:
    folder = next((Path(__file__).parents[1] / "fixtures" / "v0_1_0").rglob("model.safetensors")).parent
    weights = load_file(folder / "model.safetensors")
    segment = dm.load_segment(folder, 1, 3)
    own = {name: tensor for name, tensor in segment.state_dict().items() if not name.endswith("_extra_state")}
    assert own
    assert all(torch.equal(tensor, weights[name]) for name, tensor in own.items())


def test_segments_are_loaded_from_a_checkpoint_of_the_whole_and_the_whole_from_theirs(tmp_path: Path) -> None:
    model = make_decoder(make_config(**FORMS["all"]))
    save(tmp_path / "whole", 7, {"model": model.state_dict(), "optimizer": {"w": torch.ones(2)}, "note": "x"})
    merged: dict[str, Tensor] = {}
    for lo, hi in dm.segment_bounds(model.config, 3):
        segment = dm.Segment(model.config, lo, hi).double()
        with pytest.raises(ValueError, match="belongs to another model"):
            load_latest(tmp_path / "whole", {"model": segment.state_dict()})
        loaded = load_latest(tmp_path / "whole", {"model": segment.state_dict()}, part=True)
        assert loaded is not None
        assert (loaded[0], loaded[1]["note"], "optimizer" in loaded[1]) == (7, "x", True)
        merged |= segment.state_dict()
    whole = model.state_dict()
    assert all(torch.equal(merged[name], whole[name]) for name in whole)
    save(tmp_path / "merged", 8, {"model": merged})
    again = dm.Decoder(model.config).double()
    load_latest(tmp_path / "merged", {"model": again.state_dict()})
    assert all(torch.equal(tensor, whole[name]) for name, tensor in again.state_dict().items())


def test_what_a_checkpoint_lacks_or_has_in_another_shape_is_named(tmp_path: Path) -> None:
    segments = cut(make_decoder(make_config()), 3)
    save(tmp_path, 1, {"model": segments[0].state_dict()})
    with pytest.raises(ValueError, match=r"step-0*1 has no model\|depth\.mixers\.3\.\w+ and \d+ more tensors"):
        load_latest(tmp_path, {"model": segments[1].state_dict()}, part=True)
    with pytest.raises(ValueError, match=r"embed\.weight has shape \[11, 8\], expected \[12, 8\]"):
        load_latest(tmp_path, {"model": {"embed.weight": torch.empty(12, 8)}}, part=True)


# Refusals


@pytest.mark.parametrize(("lo", "hi"), [(-1, 2), (2, 2), (3, 1), (0, 7), (6, 6), (0, 2.5), ("0", 2)])
def test_a_wrong_range_is_named(lo: Any, hi: Any) -> None:
    with pytest.raises(ValueError, match=f"segment lo={lo!r}, hi={hi!r}; expected 0 <= lo < hi <= 6"):
        dm.Segment(make_config(), lo, hi)


def test_a_segment_that_is_used_in_the_wrong_place_is_named() -> None:
    first, last = cut(make_decoder(make_config(**FORMS["auxiliary loss"])), 3)
    state = first(TOKENS)
    with pytest.raises(ValueError, match=r"segment 3 to 5 got 1 tensors; expected 3: what the segment that ends at 3"):
        last(TOKENS)
    with pytest.raises(ValueError, match=r"segment 0 to 2 got 3 tensors; expected 1: the tokens"):
        first(*state)
    with pytest.raises(ValueError, match=r"segment 0 to 2 of 6 has no head"):
        first.logits(state[0])
    with pytest.raises(ValueError, match=r"documents has shape \[2, 3\]; expected the shape of the tokens, \[2, 6\]"):
        last(*state, documents=DOCUMENTS[:, :3])
    with pytest.raises(KeyError, match="1"):
        last.sublayers[1]
    with pytest.raises(TypeError, match="Segment got a dict; expected a DecoderConfig"):
        dm.Segment({}, 0, 1)  # type: ignore[arg-type]


def test_the_code_blocks_of_the_page_run() -> None:
    page = Path(__file__).parents[2] / "docs" / "decoder.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert "dm.load_segment" in blocks[-1]
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "decoder.md", "exec"), scope)
    assert f"dm.segment_bounds(config, 3)  # {scope['bounds']}" in blocks[-1]


# Where to cut


def test_ninety_three_layers_are_divided_as_evenly_as_any_other_number() -> None:
    config = make_config(layers=93)
    assert dm.segment_bounds(config, 4) == [(0, 46), (46, 93), (93, 139), (139, 186)]
    for layers, segments in ((93, 8), (93, 7), (5, 10), (7, 1), (61, 16)):
        bounds = dm.segment_bounds(make_config(layers=layers), segments)
        lengths = [hi - lo for lo, hi in bounds]
        assert (bounds[0][0], bounds[-1][1], len(bounds)) == (0, 2 * layers, segments)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
        assert max(lengths) - min(lengths) <= 1


def test_no_division_has_a_cheaper_most_expensive_segment() -> None:
    draw = random.Random(1)
    for _ in range(300):
        costs = [draw.choice([1, 2, 3, 9, 40, 1000]) for _ in range(draw.randint(1, 9))]
        parts = draw.randint(1, len(costs))
        ends = divide(costs, parts)
        assert (ends[0], ends[-1], len(ends)) == (0, len(costs), parts + 1)
        assert all(lo < hi for lo, hi in itertools.pairwise(ends))
        inside = itertools.combinations(range(1, len(costs)), parts - 1)
        assert largest(costs, ends) == min(largest(costs, [0, *places, len(costs)]) for places in inside)


def largest(costs: list[int], ends: list[int]) -> int:
    return max(sum(costs[lo:hi]) for lo, hi in itertools.pairwise(ends))


def test_equal_costs_are_divided_evenly() -> None:
    for count, parts in itertools.product(range(1, 30), range(1, 30)):
        if parts <= count:
            lengths = [hi - lo for lo, hi in itertools.pairwise(divide([7] * count, parts))]
            assert max(lengths) - min(lengths) <= 1


@EVERY_FORM
def test_the_costs_of_executions_add_up_to_the_flops_of_the_decoder(form: dict[str, Any]) -> None:
    config = make_config(**form)
    assert 3 * sum(execution_flops(config, 64)) == flops_per_token(config, 64)


def test_a_large_head_shortens_the_last_segment() -> None:
    config = dm.DecoderConfig(vocab_size=32_000, dim=256, layers=12, heads=4, hidden=680)
    *others, last = [hi - lo for lo, hi in dm.segment_bounds(config, 4, by="flops", tokens_per_row=512)]
    assert last < min(others)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"segments": 0}, "segments=0; expected 1 to 6"),
        ({"segments": 7}, "segments=7; expected 1 to 6"),
        ({"segments": 2, "by": "time"}, "by='time'; expected 'count' or 'flops'"),
        ({"segments": 2, "by": "flops"}, "by='flops' without tokens_per_row"),
    ],
)
def test_a_wrong_division_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dm.segment_bounds(make_config(), **given)
