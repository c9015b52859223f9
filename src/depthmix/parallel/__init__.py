"""Several processes: layouts of ranks, tensor parallelism, FSDP2, and pipelines with a cache of what a rank has."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from depthmix.parallel.decoder_plan import decoder_plan
from depthmix.parallel.plan import Plan, make_plan
from depthmix.parallel.store import Store
from depthmix.parallel.transport import Transport

if TYPE_CHECKING:
    from depthmix.parallel.pipeline import Pipeline, stages
    from depthmix.parallel.stage import CachedStage

__all__ = [
    "CachedStage",
    "Pipeline",
    "Plan",
    "Store",
    "Transport",
    "decoder_plan",
    "make_plan",
    "stages",
]

LATER = {"CachedStage": "stage", "Pipeline": "pipeline", "stages": "pipeline"}  # torch's pipelines take a second


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(import_module(f"{__name__}.{LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
