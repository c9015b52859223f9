"""The decoder as a model of Hugging Face transformers."""

from typing import TYPE_CHECKING, Any

from depthmix.hf.version import check_transformers

check_transformers()  # before anything imports a part of it

from depthmix.hf.config import DepthmixConfig  # noqa: E402

if TYPE_CHECKING:
    from depthmix.hf.model import DepthmixForCausalLM

__all__ = ["DepthmixConfig", "DepthmixForCausalLM"]


def __getattr__(name: str) -> Any:
    """The model, imported when it is asked for, by a user or by the Auto classes: see `depthmix.registration`."""
    if name == "DepthmixForCausalLM":
        from depthmix.hf.model import DepthmixForCausalLM

        return DepthmixForCausalLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
