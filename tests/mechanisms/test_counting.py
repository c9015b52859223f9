"""A network runs all of its sublayers: every way to run a stack that is shown anywhere refuses a wrong count."""

from __future__ import annotations

import copy
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import depthmix as dm
from depthmix.mechanisms import base
from tests.cases import EVERY_MECHANISM

ROOT = Path(__file__).parents[2]
DIM, DEPTH = 8, 12
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")),
         *sorted((ROOT / "docs" / "mechanisms").glob("*.md"))]  # fmt: skip
SCRIPTS = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "src").rglob("*.py"))]
WRONG = pytest.mark.parametrize("count", [2 * DEPTH, DEPTH // 2, 0])


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


def loop_of_the_protocol() -> str:
    """The loop in the docstring of `base`."""
    return textwrap.dedent(re.search(r"::\n\n(.*?\n)\n", inspect.getdoc(base) or "", re.S)[1])  # type: ignore[index]


def make_sublayers(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, DIM)) for _ in range(count)).double()


def make_stack(name: str, depth: int = DEPTH, **options: Any) -> dm.DepthStack:
    stack = dm.DepthStack(name, dim=DIM, depth=depth, **options).double()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return stack


def snippet(code: str) -> Callable[[dm.DepthStack, nn.ModuleList, Tensor], Tensor]:
    def run(depth: dm.DepthStack, sublayers: nn.ModuleList, x: Tensor) -> Tensor:
        scope: dict[str, Any] = {"depth": depth, "stack": depth, "sublayers": sublayers, "x": x}
        exec(compile(code, "shown", "exec"), scope)
        return scope["h"]

    return run


def shown_ways() -> dict[str, Callable[[dm.DepthStack, nn.ModuleList, Tensor], Tensor]]:
    """All of them, found where they are shown: a new one is taken up by itself."""
    ways = {"the docstring of the protocol": snippet(loop_of_the_protocol())}
    readme = "".join(blocks(ROOT / "README.md"))
    for call in re.findall(r"^y = (depth\(.*), sublayers\)$", readme, re.M):
        ways["README, the call"] = snippet(f"h = {call.partition('(')[0]}(x, sublayers)")
    for function in re.findall(r"^def forward\(x\):\n(?:    .*\n)+", readme, re.M):
        ways["README, the loop"] = snippet(f"{function}h = forward(x)")
    for page in PAGES:
        for i, block in enumerate(blocks(page)):
            if "sublayers" in block and re.search(r"^h = ", block, re.M):
                ways[f"{page.name}, block {i}"] = snippet(block)
    return ways


def test_the_shown_ways_are_found() -> None:
    assert {"README, the call", "README, the loop", "the docstring of the protocol"} <= set(shown_ways())
    assert sum(name.startswith("protocol.md") for name in shown_ways()) == 4
    assert "y = depth(torch.randn(2, 16, 64), sublayers)" in blocks(ROOT / "README.md")[0], (
        "the checked call comes first"
    )


@pytest.mark.parametrize("way", shown_ways())
def test_a_shown_way_runs_the_whole_network(way: str) -> None:
    stack, sublayers, x = make_stack("residual"), make_sublayers(DEPTH), torch.randn(3, DIM, dtype=torch.float64)
    want = x
    for sublayer in sublayers:
        want = want + sublayer(want)
    assert torch.equal(shown_ways()[way](stack, sublayers, x), want)


@pytest.mark.parametrize("way", shown_ways())
@WRONG
@pytest.mark.parametrize("name", ["residual", "mhc", "block_attnres"])
def test_no_shown_way_to_run_a_stack_drops_sublayers_or_mixers(way: str, count: int, name: str) -> None:
    x = torch.randn(3, DIM, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"got \d+ sublayers for \d+ mixers"):
        shown_ways()[way](make_stack(name), make_sublayers(count), x)


def test_no_page_example_or_docstring_shows_an_unchecked_zip() -> None:
    for file in [*PAGES, *SCRIPTS]:
        code = "".join(blocks(file)) if file.suffix == ".md" else file.read_text()
        for line in code.splitlines():
            if re.search(r"\bzip\(.*(sublayers|depth|stack)", line):
                assert "strict=True" in line, f"{file.name}: {line.strip()}"


@WRONG
def test_the_error_names_both_numbers_and_what_to_do(count: int) -> None:
    with pytest.raises(
        ValueError,
        match=rf"got {count} sublayers for 12 mixers; expected 12 sublayers.*depth is the number of sublayers",
    ):
        make_stack("residual").pairs(make_sublayers(count))
    with pytest.raises(ValueError, match=rf"got {count} sublayers for 12 mixers"):
        make_stack("residual").bind(make_sublayers(count))


@pytest.mark.parametrize("name", ["attnres", "block_attnres", "denseformer"])
def test_where_the_state_grows_its_end_is_refused_before_all_are_written(name: str) -> None:
    stack = make_stack(name)
    state = stack.begin(torch.randn(3, DIM, dtype=torch.float64))
    for mixer in list(stack)[: DEPTH // 2]:
        state = mixer.step(state, torch.tanh)
    with pytest.raises(ValueError, match=r"site 12 got a state of \d+ tensors; expected \d+"):
        stack.end(state)


def test_pairs_are_the_mixers_with_their_sublayers_in_a_slice_too() -> None:
    stack, sublayers = make_stack("block_attnres"), make_sublayers(DEPTH)
    pairs = stack.pairs(sublayers)
    assert [m.site.index for m, _ in pairs] == list(range(DEPTH))
    assert all(a is b for (_, a), b in zip(pairs, sublayers, strict=True))
    part = stack.slice(4, 7)
    assert [m.site.index for m, _ in part.pairs(sublayers[4:7])] == [4, 5, 6]
    with pytest.raises(ValueError, match=r"got 12 sublayers for 3 mixers; expected 3 sublayers of this slice, 4 to 6"):
        part.pairs(sublayers)
    with pytest.raises(TypeError, match="sublayers is a generator; expected a list of 12 sublayers"):
        stack.pairs(f for f in sublayers)  # type: ignore[arg-type]


class Loop(nn.Module):
    def __init__(self, depth: dm.DepthStack, sublayers: nn.ModuleList) -> None:
        super().__init__()
        self.depth, self.sublayers = depth, sublayers

    def forward(self, x: Tensor) -> Tensor:
        state = self.depth.begin(x)
        for mixer, sublayer in self.depth.pairs(self.sublayers):
            h, carry = mixer.read(state)
            state = mixer.write(state, carry, sublayer(h))
        return self.depth.end(state)


def run(model: nn.Module, x: Tensor, owner: nn.Module | None = None) -> list[Tensor]:
    out = model(x)
    return [out, *torch.autograd.grad(out.square().sum(), list((owner or model).parameters()))]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@EVERY_MECHANISM
def test_a_bound_stack_is_the_loop(name: str, options: dict[str, Any]) -> None:
    stack, sublayers = make_stack(name, 5, **options), make_sublayers(5)
    x = torch.randn(2, 3, DIM, dtype=torch.float64)
    loop, bound = Loop(stack, sublayers), stack.bind(sublayers)
    want = run(loop, x)
    assert same(run(bound, x), want)
    assert bound.depth is stack
    assert bound.sublayers is sublayers
    assert list(bound.state_dict()) == list(loop.state_dict())  # every parameter once
    assert [key for key, _ in bound.named_parameters()] == [key for key, _ in loop.named_parameters()]
    twin = copy.deepcopy(bound)
    assert same(run(twin, x), want)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert same(run(bound, x), want), "a copy shares nothing"
    twin.load_state_dict(loop.state_dict())
    assert same(run(twin, x), want)
    with torch.no_grad():
        assert torch.equal(dm.trace(bound, x).M, dm.trace(stack, x, sublayers).M)


@pytest.mark.parametrize("name", ["residual", "block_attnres"])
@pytest.mark.parametrize("kind", ["bound", "loop", "slices"])
def test_bound_stacks_and_pairs_compile_to_one_graph(name: str, kind: str) -> None:
    torch._dynamo.reset()
    stack, sublayers = make_stack(name, 5), make_sublayers(5)
    x = torch.randn(2, 3, DIM, dtype=torch.float64)

    class Stages(Loop):
        def __init__(self) -> None:
            super().__init__(stack, sublayers)
            self.first, self.second = stack.slice(0, 2), stack.slice(2, 5)

        def forward(self, x: Tensor) -> Tensor:
            state = self.first.begin(x)
            for mixer, sublayer in self.first.pairs(self.sublayers[:2]):
                state = mixer.step(state, sublayer)
            for mixer, sublayer in self.second.pairs(self.sublayers[2:]):
                state = mixer.step(state, sublayer)
            return self.second.end(state)

    models = {"bound": lambda: stack.bind(sublayers), "loop": lambda: Loop(stack, sublayers), "slices": Stages}
    model = models[kind]()
    whole = Loop(stack, sublayers)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for a, b in zip(run(compiled, x, whole), run(whole, x), strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max().clamp(min=1)
    model.sublayers = sublayers[:3]
    with pytest.raises((ValueError, torch._dynamo.exc.TorchDynamoException)):
        torch.compile(model, fullgraph=True, backend="eager")(x)


def test_a_bound_stack_takes_lists_of_modules_and_nothing_else() -> None:
    stack = make_stack("residual", 3)
    bound = stack.bind([nn.Linear(DIM, DIM), nn.Identity(), nn.Tanh()])
    assert list(bound.state_dict())[-2:] == ["sublayers.0.weight", "sublayers.0.bias"]
    assert [*stack.bind(nn.Sequential(*bound.sublayers)).sublayers] == [*bound.sublayers]
    with pytest.raises(TypeError, match=r"sublayer 1 is a builtin.*; expected an nn.Module.*accepts any callable"):
        stack.bind([nn.Identity(), torch.tanh, nn.Identity()])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"slice, sublayers 0 to 1 of 3; expected the whole stack.*pairs"):
        stack.slice(0, 2).bind(bound.sublayers[:2])
    bound.sublayers.append(nn.Identity())
    with pytest.raises(ValueError, match="got 4 sublayers for 3 mixers"):
        bound(torch.randn(2, DIM, dtype=torch.float64))
