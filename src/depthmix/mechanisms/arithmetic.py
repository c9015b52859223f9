"""FLOPs per token of the parts of mechanisms, and the definition of a FLOP.

An addition, subtraction, multiplication, division, root, exponential, logarithm, sigmoid or tanh of one number counts
1, so a multiply-add counts 2. A sum or mean counts 1 for each number in it: a dot product of width D and a sum
of D squares are 2·D each, a mixture of n sources 2·D·n. Copies, views, casts, signs and comparisons (maxima,
selections) count nothing.

The count follows the equations as the torch form of `ops` computes them. 1/rms multiplies the logit, and the weight of
a key norm is folded into the query. Whatever depends only on parameters is shared by all tokens and counts nothing;
neither do the operations that prevent overflow of squares.
"""

from __future__ import annotations


def inverse_rms(width: int) -> int:
    """1 / sqrt(mean(v²) + eps)."""
    return 2 * width + 2


def rms_norm(width: int) -> int:
    return inverse_rms(width) + width


def linear(inputs: int, outputs: int) -> int:
    return 2 * inputs * outputs


def normed_linear(inputs: int, outputs: int, bias: bool = True) -> int:
    """W norm(x) + b, with 1/rms applied to the outputs."""
    return inverse_rms(inputs) + linear(inputs, outputs) + outputs * (1 + bias)


def mixture(sources: int, width: int) -> int:
    """Σ_i α_i v_i."""
    return 2 * sources * width


def softmax(count: int) -> int:
    """Subtraction of the maximum, exponential, sum, division."""
    return 4 * count


def elu1(count: int) -> int:
    """φ(u) = elu(u) + 1: an addition and an exponential, of which one is selected."""
    return 2 * count


def sinkhorn(streams: int, iterations: int, eps: float) -> int:
    """A softmax of the rows, then 2 · iterations − 1 half-steps; if eps is 0, in logarithms."""
    entries = streams**2
    half_step = 2 * entries + streams if eps else 3 * entries + streams  # sum and divide; sum, log, subtract, exp
    return softmax(entries) + (2 * iterations - 1) * half_step
