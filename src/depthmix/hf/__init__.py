"""Hugging Face transformers: mechanisms in its models, the decoder as one of them, evaluation on tasks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from depthmix.hf.version import check_transformers

check_transformers()  # before anything imports a part of it

from depthmix.hf.config import DepthmixConfig  # noqa: E402

if TYPE_CHECKING:
    from depthmix.hf.harness import evaluate
    from depthmix.hf.model import DepthmixForCausalLM
    from depthmix.hf.tokenizer import from_tokenizer, tokenizer_of

__all__ = ["DepthmixConfig", "DepthmixForCausalLM", "evaluate", "from_tokenizer", "tokenizer_of"]

LATER = {  # in which module
    "DepthmixForCausalLM": "model",
    "evaluate": "harness",
    **dict.fromkeys(("from_tokenizer", "tokenizer_of"), "tokenizer"),
}


def __getattr__(name: str) -> Any:
    """Parts that are imported when a user or the Auto classes ask for them: see `depthmix.registration`."""
    if name in LATER:
        return getattr(import_module(f"{__name__}.{LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
