"""How many functions of depthmix does one operation pass through, and how long is the longest chain of calls?

    python -m tools.path_lengths COMMIT…     # commits or checkouts; by default this checkout

Four operations are run and a profiler sees every call: a step of training; the read of Block AttnRes that opens a block
(eager, with gradients); a whole `depthmix train`; `depthmix compare` without its runs, which are other processes.
For each: distinct functions, the longest chain of depthmix's functions inside each other (those of torch in between are
left out, recursion counts once), and the calls from a floor to one above it: callbacks, since no import goes there.
Lambdas, comprehensions and module bodies are no functions here.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from tools.checkouts import ROOT, start, unpack
from tools.import_graph import TOP
from tools.same_results import write_text

DRIVER = (
    "import sys; sys.path.append({root!r}); from tools.path_lengths import measure; measure({floors!r}, {source!r})"
)
COMPARE = (
    *("compare", "--mixers", "residual", "block_attnres", "--seeds", "1", "--depth", "4", "--dim", "64"),
    *("--data", "text", "--set", "run.steps=4", "--set", "data.rows=2", "--set", "data.tokens_per_row=16"),
)
TRAIN = (
    *("train", "--mixer", "block_attnres", "--depth", "12", "--dim", "64", "--data", "text", "--steps", "4"),
    *("--set", "data.rows=2", "--set", "data.tokens_per_row=16", "--folder", "run"),
)


class Calls:
    """What was called while this was the profiler."""

    def __init__(self, source: str, floors: list[str]) -> None:
        self.source, self.floors = source, floors
        self.functions: set[str] = set()
        self.chain: list[str] = []
        self.upward: set[str] = set()

    def name(self, frame: FrameType) -> str | None:
        """folder/file.py:function, or None where the frame is no function of depthmix."""
        code = frame.f_code
        if not code.co_filename.startswith(self.source) or code.co_name.startswith("<"):
            return None
        return f"{code.co_filename[len(self.source) + 1 :]}:{getattr(code, 'co_qualname', code.co_name)}"

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (name := self.name(frame)) is None:
            return
        chain: list[str] = [name]
        outer = frame.f_back
        while outer is not None:
            caller = self.name(outer)
            if caller is not None and caller != chain[-1]:
                chain.append(caller)
            outer = outer.f_back
        self.functions.add(name)
        if len(chain) > len(self.chain):
            self.chain = chain
        if len(chain) > 1 and self.height(chain[1]) < self.height(name):
            self.upward.add(f"{chain[1]} → {name}")

    def height(self, name: str) -> int:
        file = name.split(":")[0]
        return self.floors.index(file.split("/")[0]) if "/" in file else len(self.floors)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def found(self, skip: int = 0) -> dict[str, Any]:
        """`skip`: functions that only led to the operation, at the beginning of the chain."""
        chain = self.chain[::-1][skip:]
        return {"functions": len(self.functions), "chain": chain, "upward": sorted(self.upward)}


def run_step(new: Callable[[], Calls]) -> dict[str, Any]:
    """The third step of a run: nothing is imported or made for the first time."""
    from depthmix.training import loop

    inner, calls, count = loop.step, new(), 0

    def step(run: Any) -> None:
        nonlocal count
        count += 1
        with calls.watching() if count == 3 else contextlib.nullcontext():
            inner(run)

    loop.step = step
    try:
        run_quietly(TRAIN)
    finally:
        loop.step = inner
    first = next(k for k, name in enumerate(calls.chain[::-1]) if name.endswith("loop.py:step"))
    return calls.found(skip=first)


def run_read(new: Callable[[], Calls]) -> dict[str, Any]:
    """The read of the first site of the third block, so that there is something to share among its readers."""
    import torch

    import depthmix

    stack = depthmix.DepthStack("block_attnres", dim=64, depth=12, block_sublayers=4)
    for repeat in range(2):  # the first time makes what is kept
        state = stack.begin(torch.randn(2, 8, 64, requires_grad=True))
        for k, mixer in enumerate(stack):
            calls = new()
            with calls.watching():
                h, carry = mixer.read(state)
            if repeat and k == 8:
                return calls.found()
            state = mixer.write(state, carry, torch.tanh(h))
    raise AssertionError


def run_command(new: Callable[[], Calls], args: tuple[str, ...]) -> dict[str, Any]:
    calls = new()
    with calls.watching():
        run_quietly(args)
    return calls.found()


def run_quietly(args: tuple[str, ...]) -> None:
    from depthmix.cli import main

    words = io.StringIO()
    with contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
        code = main([*args])
    if code:
        sys.exit(words.getvalue())


OPERATIONS: dict[str, Callable[[Callable[[], Calls]], dict[str, Any]]] = {
    "one training step": run_step,
    "one block read": run_read,
    "train": lambda new: run_command(new, (*TRAIN, "--restart")),
    "compare": lambda new: run_command(new, COMPARE),
}


def measure(floors: list[str], source: str) -> None:
    """In a process with the sources of a commit."""
    import depthmix

    assert str(Path(depthmix.__file__).parent) == source, depthmix.__file__
    print(json.dumps({name: run(lambda: Calls(source, floors)) for name, run in OPERATIONS.items()}))


def floors_of(checkout: Path) -> list[str]:
    """The order that a commit itself holds to, as it is written down there."""
    for file in (checkout / "tools" / "import_graph.py", checkout / "tests" / "test_house.py"):
        for node in ast.parse(file.read_text()).body if file.is_file() else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
                floors = eval(compile(ast.Expression(node.value), str(file), "eval"), {"TOP": TOP})
                return [floor for floor in floors if floor != TOP]
    raise SystemExit(f"{checkout} does not say in which order its floors stand")


def measured(commit: str, folder: Path) -> dict[str, Any]:
    checkout = unpack(commit, folder / "source")
    write_text(folder / "text")
    script = DRIVER.format(root=str(ROOT), floors=floors_of(checkout), source=str(checkout / "src" / "depthmix"))
    process = start(checkout, script, folder, threads=1)
    answer, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{commit}: the operations could not be run; the message stands above")
    return json.loads(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*", default=[str(ROOT)], help="commits or checkouts")
    parser.add_argument("--chains", action="store_true", help="print the longest chains and the upward calls too")
    args = parser.parse_args()
    rows, details = [], []
    for commit in args.commits:
        with tempfile.TemporaryDirectory() as folder:
            for name, found in measured(commit, Path(folder)).items():
                size = f"{found['functions']} | {len(found['chain'])} | {len(found['upward'])}"
                rows.append(f"| {name} | {commit} | {size} |")
                details += [f"\n{name}, {commit}", *found["chain"], *(f"upward: {edge}" for edge in found["upward"])]
    print("| operation | commit | functions | longest chain | upward calls |\n|---|---|---:|---:|---:|")
    print("\n".join([*sorted(rows), *(details if args.chains else ())]))


if __name__ == "__main__":
    main()
