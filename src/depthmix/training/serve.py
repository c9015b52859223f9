"""The model of a run on several processes, for evaluation and generation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from depthmix.models import DecoderConfig
from depthmix.models.decoder import SublayerLoop
from depthmix.models.io import fill
from depthmix.models.io import read_config as read_model_config
from depthmix.models.kinds import parameter_dtype
from depthmix.parallel import ranks
from depthmix.parallel.distributed import DistributedDecoder
from depthmix.parallel.layout import Layout
from depthmix.parallel.serving import serving_layout
from depthmix.support.files import read_object
from depthmix.training import checkpoint
from depthmix.training.build import RESULT_AGAIN, check_functions, decoder_of, no_model, read_config
from depthmix.training.continued import is_retrofit


@dataclass
class Serving:
    """A model that the processes of torchrun will load together; `plan_serving` makes it before they communicate."""

    folder: Path
    config: DecoderConfig
    layout: Layout
    weights: Path | None  # of a finished model; None: the newest checkpoint
    digest: str | None  # of the tokens that it was trained on
    step: int | None = None  # of the checkpoint, when it is loaded

    def load(self, device: torch.device, dtype: torch.dtype | None = None) -> DistributedDecoder:
        """Each process reads the tensors of its own part only; `dtype` converts the parameters."""

        def prepare(part: SublayerLoop) -> None:
            if self.weights is not None:
                fill(part, self.weights)
            else:
                newest = checkpoint.load_latest(self.folder / "checkpoints", {"model": part.state_dict()}, part=True)
                if newest is None:
                    raise no_model(self.folder)
                self.step, self.digest = newest[0], newest[1]["corpus"]
            if dtype is not None:
                for name, parameter in part.named_parameters():
                    parameter.data = parameter.data.to(parameter_dtype(name, dtype))
            part.requires_grad_(False)  # FSDP2 refuses parameters of several dtypes that have gradients

        model = DistributedDecoder(self.config, self.layout, device, prepare=prepare, dtype=None)
        model.train(False)
        return model


def plan_serving(folder: Path, *, tp: int = 1, pp: int = 1, divide: bool = False, functions: bool = True) -> Serving:
    """Serve the model of a run, finished or not, or of a folder that `save_model` wrote.

    Args:
        folder: that of the run or of the model.
        tp: processes of a tensor-parallel group.
        pp: processes of a pipeline.
        divide: whether further processes may share the rows of a batch.
        functions: as in `load_model`.
    """
    digest, weights, is_run = None, None, (folder / "config.toml").is_file()
    if is_retrofit(folder):
        raise ValueError(
            f"the model of {folder} comes from transformers; expected a depthmix decoder on several processes. Run the "
            "command on one process, without --tp and --pp"
        )
    if is_run and not functions:
        check_functions(folder / "config.toml")
    if is_run and not (folder / "result.json").is_file():
        config = decoder_of(read_config(folder))
    else:
        weights = folder / "final" if (folder / "final").is_dir() else folder
        config = read_model_config(weights, functions)
    if is_run and weights is not None:
        digest = read_object(folder / "result.json", RESULT_AGAIN, ("data_digest",))["data_digest"]
    layout = serving_layout(config, processes=ranks.launched(), tp=tp, pp=pp, divide=divide)
    return Serving(folder, config, layout, weights, digest)
