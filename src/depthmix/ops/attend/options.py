"""The options of a read over depth."""

from __future__ import annotations

from typing import NamedTuple


class ReadOptions(NamedTuple):
    """Logits are ``scale * <query, norm(source)>``. A tuple, which compilers and `autograd.Function` accept."""

    normalize: bool = True  # False: keys without RMSNorm
    eps: float = 1e-6  # eps of that RMSNorm
    scale: float = 1.0  # multiplier of the logits


DEFAULT = ReadOptions()
