"""The decoder: a list of sublayers whose depth mixing is an exchangeable part."""

from depthmix.models.config import Choice, DecoderConfig, LoopConfig, MoEConfig
from depthmix.models.counting import count_parameters
from depthmix.models.decoder import Decoder, next_token_losses
from depthmix.models.io import load_model, save_model
from depthmix.models.moe import update_balance
from depthmix.models.presets import PRESETS, preset

__all__ = [
    "PRESETS",
    "Choice",
    "Decoder",
    "DecoderConfig",
    "LoopConfig",
    "MoEConfig",
    "count_parameters",
    "load_model",
    "next_token_losses",
    "preset",
    "save_model",
    "update_balance",
]
