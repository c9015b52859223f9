"""The source of a commit in a folder of its own, to run beside another."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def unpack(commit: str, folder: Path) -> Path:
    """The files of a commit, in `folder`; a path with a folder src in it is taken as it is."""
    if (Path(commit) / "src" / "depthmix").is_dir():
        return Path(commit).resolve()
    folder.mkdir(parents=True)
    done = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{commit!r} is neither a commit nor a checkout of depthmix")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def start(checkout: Path, script: str, folder: Path, threads: int) -> subprocess.Popen[str]:
    """Python code in a process that has the sources of a checkout, in `folder`. Bits depend on the threads."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": str(threads)}
    environment.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # as in the Makefile
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
