"""Register the models of `depthmix.hf` with transformers as soon as both packages are imported, in any order.

`import depthmix` must not import transformers, and transformers has no entry points for models of other packages. So
each part of `depthmix.hf` is imported directly after the module of transformers that looks for it, or now if that one
is loaded already. The configuration has a module of its own: transformers loads that one while its own base class of
models is still incomplete.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PARTS = {
    "transformers.models.auto.configuration_auto": ("depthmix.hf.config", "depthmix.hf.wrapped_config"),
    "transformers.models.auto.modeling_auto": ("depthmix.hf.model", "depthmix.hf.wrapped_model"),
}


class AutoFinder(MetaPathFinder):
    """Finds the modules of PARTS as Python's own finder does, and calls `register` after each has run."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name not in PARTS or (spec := PathFinder.find_spec(name, path)) is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register(name)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register(name: str) -> None:
    """Import what belongs to this module of transformers; another version of transformers must still be usable."""
    try:
        for part in PARTS[name]:
            importlib.import_module(part)
    except ImportError as error:
        warnings.warn(f"models of depthmix are unknown to transformers: {error}", ImportWarning, stacklevel=2)


def register_when_imported() -> None:
    for name in PARTS:
        if name in sys.modules:
            register(name)
    if not any(isinstance(finder, AutoFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AutoFinder())
