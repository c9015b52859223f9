"""FLOPs of the parts that mechanisms are made of, per token, and what counts as one.

An addition, subtraction, multiplication, division, root, exponential, logarithm, sigmoid or tanh of one number counts
1, so a multiply-add counts 2. A sum or mean counts 1 for each number that it takes: a dot product of width D and a sum
of D squares are 2·D each, a mixture of n sources 2·D·n. Copies, views, casts, signs and comparisons (maxima,
selections) count nothing.

It is the arithmetic of the equations, as the torch form of `ops` does it. 1/rms and the weight of a key norm are taken
into the logit and the query; what depends on parameters alone is shared by all tokens and counts nothing; neither does
what keeps squares from overflowing.
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
    """W norm(x) + b, 1/rms applied to the outputs."""
    return inverse_rms(inputs) + linear(inputs, outputs) + outputs * (1 + bias)


def mixture(sources: int, width: int) -> int:
    """Σ_i α_i v_i."""
    return 2 * sources * width


def softmax(count: int) -> int:
    """Subtract the largest, exponential, sum, division."""
    return 4 * count


def elu1(count: int) -> int:
    """φ(u) = elu(u) + 1: an addition and an exponential, of which one is selected."""
    return 2 * count


def sinkhorn(streams: int, iterations: int, eps: float) -> int:
    """A softmax of the rows, then 2 · iterations − 1 half-steps; without eps in logarithms."""
    entries = streams**2
    half_step = 2 * entries + streams if eps else 3 * entries + streams  # sum and divide; sum, log, subtract, exp
    return softmax(entries) + (2 * iterations - 1) * half_step
