"""The decoder: a list of sublayers whose depth mixing is an exchangeable part."""

from depthmix.models.bounds import segment_bounds
from depthmix.models.config import Choice, DecoderConfig, LoopConfig, MoEConfig
from depthmix.models.counting import count_parameters
from depthmix.models.decoder import Decoder, next_token_losses
from depthmix.models.io import load_model, load_segment, save_model
from depthmix.models.moe import update_balance
from depthmix.models.presets import PRESETS, preset
from depthmix.models.segment import Segment

__all__ = [
    "PRESETS",
    "Choice",
    "Decoder",
    "DecoderConfig",
    "LoopConfig",
    "MoEConfig",
    "Segment",
    "count_parameters",
    "load_model",
    "load_segment",
    "next_token_losses",
    "preset",
    "save_model",
    "segment_bounds",
    "update_balance",
]
