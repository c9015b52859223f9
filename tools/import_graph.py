"""Who imports whom: the floors of depthmix, read from its source. tests/test_house.py holds three rules.

- A floor imports only from itself and from floors below it; the package's own `__init__` stands on top.
- Modules import each other in no circle, imports inside functions and modules named by a text included. Imports for
  type checkers alone do not count here: they never run.
- A name that a floor's `__init__` makes public is imported from the floor, not from the file that holds it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "depthmix"
PACKAGE = "depthmix"
TOP = "(package)"  # depthmix/__init__.py and __main__.py: they join the floors
# From the bottom to the top. Some are planned: no folder yet.
FLOORS = (
    *("support", "ops", "mechanisms", "models", "parallel", "inference", "analysis", "data", "hf", "training"),
    *("studies", "report", "titan", "bench", "cli", TOP),
)
NAMED = re.compile(rf"{PACKAGE}(\.\w+)+(:\w+)?")  # "depthmix.mechanisms.ddl:DeepDelta", as in the registry


@dataclass(frozen=True)
class Import:
    """One name that a module imports."""

    importer: str  # module
    line: int
    module: str  # as it is written after `from`
    name: str | None  # None: the module itself
    target: str  # the module that this reaches
    types_only: bool = False

    def __str__(self) -> str:
        what = self.module if self.name is None else f"{self.name} from {self.module}"
        return f"{self.importer}:{self.line} imports {what}"


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    names = {}
    for file in sorted(source.rglob("*.py")):
        parts = file.relative_to(source).with_suffix("").parts
        names[".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = file
    return names


def floor_of(module: str, known: Mapping[str, Path]) -> str:
    parts = module.split(".")
    is_folder = len(parts) > 1 and (len(parts) > 2 or known[module].name == "__init__.py")
    return parts[1] if is_folder else TOP


def read_imports(source: Path = SOURCE) -> list[Import]:
    known = modules(source)
    return [found for module, file in known.items() for found in imports_of(module, ast.parse(file.read_text()), known)]


def imports_of(module: str, tree: ast.AST, known: Mapping[str, Path]) -> Iterator[Import]:
    """At any depth of the code. Relative imports are not used here, so they are refused."""
    for node, types_only in walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    yield Import(module, node.lineno, alias.name, None, alias.name, types_only)
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                raise ValueError(f"{module}:{node.lineno} has a relative import; expected `from {PACKAGE}.… import`")
            if node.module.split(".")[0] == PACKAGE:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    is_module = inner in known and alias.name not in public(node.module, known)
                    target = inner if is_module else node.module
                    yield Import(module, node.lineno, node.module, alias.name, target, types_only)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value):
            target = node.value.split(":")[0]
            if ":" in node.value and target in known:
                yield Import(module, node.lineno, target, None, target, types_only)


def walk(tree: ast.AST, types_only: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes, each with whether it stands under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        guarded = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        yield node, types_only or guarded
        yield from walk(node, types_only or guarded)


def public(module: str, known: Mapping[str, Path]) -> dict[str, str]:
    """The names in `__all__` of a package that come from its files, and the module that each comes from."""
    file = known.get(module)
    if file is None or file.name != "__init__.py":
        return {}
    tree = ast.parse(file.read_text())
    listed: set[str] = set()
    homes = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            listed = set(ast.literal_eval(node.value))
        elif isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.".startswith(f"{module}."):
            homes |= {alias.asname or alias.name: node.module for alias in node.names}
    return {name: home for name, home in homes.items() if name in listed and home != module}


def upward(imports: Iterable[Import], known: Mapping[str, Path]) -> list[Import]:
    """Imports from a floor above. Inside a floor `from depthmix import …` of a function counts too: it is on top."""
    height = {floor: k for k, floor in enumerate(FLOORS)}
    return [i for i in imports if height[floor_of(i.importer, known)] < height[floor_of(i.target, known)]]


def crossings(imports: Iterable[Import], known: Mapping[str, Path]) -> list[Import]:
    """Names taken from a file of another floor though that floor's `__init__` makes them public."""
    found = []
    for i in imports:
        floor = floor_of(i.target, known)
        home = f"{PACKAGE}.{floor}"
        if floor in (TOP, floor_of(i.importer, known)) or i.module == home or i.name is None:
            continue
        if public(home, known).get(i.name) == i.module:
            found.append(i)
    return found


def cycles(imports: Iterable[Import]) -> list[list[str]]:
    """Groups of modules that reach each other, by Tarjan's algorithm; a module that imports itself is one too."""
    graph: dict[str, set[str]] = {}
    for i in imports:
        if not i.types_only:
            graph.setdefault(i.importer, set()).add(i.target)
            graph.setdefault(i.target, set())
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in order:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == order[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1 or node in graph[node]:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def counts(imports: Iterable[Import], known: Mapping[str, Path]) -> dict[tuple[str, str], int]:
    """Imported names from floor to floor, the importer first."""
    pairs = Counter((floor_of(i.importer, known), floor_of(i.target, known)) for i in imports)
    return {pair: count for pair, count in pairs.items() if pair[0] != pair[1]}
