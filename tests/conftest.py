"""What every test shares: one core a worker, and at the end a list of what was left out."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

torch.set_num_threads(max(1, (os.cpu_count() or 2) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"):
        return
    for item in items:
        if item.get_closest_marker("inductor"):
            item.add_marker(pytest.mark.skip(reason="no C++ compiler for torch.compile; install g++"))
