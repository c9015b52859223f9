"""Whether this machine supports training in bfloat16."""

from __future__ import annotations

import signal
import subprocess
import sys

import torch

TRIAL = "import torch; a = torch.ones(128, 256, dtype=torch.bfloat16); torch.nn.functional.linear(a, a).sum().item()"


def check_precision(precision: str, device: torch.device, trial: str = TRIAL) -> None:
    """Some CPUs report instructions that they do not have, so a child process tries one product first."""
    if precision != "bfloat16" or device.type != "cpu":
        return
    done = subprocess.run([sys.executable, "-c", trial], capture_output=True, text=True, check=False)
    if done.returncode == -signal.SIGILL:
        raise ValueError(
            "precision='bfloat16' causes an illegal instruction on this CPU; set the environment variable "
            "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before starting, or choose precision='float32'"
        )
    if done.returncode:
        raise ValueError(f"precision='bfloat16' does not run on this CPU: {done.stderr.strip().splitlines()[-1:]}")
