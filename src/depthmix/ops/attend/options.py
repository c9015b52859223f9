"""What a read over depth computes besides its tensors."""

from __future__ import annotations

from typing import NamedTuple


class ReadOptions(NamedTuple):
    """Logits are ``scale * <query, norm(source)>``. A tuple: compilers and `autograd.Function` take it as it is."""

    normalize: bool = True  # False: keys without their RMSNorm
    eps: float = 1e-6  # of that norm
    scale: float = 1.0  # multiplier of the logits


DEFAULT = ReadOptions()
