"""What a trace of some tokens, or a survey of a whole text, holds for a figure: one matrix, and words about it.

Axes: T token, G head or channel of M, n = L+1 rows and columns of M, C named source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from depthmix.analysis.plot.axes import check_choice
from depthmix.analysis.survey_file import Survey
from depthmix.analysis.trace import Trace

Source: TypeAlias = "Trace | Survey"
Quantity = Literal["M_mean", "M_std", "contribution", "share"]
Rows = Literal["all", "attn", "mlp"]
TRACE = "a Trace, as dm.trace(model, tokens) or dm.Trace.load(path) returns it"
SURVEY = "a Survey, as dm.analysis.Survey.load(folder) returns it"
MEANINGS = {  # of what is no mean of M: words for the colour bar
    "M_std": "standard deviation over tokens",
    "contribution": "norm of what is added",
    "share": "share of the read",
    "weights_std": "standard deviation over tokens",
}


def check_trace(function: str, trace: object) -> None:
    if not isinstance(trace, Trace):
        raise TypeError(f"{function} got a {type(trace).__name__}; expected {TRACE}")


def check_source(function: str, source: object) -> None:
    if not isinstance(source, (Trace, Survey)):
        raise TypeError(f"{function} got a {type(source).__name__}; expected {TRACE}, or {SURVEY}")


def check_survey(function: str, survey: object) -> None:
    if not isinstance(survey, Survey):
        raise TypeError(f"{function} got a {type(survey).__name__}; expected {SURVEY}")


def mechanism_of(source: Source) -> str:
    return source.mechanism if isinstance(source, Trace) else str(source.figures["mechanism"])


def tensor_of(survey: Survey, name: str, remedy: str) -> Tensor:
    if name not in survey.tensors:
        raise ValueError(f"this survey of {mechanism_of(survey)} has no {name}; {remedy}")
    return survey.tensors[name].double()


def pick(tensor: Tensor, group: int, words: str = "head") -> Tensor:
    """[G, ...] → [...]: of one head, or of one of the channels that were kept."""
    if not 0 <= group < len(tensor):
        raise ValueError(f"{words}={group}; expected a whole number from 0 to {len(tensor) - 1}")
    return tensor[group]


def choose_rows(source: Source, rows: Rows) -> list[int]:
    """The rows that are drawn, from 0."""
    check_choice("rows", rows, ("all", "attn", "mlp"))
    if isinstance(source, Trace):
        if rows != "all":
            raise ValueError(f"rows={rows!r}: a trace does not hold the kinds of its sublayers; draw a survey instead")
        return list(range(source.M.shape[-1]))
    kinds = source.figures["kinds"]
    chosen = [row for row, kind in enumerate(kinds) if kind == rows]
    if rows != "all" and not chosen:
        raise ValueError(f"rows={rows!r}: this model has no such sublayer, only {', '.join(sorted(set(kinds)))}")
    return chosen if rows != "all" else list(range(len(kinds) + 1))


def mixing(source: Source, quantity: Quantity, group: int) -> tuple[Tensor, str]:
    """[n, n] and its description."""
    check_choice("quantity", quantity, ("M_mean", "M_std", "contribution", "share"))
    of_M = quantity in ("M_mean", "M_std")
    if isinstance(source, Survey):
        matrix = tensor_of(source, quantity, "make the survey again with this version")
        matrix = pick(matrix, group) if of_M else matrix
        content: Mapping[str, Any] = source.figures
        tokens, kind, channels = content["tokens"], content["kind"], content["channels"]
    else:
        matrix = trace_matrix(source, group, quantity) if of_M else trace_parts(source, quantity)
        tokens, kind, channels = source.sources[0, ..., 0].numel(), source.kind, source.channels
    words = [{"operator": "gains of writes", "scalar": ""}.get(kind, "")] if of_M else []
    if of_M and kind in ("head", "channel"):
        words = [f"{kind} {channels[group] if channels else group}"]
    return matrix, ", ".join(filter(None, [*words, mean_of(tokens) if quantity != "M_std" else tokens_of(tokens)]))


def trace_matrix(trace: Trace, group: int, quantity: Quantity) -> Tensor:
    M = trace.M.cpu().double()
    if trace.kind in ("head", "channel"):
        M = pick(M.movedim(-3, 0), group)
    M = M.reshape(-1, *M.shape[-2:])
    return M.mean(0) if quantity == "M_mean" else M.std(0, correction=0)


def trace_parts(trace: Trace, quantity: Quantity) -> Tensor:
    """[n, n]: what each source adds to each read: the mean over tokens of its norm, or of its cosine share."""
    rows = []
    for row, read in enumerate(trace.inputs):
        parts, h = trace.contributions(row).cpu().double(), read.cpu().double()
        if quantity == "contribution":
            sizes = parts.norm(dim=-1)
        else:
            sizes = (parts * h).sum(-1) / h.square().sum(-1).clamp(min=torch.finfo(h.dtype).tiny)
        rows.append(sizes.flatten(1).mean(1) if sizes.dim() > 1 else sizes)
    return torch.stack(rows)


def weights(source: Source, quantity: str, head: int) -> tuple[Tensor, list[str], list[list[int]], list[bool]]:
    """[n, C], the names of its columns, the columns that each row reads, and whether the newest is still growing."""
    check_choice("quantity", quantity, ("weights_mean", "weights_std"))
    if isinstance(source, Survey):
        content = source.figures
        tensor = source.tensors.get(quantity)
        names, reads, partial = content["source_names"], content["reads"], content["partial"]
    else:
        tensor = None if source.weights is None else over_tokens(source, quantity)
        names, reads, partial = source.source_names, source.reads, source.partial
    if tensor is None:
        raise ValueError(f"{mechanism_of(source)} does not weight a list of sources; draw M with mixing_matrix")
    return pick(tensor.double(), head), names, reads, partial


def over_tokens(trace: Trace, quantity: str) -> Tensor:
    """[H, n, C]"""
    assert trace.weights is not None
    sizes = trace.weights.cpu().double()
    sizes = sizes.reshape(-1, *sizes.shape[trace.sources.dim() - 2 :])
    sizes = sizes if sizes.dim() == 4 else sizes.unsqueeze(1)
    return sizes.mean(0) if quantity == "weights_mean" else sizes.std(0, correction=0)


def mean_values(source: Source, head: int) -> tuple[Tensor, int, int]:
    """[N, N] of one key-value head, the number of heads and of tokens."""
    if isinstance(source, Survey):
        tensor, tokens = source.tensors.get("values_mean"), int(source.figures["tokens"])
    else:
        tensor, tokens = None, 0
        if source.values is not None:
            values = source.values.cpu().double().flatten(0, -4)  # [T, K, N, N]
            tensor, tokens = values.mean(0), len(values)
    if tensor is None:
        what = "survey" if isinstance(source, Survey) else "trace"
        raise ValueError(
            f"this {what} has no values: no attention of the model mixes values over depth; draw M with mixing_matrix"
        )
    return pick(tensor.double(), head), len(tensor), tokens


def mean_of(tokens: int) -> str:
    return f"mean of {tokens_of(tokens)}" if tokens > 1 else ""


def tokens_of(tokens: int) -> str:
    return f"{tokens:,} tokens" if tokens > 1 else ""
