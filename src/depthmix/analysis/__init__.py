"""What a model's layers read: traces, the depth mixing matrix and its structure, surveys of texts, cuts."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from depthmix.analysis.magnitudes import Magnitudes, measuring
from depthmix.analysis.structure import effective_rank, row_sums, semiseparable_rank, sinks
from depthmix.analysis.trace import Trace, trace, tracing

if TYPE_CHECKING:
    from depthmix.analysis.ablation import Ablation, ablate, cutting
    from depthmix.analysis.cuts import Cut
    from depthmix.analysis.edits import editing
    from depthmix.analysis.survey_file import Survey
    from depthmix.analysis.surveyor import survey

__all__ = [
    "Ablation",
    "Cut",
    "Magnitudes",
    "Survey",
    "Trace",
    "ablate",
    "cutting",
    "editing",
    "effective_rank",
    "measuring",
    "row_sums",
    "semiseparable_rank",
    "sinks",
    "survey",
    "trace",
    "tracing",
]

LATER = {  # names that are imported when they are asked for, so that `import depthmix` stays light
    "Ablation": "ablation",
    "Cut": "cuts",
    "Survey": "survey_file",
    "ablate": "ablation",
    "cutting": "ablation",
    "editing": "edits",
    "survey": "surveyor",
}
PARTS = ("figures", "health", "invariants", "plot")


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(import_module(f"{__name__}.{LATER[name]}"), name)
    if name in PARTS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
