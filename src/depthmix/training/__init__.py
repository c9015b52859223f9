"""Training a decoder, or a model of transformers further: optimisers and schedules, the loop, checkpoints.

config = TrainConfig.from_dial(12, "block_attnres", folder="runs/block", tokens=5e6)
result = train(override(config, "optimizer.lr", 1e-3))
model = load_run("runs/block")
"""

from depthmix.training.bad_loss import BadLoss
from depthmix.training.build import initial_model, load_run, open_corpus, read_config
from depthmix.training.checkpoint import CheckpointError
from depthmix.training.config import (
    DataConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from depthmix.training.continued import retrofit_config
from depthmix.training.evaluate import Score, score
from depthmix.training.flops import flops_per_token
from depthmix.training.folder import Result
from depthmix.training.loop import Interrupted, train
from depthmix.training.metrics import read_metrics
from depthmix.training.overrides import override
from depthmix.training.recipes import preset_config, rule_config
from depthmix.training.retrofit import RetrofitConfig

__all__ = [
    "BadLoss",
    "CheckpointError",
    "DataConfig",
    "Interrupted",
    "OptimizerConfig",
    "Result",
    "RetrofitConfig",
    "RunConfig",
    "ScheduleConfig",
    "Score",
    "TrainConfig",
    "flops_per_token",
    "initial_model",
    "load_run",
    "open_corpus",
    "override",
    "preset_config",
    "read_config",
    "read_metrics",
    "retrofit_config",
    "rule_config",
    "score",
    "train",
]
