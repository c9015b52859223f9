"""depthmix: what should a layer read from the layers below it?"""

from depthmix import ops
from depthmix.analysis import Trace, effective_rank, row_sums, semiseparable_rank, sinks
from depthmix.analysis.trace import trace
from depthmix.mechanisms import (
    DepthMixer,
    DepthStack,
    Facts,
    KVMixer,
    MixerConfig,
    Site,
    State,
    StateSpec,
    list_mechanisms,
    mechanism,
    option,
    param_groups,
)

__version__ = "0.1.0"

__all__ = [
    "DepthMixer",
    "DepthStack",
    "Facts",
    "KVMixer",
    "MixerConfig",
    "Site",
    "State",
    "StateSpec",
    "Trace",
    "effective_rank",
    "list_mechanisms",
    "mechanism",
    "ops",
    "option",
    "param_groups",
    "row_sums",
    "semiseparable_rank",
    "sinks",
    "trace",
]
