"""depthmix: what should a layer read from the layers below it?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from depthmix import ops
from depthmix.analysis import Trace, effective_rank, row_sums, semiseparable_rank, sinks, trace
from depthmix.inference import DynamicCache, PreallocatedCache, generate
from depthmix.mechanisms import (
    DepthMixer,
    DepthStack,
    Facts,
    KVFacts,
    KVMixer,
    KVStack,
    MixerConfig,
    Site,
    SourceWeights,
    State,
    StateSpec,
    list_mechanisms,
    mechanism,
    option,
    param_groups,
)
from depthmix.models import (
    CacheBytes,
    Decoder,
    DecoderConfig,
    KDAConfig,
    LoopConfig,
    MLAConfig,
    MoEConfig,
    Segment,
    cache_bytes,
    load_model,
    load_segment,
    load_stack,
    preset,
    save_model,
    save_stack,
    segment_bounds,
    update_balance,
)
from depthmix.registration import register_when_imported

if TYPE_CHECKING:
    from depthmix.analysis import Ablation, Survey, ablate, editing, survey
    from depthmix.hf.wrap import unwrap, wrap

__version__ = "0.1.0"

__all__ = [
    "Ablation",
    "CacheBytes",
    "Decoder",
    "DecoderConfig",
    "DepthMixer",
    "DepthStack",
    "DynamicCache",
    "Facts",
    "KDAConfig",
    "KVFacts",
    "KVMixer",
    "KVStack",
    "LoopConfig",
    "MLAConfig",
    "MixerConfig",
    "MoEConfig",
    "PreallocatedCache",
    "Segment",
    "Site",
    "SourceWeights",
    "State",
    "StateSpec",
    "Survey",
    "Trace",
    "ablate",
    "cache_bytes",
    "editing",
    "effective_rank",
    "generate",
    "list_mechanisms",
    "load_model",
    "load_segment",
    "load_stack",
    "mechanism",
    "ops",
    "option",
    "param_groups",
    "preset",
    "row_sums",
    "save_model",
    "save_stack",
    "segment_bounds",
    "semiseparable_rank",
    "sinks",
    "survey",
    "trace",
    "unwrap",
    "update_balance",
    "wrap",
]


LATER = {  # in which part
    **dict.fromkeys(("Ablation", "Survey", "ablate", "editing", "survey"), "analysis"),
    **dict.fromkeys(("unwrap", "wrap"), "hf.wrap"),
}


def __getattr__(name: str) -> Any:
    """Parts that are imported when they are asked for."""
    if name in ("bench", "data", "hf", "parallel", "report", "studies", "training"):
        return import_module(f"{__name__}.{name}")
    if name == "plot":
        return import_module(f"{__name__}.analysis.plot")
    if name in LATER:
        return getattr(import_module(f"{__name__}.{LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_when_imported()  # depthmix.hf with transformers, which is not imported here
