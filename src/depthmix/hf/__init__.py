"""The decoder as a model of Hugging Face transformers."""

from typing import TYPE_CHECKING, Any

from depthmix.hf.version import check_transformers

check_transformers()  # before anything imports a part of it

from depthmix.hf.config import DepthmixConfig  # noqa: E402

if TYPE_CHECKING:
    from depthmix.hf.harness import evaluate
    from depthmix.hf.model import DepthmixForCausalLM

__all__ = ["DepthmixConfig", "DepthmixForCausalLM", "evaluate"]


def __getattr__(name: str) -> Any:
    """Parts that are imported when a user or the Auto classes ask for them: see `depthmix.registration`."""
    if name == "DepthmixForCausalLM":
        from depthmix.hf.model import DepthmixForCausalLM

        return DepthmixForCausalLM
    if name == "evaluate":
        from depthmix.hf.harness import evaluate

        return evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
