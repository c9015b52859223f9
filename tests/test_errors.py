"""Wrong input is refused with an error that names the value, what was expected and what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import depthmix as dm
from depthmix.mechanisms import kv_mechanism
from tests.cases import EVERY_CASE

DIM, DEPTH = 8, 5
LEAD = (2, 7)  # 7 is no number of streams, ranks or heads, so that a token axis cannot pass for one of them
SHAPE = [*LEAD, DIM]
NAMES = dm.list_mechanisms()
NAN, INF = math.nan, math.inf


def says(*parts: object) -> str:
    """A pattern for `match`: the message holds every part, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(str(part))})" for part in parts)


def build(name: str = "attnres", **options: Any) -> dm.DepthStack:
    return dm.DepthStack(name, **{"dim": DIM, "depth": DEPTH, **options})


def embedding(*lead: int) -> Tensor:
    return torch.randn(*(lead or LEAD), DIM, generator=torch.Generator().manual_seed(0))


def states_of(stack: dm.DepthStack) -> list[dm.State]:
    """The state before each site, the output's included."""
    states = [stack.begin(embedding())]
    for mixer in stack:
        states.append(mixer.step(states[-1], torch.tanh))
    return states


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Names of mechanisms


@pytest.mark.parametrize(
    ("name", "meant"), [("atnres", "attnres"), ("block-attnres", "block_attnres"), ("MHC_lite", "mhc_lite")]
)
def test_a_misspelt_mechanism_is_answered_with_the_one_that_was_meant(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=says(f"unknown mechanism {name!r}", f"Did you mean {meant!r}?")):
        build(name)


@pytest.mark.parametrize("name", ["", "transformer_xl_zzz"])
def test_an_unknown_mechanism_is_answered_with_all_known_names(name: str) -> None:
    with pytest.raises(ValueError, match=says(f"unknown mechanism {name!r}", *NAMES)) as caught:
        build(name)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    "name", [None, 3, ["attnres"], nn.Linear, torch.tanh], ids=["none", "int", "list", "class", "function"]
)
def test_a_mechanism_that_is_neither_a_name_nor_a_class_of_mixers_is_refused(name: Any) -> None:
    with pytest.raises(TypeError, match=says("mechanism", repr(name), "expected a name", "DepthMixer")):
        build(name)


def test_an_unknown_mechanism_of_kind_kv_is_refused() -> None:
    with pytest.raises(ValueError, match=says("unknown mechanism 'transformer_xl_zzz'", "Known: depth_attention, ")):
        kv_mechanism("transformer_xl_zzz")


def test_an_unknown_kind_of_mechanism_is_refused() -> None:
    with pytest.raises(ValueError, match=says("kind='deep'", "expected 'depth' or 'kv'")):
        dm.list_mechanisms(kind="deep")  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# Options, driven by the configuration classes of all mechanisms


@dataclasses.dataclass(frozen=True)
class Option:
    mechanism: str
    name: str
    hint: Any  # the annotation without None
    optional: bool


def all_options() -> list[Option]:
    found = []
    for name in NAMES:
        config = dm.mechanism(name).Config
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            hint, optional = hints[field.name], False
            if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
                optional = type(None) in typing.get_args(hint)
                hint = next(h for h in typing.get_args(hint) if h is not type(None))
            found.append(Option(name, field.name, hint, optional))
    return found


def is_choice(option: Option) -> bool:
    return typing.get_origin(option.hint) is typing.Literal


def test_every_option_has_a_type_that_is_checked() -> None:
    """What the tests below do not reach would not be checked at all."""
    assert [o for o in all_options() if o.hint not in (int, float, bool, str) and not is_choice(o)] == []


@pytest.fixture(params=NAMES)
def options(request: pytest.FixtureRequest) -> list[Option]:
    """Those of one mechanism."""
    return [option for option in all_options() if option.mechanism == request.param]


def refused(option: Option, value: Any, *expected: str) -> None:
    told = says(f"{option.mechanism}: {option.name}={value!r}", "expected", *expected)
    with pytest.raises(ValueError, match=told):
        build(option.mechanism, **{option.name: value})


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_float_option_that_is_not_finite_is_refused(options: list[Option], value: float) -> None:
    for option in options:
        if option.hint is float:
            refused(option, value, "a finite number")


@pytest.mark.parametrize("value", [True, "1.0", 1j, [1.0]], ids=repr)
def test_a_float_option_of_another_type_is_refused(options: list[Option], value: Any) -> None:
    for option in options:
        if option.hint is float:
            refused(option, value, "a finite number")


def test_a_whole_number_too_large_for_a_float_is_refused() -> None:
    for option in all_options():
        if option.hint is float:
            refused(option, 10**400, "a finite number")


@pytest.mark.parametrize("value", [True, 1.5, 2.0, "2", NAN], ids=repr)
def test_an_int_option_of_another_type_is_refused(options: list[Option], value: Any) -> None:
    for option in options:
        if option.hint is int:
            refused(option, value, "a whole number")


@pytest.mark.parametrize("value", [0, -1])
def test_an_int_option_below_one_is_refused(options: list[Option], value: int) -> None:
    """All of them count something: heads, streams, sublayers, iterations."""
    for option in options:
        if option.hint is int:
            refused(option, value)


@pytest.mark.parametrize("value", [1, 0, "yes", None], ids=repr)
def test_a_bool_option_of_another_type_is_refused(options: list[Option], value: Any) -> None:
    for option in options:
        if option.hint is bool:
            refused(option, value, "True or False")


@pytest.mark.parametrize("value", [1, True, ["elu1"]], ids=repr)
def test_a_text_option_of_another_type_is_refused(options: list[Option], value: Any) -> None:
    for option in options:
        if option.hint is str:
            refused(option, value, "a string")


@pytest.mark.parametrize("value", ["softmaxx", "", None, 1, ["softmax"]], ids=repr)
def test_a_choice_that_does_not_exist_is_answered_with_those_that_do(options: list[Option], value: Any) -> None:
    for option in options:
        if is_choice(option):
            refused(option, value, *map(repr, typing.get_args(option.hint)))


def test_none_is_refused_where_an_option_has_to_be_a_number(options: list[Option]) -> None:
    for option in options:
        if option.hint in (int, float) and not option.optional:
            refused(option, None, "number")


def test_a_negative_eps_is_refused(options: list[Option]) -> None:
    for option in options:
        if option.name.endswith("eps"):
            refused(option, -1e-6)


def test_an_eps_of_zero_is_refused_where_a_norm_divides_by_it(options: list[Option]) -> None:
    for option in options:
        if (option.mechanism, option.name) == ("mhc", "eps"):  # of a gate and of Sinkhorn's sums, 0 by default
            build("mhc", eps=0.0)
        elif option.name.endswith("eps"):
            refused(option, 0.0, "above 0", "1e-6")


@pytest.mark.parametrize("name", NAMES)
def test_an_option_of_another_mechanism_is_refused(name: str) -> None:
    own = {o.name for o in all_options() if o.mechanism == name}
    for foreign in sorted({o.name for o in all_options()} - own):
        with pytest.raises(ValueError, match=says(f"{name} has no option {foreign!r}", "Known: ", *own)):
            build(name, **{foreign: 1})


@pytest.mark.parametrize(
    ("name", "option", "meant"),
    [
        ("attnres", "head", "heads"),
        ("block_attnres", "block_size", "block_sublayers"),
        ("block_attnres", "n_blocks", "num_blocks"),
        ("mhc", "stream", "streams"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_one_that_was_meant(name: str, option: str, meant: str) -> None:
    with pytest.raises(ValueError, match=says(f"{name} has no option {option!r}", f"Did you mean {meant!r}?", "Known")):
        build(name, **{option: 2})


def test_a_mechanism_without_options_says_that_it_has_none() -> None:
    with pytest.raises(ValueError, match=says("residual has no option 'scale'", "Known: none")):
        build("residual", scale=1.0)


@pytest.mark.parametrize("option", ["num_blocks", "block_sublayers"])
@pytest.mark.parametrize("value", [0, -1, DEPTH + 1])
def test_blocks_that_do_not_fit_the_depth_are_refused(option: str, value: int) -> None:
    with pytest.raises(ValueError, match=says(f"{option}={value}", f"1 to {DEPTH}", f"{DEPTH} sublayers")):
        build("block_attnres", **{option: value})


def test_both_ways_to_say_the_block_size_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match=says("block_sublayers=2", "num_blocks=3", "expected only one of them")):
        build("block_attnres", block_sublayers=2, num_blocks=3)


@pytest.mark.parametrize(
    ("name", "option"),
    [(o.mechanism, o.name) for o in all_options() if o.name in ("heads", "head_dim")],
)
@pytest.mark.parametrize("value", [3, 2 * DIM])
def test_heads_that_do_not_divide_the_width_are_refused(name: str, option: str, value: int) -> None:
    with pytest.raises(ValueError, match=says(f"{option}={value}", "expected a divisor", f"dim={DIM}")):
        build(name, **{option: value})


@pytest.mark.parametrize("window", [0, -2])
def test_a_window_without_outputs_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match=says(f"window={window}", "expected at least 1")):
        build("attnres", window=window)


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("attnres", {"mixing": "static", "query": "input"}, ["mixing='static'", "query='input'", "defaults"]),
        ("attnres", {"mixing": "static", "key_norm": False}, ["mixing='static'", "key_norm=False", "defaults"]),
        ("attnres", {"mixing": "linear", "scale": 2.0}, ["scale=2.0", "mixing='linear'", "softmax and sigmoid"]),
        (
            "attnres",
            {"mixing": "sigmoid", "scale_by_count": True},
            ["scale_by_count=True", "expected mixing='softmax' or 'static'"],
        ),
        (
            "block_attnres",
            {"mixing": "linear", "scale_by_count": True},
            ["scale_by_count=True", "'softmax' or 'static'"],
        ),
        (
            "linear_attention",
            {"normalize": True},
            ["normalize=True", "feature_map='identity'", "set feature_map='elu1'"],
        ),
        (
            "linear_attention",
            {"normalize": True, "feature_map": "elu1", "rule": "delta"},
            ["normalize=True", "rule='delta'", "'plain' or 'gated'"],
        ),
        (
            "linear_attention",
            {"normalize": True, "feature_map": "elu1", "rule": "gated_delta"},
            ["normalize=True", "rule='gated_delta'", "'plain' or 'gated'"],
        ),
        ("ddl", {"beta": 0.0}, ["beta=0.0", "between 0", "2"]),
        ("ddl", {"beta": 2.0}, ["beta=2.0", "between 0", "2"]),
        ("mhc", {"streams": 1}, ["streams=1", "expected 2 to", "'residual'"]),
        ("mhc_lite", {"streams": 6}, ["streams=6", "2 to 5", "'mhc'"]),
    ],
)
def test_options_that_contradict_each_other_or_their_meaning_are_refused(
    name: str, options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ValueError, match=says(*parts)):
        build(name, **options)


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


@pytest.mark.parametrize("value", [0, -8])
@pytest.mark.parametrize("what", ["dim", "depth"])
def test_a_width_or_depth_below_one_is_refused(what: str, value: int) -> None:
    with pytest.raises(ValueError, match=says(f"attnres: {what}={value}", "expected 1 to ")):
        build(**{what: value})


@pytest.mark.parametrize("value", [8.0, "8", None, True, NAN, [8]], ids=repr)
@pytest.mark.parametrize("what", ["dim", "depth"])
def test_a_width_or_depth_that_is_no_whole_number_is_refused(what: str, value: Any) -> None:
    with pytest.raises(ValueError, match=says(f"attnres: {what}={value!r}", "expected a whole number")):
        build(**{what: value})


@pytest.mark.parametrize(
    "kinds",
    [["attn"] * (DEPTH - 1), ["mlp"] * (DEPTH + 1), [], ["attn", "mlp", "attn", "mlp", "out"], ["attention"] * DEPTH],
)
def test_kinds_of_the_wrong_length_or_name_are_refused(kinds: Any) -> None:
    with pytest.raises(ValueError, match=says(f"kinds={kinds!r}", f"expected {DEPTH} entries 'attn' or 'mlp'")):
        build(kinds=kinds)


# ---------------------------------------------------------------------------------------------------------------------
# begin


@pytest.mark.parametrize(
    ("x", "parts"),
    [
        (torch.zeros(2, DIM, dtype=torch.long), ["torch.int64", "embed tokens first"]),
        (torch.zeros(2, DIM, dtype=torch.bool), ["torch.bool", "embed tokens first"]),
        (torch.zeros(2, DIM, dtype=torch.complex64), ["torch.complex64"]),
        ([[0.0] * DIM], ["list"]),
        (None, ["NoneType"]),
        (1.0, ["float"]),
    ],
    ids=["int", "bool", "complex", "list", "none", "number"],
)
def test_begin_refuses_what_is_no_floating_tensor(x: Any, parts: list[str]) -> None:
    for name in NAMES:
        with pytest.raises(
            TypeError, match=says("begin got", *parts, f"expected a floating-point tensor [..., {DIM}]")
        ):
            build(name).begin(x)


@pytest.mark.parametrize("shape", [(), (2, 1), (2, DIM + 1), (DIM, 3), (0,), (2, 0)], ids=str)
def test_begin_refuses_a_scalar_and_any_other_width(shape: tuple[int, ...]) -> None:
    for name in NAMES:
        with pytest.raises(ValueError, match=says("begin got", f"shape {list(shape)}", f"expected [..., {DIM}]")):
            build(name).begin(torch.zeros(shape))


@pytest.mark.parametrize("name", [name for name in NAMES if next(build(name).parameters(), None) is not None])
def test_begin_refuses_a_tensor_on_another_device_than_the_parameters(name: str) -> None:
    with pytest.raises(ValueError, match=says("begin got", "on meta", "on cpu", ".to(device)")):
        build(name).begin(embedding().to("meta"))


# ---------------------------------------------------------------------------------------------------------------------
# What a sublayer returns

WRONG_SHAPES = {
    "one channel": lambda h: h[..., :1],
    "one token for all": lambda h: h[:, :1],
    "one batch row for all": lambda h: h[:1],
    "no leading axes": lambda h: h[0, 0],
    "an axis more": lambda h: h.unsqueeze(0),
    "an axis less": lambda h: h[..., 0],
    "a scalar": lambda h: h.sum(),
    "twice the width": lambda h: torch.cat([h, h], -1),
    "transposed": lambda h: h.transpose(0, 1),
    "no tokens": lambda h: h[:, :0],
}


def write_at(stack: dm.DepthStack, index: int, f: Any) -> None:
    state = states_of(stack)[index]
    h, carry = stack[index].read(state)
    stack[index].write(state, carry, f(h))


@EVERY_CASE
def test_a_sublayer_that_returns_another_shape_is_refused_even_if_it_would_broadcast(
    name: str, options: dict[str, Any]
) -> None:
    stack = build(name, **options)
    for mixer, state in zip(stack, states_of(stack), strict=False):
        h, carry = mixer.read(state)
        for f in WRONG_SHAPES.values():
            parts = (f"sublayer {mixer.site.index} returned", list(f(h).shape), "expected", SHAPE)
            with pytest.raises(ValueError, match=says(*parts)):
                mixer.write(state, carry, f(h))


@pytest.mark.parametrize("name", NAMES)
def test_a_sublayer_that_returns_another_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=says("sublayer 1 returned", "on meta", "expected", "on cpu")):
        write_at(build(name), 1, lambda h: h.to("meta"))


@pytest.mark.parametrize("name", NAMES)
def test_a_sublayer_that_returns_no_floating_dtype_is_refused(name: str) -> None:
    for dtype in (torch.long, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=says("sublayer 1 returned", dtype, "expected a floating-point tensor")):
            write_at(build(name), 1, lambda h, dtype=dtype: h.to(dtype))


@pytest.mark.parametrize(
    ("f", "got"),
    [
        (lambda h: (h, None), "tuple"),
        (lambda h: [h], "list"),
        (lambda h: None, "NoneType"),
        (lambda h: 1, "int"),
        (lambda h: 1.0, "float"),
        (lambda h: {"last_hidden_state": h}, "dict"),
    ],
    ids=["tuple", "list", "none", "int", "float", "dict"],
)
def test_a_sublayer_that_returns_no_tensor_is_refused(f: Any, got: str) -> None:
    """Attention modules like to return a tuple: the tensor and its weights."""
    for name in NAMES:
        with pytest.raises(
            (TypeError, ValueError), match=says("sublayer 1 returned", got, "expected a floating-point tensor")
        ):
            write_at(build(name), 1, f)


# ---------------------------------------------------------------------------------------------------------------------
# States


def passes_for(shapes: Sequence[tuple[int, ...]], spec: dm.StateSpec) -> bool:
    """The shapes fit, if perhaps with other leading axes: nothing in the state itself tells the sites apart."""
    if not spec.essential <= len(shapes) <= len(spec.shapes):
        return False
    lead = shapes[0][: len(shapes[0]) - len(spec.shapes[0])]
    return all(tuple(s) == (*lead, *w) for s, w in zip(shapes, spec.shapes, strict=False))


@EVERY_CASE
def test_a_state_from_another_site_is_refused_wherever_its_shapes_differ(name: str, options: dict[str, Any]) -> None:
    stack = build(name, **options)
    states = states_of(stack)
    for mixer in stack.all_mixers():
        here = mixer.site.index
        for state in states:
            if not passes_for([t.shape for t in state], stack.spec(here)):
                with pytest.raises(ValueError, match=says(f"site {here} got a state", "expected")):
                    mixer.read(state)


@EVERY_CASE
def test_a_state_of_the_wrong_length_is_refused(name: str, options: dict[str, Any]) -> None:
    stack = build(name, **options)
    for mixer, state in zip(stack.all_mixers(), states_of(stack), strict=True):
        spec = stack.spec(mixer.site.index)
        want = len(spec.shapes)
        for wrong in ((), state[: spec.essential - 1], (*state, *[state[-1]] * (want - len(state) + 1))):
            parts = (f"site {mixer.site.index} got a state of {len(wrong)} tensors", f"expected {want}", "order")
            with pytest.raises(ValueError, match=says(*parts)):
                mixer.read(wrong)


@EVERY_CASE
def test_a_write_refuses_a_state_of_the_wrong_length_too(name: str, options: dict[str, Any]) -> None:
    stack = build(name, **options)
    for mixer, state in zip(stack, states_of(stack), strict=False):
        h, carry = mixer.read(state)
        longer = len(stack.spec(mixer.site.index).shapes) - len(state) + 1
        for wrong in ((), (*state, *[state[-1]] * longer)):
            with pytest.raises(ValueError, match=says(f"site {mixer.site.index} got a state of {len(wrong)} tensors")):
                mixer.write(wrong, carry, h)


@pytest.mark.parametrize("name", ["attnres", "delta_attnres", "denseformer", "linear_attention", "mrla"])
def test_sites_that_are_read_out_of_order_are_noticed(name: str) -> None:
    stack = build(name)
    with pytest.raises(ValueError, match=says("site 2 got a state", "expected")):
        stack[2].read(stack.begin(embedding()))
    with pytest.raises(ValueError, match=says(f"site {DEPTH} got a state", "expected")):
        stack.end(stack.begin(embedding()))


@pytest.mark.parametrize("name", NAMES)
def test_an_embedding_in_place_of_the_state_is_refused(name: str) -> None:
    """A tensor with one row has the length of a state with one tensor: it would lose its first axis silently."""
    stack = build(name)
    for x in (embedding(1, 7), embedding()):
        with pytest.raises((TypeError, ValueError), match=says("site 0 got", "Tensor", "expected the tuple", "begin")):
            stack[0].read(x)  # type: ignore[arg-type]
    with pytest.raises(
        (TypeError, ValueError), match=says(f"site {DEPTH} got", "Tensor", "expected the tuple", "begin")
    ):
        stack.end(embedding())  # type: ignore[arg-type]


DAMAGE = {
    "width": (lambda t: t[..., :-1], ["shape [2, 7, "]),
    "a batch that would broadcast": (lambda t: t[:1], ["shape [1, 7, "]),
    "an axis less": (lambda t: t[0], ["shape [7, "]),
    "dtype": (lambda t: t.double(), ["torch.float64", "torch.float32"]),
    "device": (lambda t: t.to("meta"), ["meta", "cpu"]),
}


@pytest.mark.parametrize(("damage", "parts"), DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", NAMES)
def test_a_state_whose_tensors_do_not_belong_together_is_refused(name: str, damage: Any, parts: list[str]) -> None:
    """Sums over sources broadcast and promote: one stale tensor would spoil all others silently."""
    for options in dm.mechanism(name).variants:
        stack = build(name, **options)
        for mixer, state in zip(stack.all_mixers(), states_of(stack), strict=True):
            for i in range(1, len(state)):
                wrong = (*state[:i], damage(state[i]), *state[i + 1 :])
                derived = i >= stack.spec(mixer.site.index).essential  # a number a token has no width to name
                told = says(f"site {mixer.site.index} got", *([] if derived else parts), "expected")
                with pytest.raises(ValueError, match=told):
                    mixer.read(wrong)


# ---------------------------------------------------------------------------------------------------------------------
# Slices and the whole loop


@pytest.mark.parametrize("bounds", [(-1, 2), (0, DEPTH + 1), (2, 2), (3, 1), (DEPTH, DEPTH + 1)], ids=str)
def test_slice_bounds_outside_the_stack_are_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=says(f"slice{bounds}", f"expected 0 <= lo < hi <= {DEPTH}")):
        build().slice(*bounds)


@pytest.mark.parametrize("bounds", [(0, 3), (1, 5)], ids=str)
def test_a_slice_of_a_slice_stays_within_it(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=says(f"slice{bounds}", "expected 1 <= lo < hi <= 4")):
        build().slice(1, 4).slice(*bounds)


def test_a_slice_without_the_output_refuses_to_end() -> None:
    stack = build()
    with pytest.raises(ValueError, match=says("ends before sublayer 3", f"of {DEPTH}", "call end on the last slice")):
        stack.slice(0, 3).end(states_of(stack)[3])


def test_a_later_slice_refuses_to_begin() -> None:
    with pytest.raises(ValueError, match=says("begins at sublayer 2", "call begin on the slice with sublayer 0")):
        build().slice(2, 4).begin(embedding())


@pytest.mark.parametrize("index", [-1, DEPTH, 99])
def test_a_sublayer_outside_the_stack_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match=says(f"sublayer {index}", f"holds 0 to {DEPTH - 1}")):
        build()[index]
    with pytest.raises(IndexError, match=says("sublayer 1", "holds 2 to 3")):
        build().slice(2, 4)[1]


@pytest.mark.parametrize("index", [-1, DEPTH + 1])
def test_the_spec_of_a_site_that_does_not_exist_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=says(f"index={index}", f"expected 0 to {DEPTH}")):
        build().spec(index)


@pytest.mark.parametrize("count", [0, DEPTH - 1, DEPTH + 1])
def test_the_wrong_number_of_sublayers_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=says(f"got {count} sublayers", f"expected {DEPTH}")):
        build()(embedding(), [torch.tanh] * count)


@pytest.mark.parametrize("sublayers", [nn.Linear(DIM, DIM), torch.tanh, None], ids=["module", "function", "none"])
def test_a_single_callable_in_place_of_a_list_of_sublayers_is_refused(sublayers: Any) -> None:
    with pytest.raises(
        (TypeError, ValueError), match=says("sublayers", type(sublayers).__name__, f"expected a list of {DEPTH}")
    ):
        build()(embedding(), sublayers)


# ---------------------------------------------------------------------------------------------------------------------
# ops


def sources(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, DIM, generator=generator) for _ in range(count)]


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (lambda v: v.double(), ["sources[1]", "dtype torch.float64", "torch.float32", "the same dtype for all"]),
        (lambda v: v.bfloat16(), ["sources[1]", "dtype torch.bfloat16", "torch.float32", "the same dtype for all"]),
        (lambda v: v.long(), ["sources[1]", "dtype torch.int64", "torch.float32", "the same dtype for all"]),
        (lambda v: v[:1], ["sources[1]", "[1, 3, 8]", "[2, 3, 8]", "the same shape for all"]),
        (lambda v: v[..., :1], ["sources[1]", "[2, 3, 1]", "[2, 3, 8]", "the same shape for all"]),
        (lambda v: v[0], ["sources[1]", "[3, 8]", "[2, 3, 8]", "the same shape for all"]),
        (lambda v: v.to("meta"), ["sources[1]", "device meta", "cpu", "the same device for all"]),
    ],
    ids=["fp64", "bf16", "int", "batch", "width", "rank", "device"],
)
def test_attend_refuses_sources_that_differ(spoil: Any, parts: list[str]) -> None:
    first, second, third = sources()
    with pytest.raises(ValueError, match=says(*parts, "convert before the call")):
        dm.ops.attend([first, spoil(second), third], torch.zeros(DIM))


def test_attend_refuses_an_empty_list() -> None:
    with pytest.raises(TypeError, match=says("sources", "an empty list", "expected a list of at least one tensor")):
        dm.ops.attend([], torch.zeros(DIM))


def test_attend_refuses_a_stacked_tensor() -> None:
    with pytest.raises(TypeError, match=says("sources", "a tensor of shape [3, 2, 3, 8]", "expected a list")):
        dm.ops.attend(torch.stack(sources()), torch.zeros(DIM))  # type: ignore[arg-type]


def test_attend_refuses_integer_sources() -> None:
    with pytest.raises(
        TypeError, match=says("sources[0]", "torch.int64", "expected a floating-point dtype", ".float()")
    ):
        dm.ops.attend([v.long() for v in sources()], torch.zeros(DIM))


def test_attend_refuses_sources_without_a_channel_axis() -> None:
    with pytest.raises(ValueError, match=says("sources[0]", "shape []", "expected [..., D]")):
        dm.ops.attend([torch.tensor(1.0)], torch.zeros(1))


@pytest.mark.parametrize("position", [0, 1])
def test_attend_refuses_a_source_that_is_no_tensor(position: int) -> None:
    given: list[Any] = sources()
    given[position] = given[position].tolist()
    with pytest.raises(TypeError, match=says(f"sources[{position}]", "list", "expected a tensor")):
        dm.ops.attend(given, torch.zeros(DIM))


@pytest.mark.parametrize("shape", [(DIM + 1,), (1,), (), (2, DIM - 1), (2, 3, DIM), (DIM, 2)], ids=str)
def test_attend_refuses_a_query_of_another_width_or_rank(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=says(f"query has shape {list(shape)}", "expected [D] or [Q, D]", f"D = {DIM}")
    ):
        dm.ops.attend(sources(), torch.zeros(shape))


@pytest.mark.parametrize("shape", [(DIM + 1,), (1,), (), (1, DIM), (2, DIM)], ids=str)
def test_attend_refuses_a_key_weight_that_does_not_fit_one_query(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=says(f"key_weight has shape {list(shape)}", f"expected [{DIM}]")):
        dm.ops.attend(sources(), torch.zeros(DIM), torch.ones(shape))


@pytest.mark.parametrize("shape", [(DIM - 1,), (1,), (), (1, DIM), (3, DIM), (2, 1), (1, 2, DIM)], ids=str)
def test_attend_refuses_a_key_weight_that_does_not_fit_its_queries(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=says(f"key_weight has shape {list(shape)}", "expected")):
        dm.ops.attend(sources(), torch.zeros(2, DIM), torch.ones(shape))


def test_attend_refuses_a_query_or_key_weight_on_another_device() -> None:
    away = torch.ones(DIM, device="meta")
    with pytest.raises(ValueError, match=says("query", "meta", "cpu", "expected")):
        dm.ops.attend(sources(), away)
    with pytest.raises(ValueError, match=says("key_weight", "meta", "cpu", "expected")):
        dm.ops.attend(sources(), torch.ones(DIM), away)


def test_attend_refuses_a_query_or_key_weight_that_is_no_tensor() -> None:
    numbers: Any = [1.0] * DIM
    with pytest.raises(TypeError, match=says("query", "list", "expected a tensor")):
        dm.ops.attend(sources(), numbers)
    with pytest.raises(TypeError, match=says("key_weight", "list", "expected a tensor")):
        dm.ops.attend(sources(), torch.ones(DIM), numbers)


def test_attend_refuses_an_integer_query_or_key_weight() -> None:
    whole = torch.ones(DIM, dtype=torch.long)
    with pytest.raises(TypeError, match=says("query", "torch.int64", "expected a floating-point dtype")):
        dm.ops.attend(sources(), whole)
    with pytest.raises(TypeError, match=says("key_weight", "torch.int64", "expected a floating-point dtype")):
        dm.ops.attend(sources(), torch.ones(DIM), whole)


@pytest.mark.parametrize("eps", [0, 0.0, -1e-6, NAN, INF])
def test_attend_refuses_an_eps_that_is_not_finite_and_positive(eps: float) -> None:
    with pytest.raises(ValueError, match=says(f"eps={eps}", "expected a finite number above 0", "1e-6")):
        dm.ops.attend(sources(), torch.zeros(DIM), eps=eps)


@pytest.mark.parametrize("scale", [NAN, INF, -INF])
def test_attend_refuses_a_scale_that_is_not_finite(scale: float) -> None:
    with pytest.raises(ValueError, match=says(f"scale={scale}", "expected a finite number", "1.0")):
        dm.ops.attend(sources(), torch.zeros(DIM), scale=scale)


@pytest.mark.parametrize("which", ["lse1", "lse2"])
@pytest.mark.parametrize("shape", [(), (1, 3), (3,), (2, 3, 1), (2, 1)], ids=str)
def test_merge_refuses_a_log_sum_exp_of_another_shape(which: str, shape: tuple[int, ...]) -> None:
    h1, h2 = sources(2)
    lse = {"lse1": torch.zeros(2, 3), "lse2": torch.zeros(2, 3), which: torch.zeros(shape)}
    with pytest.raises(ValueError, match=says(f"{which} has shape {list(shape)}", "expected [2, 3]")):
        dm.ops.merge(h1, lse["lse1"], h2, lse["lse2"])


@pytest.mark.parametrize("which", ["lse1", "lse2"])
@pytest.mark.parametrize(
    ("lse", "parts"),
    [
        (torch.zeros(2, 3, dtype=torch.long), ["torch.int64", "expected a floating-point dtype"]),
        (torch.zeros(2, 3, device="meta"), ["meta", "cpu", "expected"]),
    ],
    ids=["int", "device"],
)
def test_merge_refuses_a_log_sum_exp_of_another_dtype_or_device(which: str, lse: Tensor, parts: list[str]) -> None:
    h1, h2 = sources(2)
    both = {"lse1": torch.zeros(2, 3), "lse2": torch.zeros(2, 3), which: lse}
    with pytest.raises((TypeError, ValueError), match=says(which, *parts)):
        dm.ops.merge(h1, both["lse1"], h2, both["lse2"])


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (lambda v: v[:1], ["[1, 3, 8]", "[2, 3, 8]"]),
        (lambda v: v.double(), ["torch.float64", "torch.float32"]),
        (lambda v: v.to("meta"), ["meta", "cpu"]),
    ],
    ids=["shape", "dtype", "device"],
)
def test_merge_refuses_values_that_differ(spoil: Any, parts: list[str]) -> None:
    h1, h2 = sources(2)
    with pytest.raises(ValueError, match=says("h2", *parts, "expected")):
        dm.ops.merge(h1, torch.zeros(2, 3), spoil(h2), torch.zeros(2, 3))


# ---------------------------------------------------------------------------------------------------------------------
# The structure of M

RANKS = pytest.mark.parametrize("measure", [dm.semiseparable_rank, dm.effective_rank], ids=lambda f: f.__name__)


@RANKS
@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (2, 4, 3)], ids=str)
def test_the_rank_of_what_is_not_square_is_refused(measure: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=says(f"shape {list(shape)}", "expected [..., n, n]")):
        measure(torch.zeros(shape))


@RANKS
@pytest.mark.parametrize("size", [1.0, 1e-30])
def test_the_rank_of_what_is_not_lower_triangular_is_refused(measure: Any, size: float) -> None:
    M = torch.ones(2, 4, 4).tril()
    M[1, 0, 3] = size
    with pytest.raises(ValueError, match=says("above its diagonal", "expected a lower-triangular matrix")):
        measure(M)


@RANKS
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.complex64])
def test_the_rank_of_what_is_not_floating_is_refused(measure: Any, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=says(f"M has dtype {dtype}", "expected a floating-point dtype", ".double()")):
        measure(torch.ones(4, 4, dtype=dtype).tril())


@RANKS
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [(3, 0), (0, 3)], ids=str)
def test_the_rank_of_what_is_not_finite_is_refused(measure: Any, value: float, place: tuple[int, int]) -> None:
    M = torch.ones(4, 4).tril()
    M[place] = value
    with pytest.raises(ValueError, match=says("not finite", "expected finite numbers", "overflow")):
        measure(M)


@pytest.mark.parametrize("tol", [NAN, INF, -1e-6, 1.0])
def test_a_tolerance_that_is_no_share_is_refused(tol: float) -> None:
    """NaN would count no singular value at all, a negative one every one of them."""
    with pytest.raises(ValueError, match=says(f"tol={tol}", "expected", "1e-6")):
        dm.semiseparable_rank(torch.ones(4, 4).tril(), tol=tol)


def test_sinks_of_integers_are_refused() -> None:
    with pytest.raises(TypeError, match=says("M has dtype torch.int64", "expected a floating-point dtype")):
        dm.sinks(torch.ones(4, 4, dtype=torch.long).tril())


# ---------------------------------------------------------------------------------------------------------------------
# Traces


class Net(nn.Module):
    """Runs the protocol through the sites it is told to visit, right or wrong."""

    def __init__(self, stack: dm.DepthStack, visits: Sequence[int], *, end: bool = True) -> None:
        super().__init__()
        self.depth, self.visits, self.ends = stack, visits, end

    def forward(self, x: Tensor) -> Any:
        state = self.depth.begin(x)
        for index in self.visits:
            state = self.depth[index].step(state, torch.tanh)
        return self.depth.end(state) if self.ends else state


def patched(stack: dm.DepthStack) -> list[str]:
    """Methods that a trace left replaced."""
    modules = [stack, *stack.all_mixers()]
    return [name for module in modules for name in ("begin", "read", "write", "end") if name in vars(module)]


def test_a_trace_of_a_model_without_a_stack_is_refused() -> None:
    with pytest.raises(ValueError, match=says("Linear contains 0 DepthStacks", "expected exactly one")):
        dm.trace(nn.Linear(DIM, DIM), embedding())


def test_a_trace_of_a_model_with_two_stacks_is_refused_and_names_them() -> None:
    model = nn.ModuleDict({"encoder": build(), "decoder": build()})
    with pytest.raises(ValueError, match=says("ModuleDict contains 2 DepthStacks (encoder, decoder)", "exactly one")):
        dm.trace(model, embedding())


def test_a_trace_of_a_bare_stack_needs_sublayers() -> None:
    stack = build()
    with pytest.raises(ValueError, match=says("no sublayers", "expected trace(stack, x, sublayers)")):
        dm.trace(stack, embedding())
    assert patched(stack) == []


def test_sublayers_given_with_a_whole_model_are_refused() -> None:
    """The model has its own; these would be ignored."""
    model = Net(build(), range(DEPTH))
    with pytest.raises(ValueError, match=says("sublayers", "Net", "expected", "bare DepthStack")):
        dm.trace(model, embedding(), [torch.tanh] * DEPTH)


@pytest.mark.parametrize("model", [torch.tanh, "attnres", None], ids=["function", "name", "none"])
def test_a_trace_of_what_is_no_module_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=says(type(model).__name__, "expected", "nn.Module")):
        dm.trace(model, embedding())


@EVERY_CASE
def test_a_trace_of_a_model_that_reads_a_site_twice_is_refused(name: str, options: dict[str, Any]) -> None:
    stack = build(name, **options)
    with pytest.raises(ValueError, match=says("site 1 was read twice", "a mixer for each execution")):
        dm.trace(Net(stack, [0, 1, 1, 2, 3, 4]), embedding())
    assert patched(stack) == []


@EVERY_CASE
def test_a_trace_of_a_model_that_skips_a_site_is_refused(name: str, options: dict[str, Any]) -> None:
    """Either the next site notices the state of another one, or the trace misses the row."""
    stack = build(name, **options)
    for skipped in range(DEPTH):
        visits = [i for i in range(DEPTH) if i != skipped]
        with pytest.raises(ValueError, match=r"sites? \[?\d.*expected"):
            dm.trace(Net(stack, visits), embedding())
        assert patched(stack) == []


@EVERY_CASE
def test_a_trace_of_a_model_that_visits_sites_in_the_wrong_order_is_refused(name: str, options: dict[str, Any]) -> None:
    """Where the states of these sites look alike a plain run cannot notice it, but M would be that of another model."""
    stack = build(name, **options)
    with pytest.raises(ValueError, match=says("site 2", "expected")):
        dm.trace(Net(stack, [0, 2, 1, 3, 4]), embedding())
    assert patched(stack) == []


def test_a_trace_of_a_model_without_its_output_row_is_refused() -> None:
    with pytest.raises(ValueError, match=says(f"sites [{DEPTH}] of residual", "not read", "expected a forward pass")):
        dm.trace(Net(build("residual"), range(DEPTH), end=False), embedding())


class Careless(nn.Module):
    """A model with one slip in its loop."""

    def __init__(self, stack: dm.DepthStack, slip: str) -> None:
        super().__init__()
        self.depth, self.slip = stack, slip

    def forward(self, x: Tensor) -> Tensor:
        state = self.depth[0].begin(x) if self.slip == "begins at the mixer" else self.depth.begin(x)
        if self.slip == "begins twice":
            self.depth.begin(2 * x)
        for mixer in self.depth:
            h, carry = mixer.read(state)
            if mixer.site.index == 2 and self.slip == "does not write":
                continue
            state = mixer.write(state, carry, torch.tanh(h))
            if mixer.site.index == 2 and self.slip == "writes twice":
                state = mixer.write(state, carry, torch.tanh(h))
        return self.depth.end(state)


@pytest.mark.parametrize(
    ("slip", "parts"),
    [
        ("does not write", ["2", "not written", "expected"]),
        ("writes twice", ["site 2", "written twice"]),
        ("begins twice", ["begin", "twice"]),
        ("begins at the mixer", ["begin", "not called", "expected"]),
    ],
)
def test_a_trace_of_a_careless_model_says_what_is_wrong(slip: str, parts: list[str]) -> None:
    """All of them pass for the residual stream, whose states all look alike; M would be wrong."""
    stack = build("residual")
    with pytest.raises(ValueError, match=says(*parts)):
        dm.trace(Careless(stack, slip), embedding())
    assert patched(stack) == []


def test_a_trace_that_fails_inside_a_sublayer_leaves_the_stack_as_it_was() -> None:
    def broken(h: Tensor) -> Tensor:
        raise RuntimeError("broken on purpose")

    stack = build()
    with pytest.raises(RuntimeError, match="broken on purpose"):
        dm.trace(stack, embedding(), [torch.tanh, broken, *[torch.tanh] * 3])
    assert patched(stack) == []


@pytest.mark.parametrize("part", [(0, 3), (2, 5)], ids=str)
def test_a_trace_of_a_slice_is_refused(part: tuple[int, int]) -> None:
    stack = build().slice(*part)
    with pytest.raises(ValueError, match=r"this slice (ends before|begins at) sublayer \d.*call (end|begin) on the"):
        dm.trace(stack, embedding(), [torch.tanh] * len(stack))


def test_a_trace_checks_what_sublayers_return_as_a_plain_run_does() -> None:
    with pytest.raises(ValueError, match=says("sublayer 0 returned", [2, 7, 1], "expected", SHAPE)):
        dm.trace(build("residual"), embedding(), [lambda h: h[..., :1]] * DEPTH)


@pytest.mark.parametrize("channels", [[DIM], [0, -DIM - 1], [0.5]], ids=str)
def test_channels_that_do_not_exist_are_refused(channels: list[int]) -> None:
    with pytest.raises((ValueError, IndexError), match=says("channels", channels, "expected", DIM)):
        dm.trace(build("highway", gate="channel"), embedding(), [torch.tanh] * DEPTH, channels=channels)


def test_contributions_of_a_trace_with_a_few_channels_are_refused() -> None:
    traced = dm.trace(build("highway", gate="channel"), embedding(), [torch.tanh] * DEPTH, channels=[0, 3])
    with pytest.raises(ValueError, match=says("only some channels", "trace without `channels`")):
        traced.contributions(1)


def test_the_rank_of_an_operator_valued_mechanism_is_refused() -> None:
    traced = dm.trace(build("ddl"), embedding(), [torch.tanh] * DEPTH)
    with pytest.raises(ValueError, match=says("ddl is operator-valued", "no rank")):
        traced.rank()


def test_a_tolerance_of_zero_is_taken_as_it_is() -> None:
    """Zero is a number, not the default: every singular value that is not exactly zero counts."""
    traced = dm.trace(build("residual"), embedding(1, 1), [torch.tanh] * DEPTH)
    M = traced.M.clone()
    M[..., 1, 1] += 1e-6
    nearly = dataclasses.replace(traced, M=M)
    assert int(nearly.rank()) == 1
    assert int(nearly.rank(tol=0.0)) == int(dm.semiseparable_rank(M, tol=0.0)) > 1


# ---------------------------------------------------------------------------------------------------------------------
# Files


def make_trace(name: str = "attnres") -> dm.Trace:
    return dm.trace(build(name), embedding(), [torch.tanh] * DEPTH)


def listing(folder: Any) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_loading_a_missing_trace_names_the_file(tmp_path: Any) -> None:
    path = tmp_path / "missing.safetensors"
    with pytest.raises(FileNotFoundError, match=says(path, "expected a file that Trace.save wrote")):
        dm.Trace.load(path)
    with pytest.raises(FileNotFoundError, match=says(tmp_path, "expected a file that Trace.save wrote")):
        dm.Trace.load(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1000, -1])
def test_loading_a_truncated_trace_says_that_it_is_damaged(tmp_path: Any, kept: int) -> None:
    path = tmp_path / "trace.safetensors"
    make_trace().save(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=says(path, "damaged or not a safetensors file", "Save the trace again")):
        dm.Trace.load(path)


@pytest.mark.parametrize(
    "content",
    [b"layer,weight\n0,1.0\n", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), b"\xff" * 64, b"{}", bytes(64)],
    ids=["text", "picture", "ones", "json", "zeros"],
)
def test_loading_a_foreign_file_says_that_it_is_none(tmp_path: Any, content: bytes) -> None:
    path = tmp_path / "notes.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=says(path, "damaged or not a safetensors file")):
        dm.Trace.load(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}], ids=["none", "format"])
def test_loading_a_safetensors_file_that_is_no_trace_says_so(tmp_path: Any, metadata: Any) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2, 2)}, path, metadata)
    with pytest.raises(ValueError, match=says(path, "not a trace", "expected one that Trace.save wrote")):
        dm.Trace.load(path)


def about_of(trace_path: Any) -> dict[str, Any]:
    with safe_open(trace_path, "pt") as file:
        return dict(json.loads(file.metadata()["depthmix.trace"]))


@pytest.mark.parametrize(
    ("spoil_tensors", "spoil_about"),
    [
        (lambda t: {k: v for k, v in t.items() if k != "M"}, json.dumps),
        (lambda t: {**t, "N": torch.ones(1)}, json.dumps),
        (lambda t: t, lambda about: json.dumps(about)[:-5]),
        (lambda t: t, lambda about: json.dumps([about])),
        (lambda t: t, lambda about: json.dumps({k: v for k, v in about.items() if k != "kind"})),
        (lambda t: t, lambda about: json.dumps({**about, "later": 1})),
        (lambda t: t, lambda about: json.dumps({**about, "kind": "tensor"})),
    ],
    ids=["M missing", "tensor too many", "cut metadata", "list", "kind missing", "field too many", "unknown kind"],
)
def test_loading_a_trace_with_other_contents_names_the_file(
    tmp_path: Any, spoil_tensors: Any, spoil_about: Any
) -> None:
    path = tmp_path / "trace.safetensors"
    traced = make_trace()
    traced.save(path)
    tensors = {part: getattr(traced, part).contiguous() for part in ("M", "sources", "inputs")}
    save_file(spoil_tensors(tensors), path, {"depthmix.trace": spoil_about(about_of(path))})
    with pytest.raises(ValueError, match=says(path, "expected", "Trace.save")):
        dm.Trace.load(path)


def test_a_trace_survives_the_file_unchanged(tmp_path: Any) -> None:
    """The other tests of files prove little if the right file were refused too."""
    for name in ("attnres", "ddl", "mrla"):
        traced, path = make_trace(name), tmp_path / "new" / f"{name}.safetensors"
        traced.save(path)
        loaded = dm.Trace.load(str(path))
        for part in ("M", "sources", "inputs", "parts"):
            ours, theirs = getattr(traced, part), getattr(loaded, part)
            assert (ours is None and theirs is None) or torch.equal(ours, theirs)
        assert (loaded.kind, loaded.mechanism, loaded.options) == (traced.kind, traced.mechanism, traced.options)
    assert listing(tmp_path / "new") == ["attnres.safetensors", "ddl.safetensors", "mrla.safetensors"]


def test_saving_onto_a_directory_fails_and_leaves_nothing_behind(tmp_path: Any) -> None:
    target = tmp_path / "traces"
    target.mkdir()
    (target / "kept.txt").write_text("kept")
    with pytest.raises(OSError, match=says(target)):
        make_trace().save(target)
    assert listing(tmp_path) == ["traces", "traces/kept.txt"]


def test_saving_below_a_file_fails_and_leaves_the_file_alone(tmp_path: Any) -> None:
    (tmp_path / "notes").write_text("kept")
    with pytest.raises(OSError, match=says(tmp_path / "notes")):
        make_trace().save(tmp_path / "notes" / "trace.safetensors")
    assert listing(tmp_path) == ["notes"]
    assert (tmp_path / "notes").read_text() == "kept"


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """While open, a file cannot grow beyond `size` bytes: what a full disk does, without filling one."""
    resource = pytest.importorskip("resource", reason="limits of file sizes need a Unix")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", ["full disk", "unfit options"])
def test_an_earlier_trace_survives_when_saving_another_fails(tmp_path: Any, name: str) -> None:
    path = tmp_path / "trace.safetensors"
    make_trace("residual").save(path)
    before = path.read_bytes()
    if name == "full disk":
        with pytest.raises(Exception, match=r"(?i)too large|errno 27|code: 27"), largest_file(512):
            make_trace().save(path)
    else:
        unfit = dataclasses.replace(make_trace(), options={"callback": torch.tanh})
        with pytest.raises((TypeError, ValueError), match=r"(?i)json|serializable"):
            unfit.save(path)
    assert path.read_bytes() == before
    assert listing(tmp_path) == ["trace.safetensors"]
    assert dm.Trace.load(path).mechanism == "residual"


def test_who_reads_an_older_trace_is_not_disturbed_by_a_new_one(tmp_path: Any) -> None:
    """The new file takes the place of the old one whole; it is never written over it."""
    path = tmp_path / "trace.safetensors"
    make_trace("residual").save(path)
    before = path.read_bytes()
    with path.open("rb") as file:
        make_trace().save(path)
        assert file.read() == before
    assert dm.Trace.load(path).mechanism == "attnres"


def test_a_failed_save_makes_no_folders(tmp_path: Any) -> None:
    unfit = dataclasses.replace(make_trace(), options={"callback": torch.tanh})
    with pytest.raises((TypeError, ValueError), match=r"(?i)json|serializable"):
        unfit.save(tmp_path / "a" / "b" / "trace.safetensors")
    assert listing(tmp_path) == []


def test_saving_replaces_an_older_trace_and_follows_no_leftovers(tmp_path: Any) -> None:
    path = tmp_path / "trace.safetensors"
    leftover = tmp_path / f"trace.safetensors.{os.getpid()}.part"
    leftover.write_bytes(b"from a run that was killed")
    make_trace("residual").save(path)
    make_trace("attnres").save(path)
    assert dm.Trace.load(path).mechanism == "attnres"
    assert listing(tmp_path) == ["trace.safetensors"]
