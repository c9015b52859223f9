"""One rank of the processes that tests/parallel/test_layout_checkpoints.py starts.

python -m tests.parallel.checkpoint_worker FOLDER, in an environment as torchrun sets it; FOLDER/cases.json holds
triples of a run's configuration, the folder to write its state into, and whether to write asynchronously.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from depthmix.parallel import ranks
from depthmix.training import TrainConfig, checkpoint
from depthmix.training.build import layout_of
from depthmix.training.loop import begin
from depthmix.training.resume import state_tensors


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    with ranks.process_group(device, 120):
        for toml, target, asynchronous in json.loads((folder / "cases.json").read_text()):
            config = TrainConfig.from_toml(toml)
            run = begin(config, layout_of(config), device, lambda event: None)
            pending = checkpoint.save(Path(target), run.progress.step, state_tensors(run), asynchronous=asynchronous)
            if pending is not None:
                pending.result()
            run.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
