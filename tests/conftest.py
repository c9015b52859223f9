"""What every test shares: one core a worker, and at the end a list of what was left out."""

from __future__ import annotations

import shutil

import pytest
import torch

torch.set_num_threads(1)  # tensors are tiny here: two threads that wait for each other take far longer


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"):
        return
    for item in items:
        if item.get_closest_marker("inductor"):
            item.add_marker(pytest.mark.skip(reason="no C++ compiler for torch.compile; install g++"))
