"""A dispatch mode that counts FLOPs of elementwise operations and reductions too, by the convention of `arithmetic`.

`torch.utils.flop_counter` sees matrix products alone, and most of a read over depth is none. What this mode does not
count: copies, views, casts, new tensors, comparisons, selections and signs (FREE), and whatever gives no floating
numbers. Of a log-sum-exp it counts the logarithm: the torch form takes one beside a softmax of the same logits, whose
exponentials and sum it is made of. An operation that it does not know is an error, so nothing is left out silently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ONE = "add sub rsub mul div reciprocal square pow sqrt rsqrt exp log sigmoid tanh"  # for each number that comes out
FREE = (
    "view _unsafe_view reshape expand t transpose permute unsqueeze squeeze slice select split split_with_sizes unbind "
    "alias detach clone copy _to_copy cat stack index index_select repeat_interleave lift_fresh "
    "empty new_empty empty_like zeros new_zeros zeros_like ones new_ones ones_like full new_full full_like fill eye "
    "arange scalar_tensor neg abs amax max clamp where masked_fill gt eq ne"
)


def inner(a: Tensor, b: Tensor) -> int:
    """Of a product of (batches of) matrices [..., n, k] and [..., k, m]."""
    return 2 * a.numel() * b.shape[-1]


COSTS: dict[str, Callable[[tuple[Any, ...], Tensor], int]] = {
    **dict.fromkeys(ONE.split(), lambda args, out: out.numel()),
    **dict.fromkeys(FREE.split(), lambda args, out: 0),
    "addcmul": lambda args, out: 2 * out.numel(),
    "sum": lambda args, out: args[0].numel(),
    "mean": lambda args, out: args[0].numel(),
    "linalg_vector_norm": lambda args, out: 2 * args[0].numel() + out.numel(),
    "_softmax": lambda args, out: 4 * out.numel(),
    "_log_softmax": lambda args, out: 4 * out.numel() + out.numel() // out.shape[args[1]],
    "logsumexp": lambda args, out: out.numel(),
    "mm": lambda args, out: inner(args[0], args[1]),
    "bmm": lambda args, out: inner(args[0], args[1]),
    "addmm": lambda args, out: inner(args[1], args[2]) + out.numel(),
}


class FlopMode(TorchDispatchMode):
    """`flops` counts what runs within it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point():
            name = func.overloadpacket.__name__
            name = name[:-1] if name.endswith("_") else name  # in place
            assert name in COSTS, f"{func}: say in {__name__} what it counts"
            self.flops += COSTS[name](args, out)
        return out


def flops_per_token(run: Callable[[int], object]) -> float:
    """What `run(tokens)` counts for each token; what all tokens share, as products of parameters are, is left out."""
    counts = []
    for tokens in (2, 5):
        with FlopMode() as mode:
            run(tokens)
        counts.append(mode.flops)
    return (counts[1] - counts[0]) / 3
