"""What a model's rows read over a text of any length: statistics of M in constant memory, and their two files.

Axes: B row of text, T token, D channel, G group of channels with weights of their own, H head of the weights,
n = L + 1 rows and columns of M, C source that a mechanism names, Q quantile, K key-value head, N attention layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.analysis.magnitudes import Magnitudes
from depthmix.analysis.passes import evaluation_mode, logits_of
from depthmix.analysis.recording import find_stack, recording, recording_values, value_mixers
from depthmix.analysis.replay import value_matrix
from depthmix.analysis.samples import FirstRows, FirstTokens, SpreadTokens
from depthmix.analysis.structure import effective_rank, semiseparable_rank
from depthmix.analysis.survey_file import FORMAT, Survey, plain
from depthmix.analysis.tally import Tally
from depthmix.analysis.trace import SUMMARY, check_complete
from depthmix.mechanisms import KVStack
from depthmix.mechanisms.registry import name_of
from depthmix.models import next_token_losses
from depthmix.support.files import version

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
PASS_TOKENS = 2048  # in the rows of one pass: fewer cost more time for each token
PASS_BYTES = 1 << 27  # of the vectors that are recorded in one pass
TABLE_NUMBERS = 1 << 21  # numbers in the table of tokens, for M and for the weights
MATRICES = 256  # most matrices whose rank is measured; at least LEAST_RANKED tokens
LEAST_RANKED = 8


def survey(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    table: int = 64,
    ranked: int = 64,
    gradient_tokens: int = 512,
    source: str = "",
    decode: Callable[[list[int]], str] | None = None,
) -> Survey:
    """Run `model` over all batches and measure what its rows read; nothing of the model changes.

    Args:
        model: a decoder, or any module from tokens to logits [B, T, V] that runs the protocol through one `DepthStack`.
        batches: token ids, each [B, T]: rows of text that do not see each other. They may differ in shape.
        table: number of the first tokens for which M and the weights are kept (fewer if M is large).
        ranked: largest number of tokens whose rank is measured, evenly spread over the text (fewer with many groups).
        gradient_tokens: number of the first tokens on which norms and gradients are measured; 0: none.
        source: the name of the text, kept with the result.
        decode: text of a list of ids, for the table; without it the table has the ids as text.
    """
    surveyor = Surveyor(model, table, ranked, gradient_tokens)
    with evaluation_mode(model), torch.no_grad():
        for tokens in surveyor.passes(batches):
            surveyor.add(tokens)
        if surveyor.tally.tokens < 2:
            raise ValueError(f"the text has {surveyor.tally.tokens} tokens; expected at least 2")
        magnitudes, used = surveyor.first_rows.measure(model, surveyor.stack)
    return surveyor.result(magnitudes, used, source, decode)


class Surveyor:
    """The running statistics of one model."""

    def __init__(self, model: nn.Module, table: int, ranked: int, gradient_tokens: int, *, mass: bool = False) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"survey got a {type(model).__name__}; expected an nn.Module that runs a DepthStack")
        self.model, self.stack = model, find_stack(model)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.tally = Tally(self.stack, self.device, mass=mass)
        size = self.tally.groups * self.tally.n**2
        self.first_tokens = FirstTokens(min(table, max(1, TABLE_NUMBERS // size)))
        most = 0 if self.tally.kind == "operator" else max(LEAST_RANKED, MATRICES // self.tally.groups)
        self.spread = SpreadTokens(min(ranked, most))
        self.first_rows = FirstRows(gradient_tokens)
        self.loss, self.predicted, self.context = 0.0, 0, 0
        self.values: Tensor | None = None

    def passes(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """The same rows in the same order, in passes of a size that is fast and fits the limit of memory."""
        waiting: Tensor | None = None
        for batch in batches:
            rows = checked_batch(batch).to(self.device)
            if waiting is not None and waiting.shape[1] == rows.shape[1]:
                rows = torch.cat([waiting, rows])
            elif waiting is not None and len(waiting):
                yield waiting
            size = self.rows_of_pass(rows.shape[1])
            full = len(rows) // size * size
            yield from rows[:full].split(size) if full else ()
            waiting = rows[full:]
        if waiting is not None and len(waiting):
            yield waiting

    def rows_of_pass(self, tokens: int) -> int:
        """How many rows of this length one pass reads; at least one."""
        vectors = 6 * self.tally.n * self.stack.dim * 4  # bytes per token
        return max(1, min(PASS_TOKENS, PASS_BYTES // vectors) // max(1, tokens))

    def add(self, tokens: Tensor) -> None:
        """Run one pass, [B, T], and add it to all statistics."""
        with recording(self.stack) as record, recording_values(self.model) as layers:
            output = self.model(tokens)
        check_complete(self.stack, record)
        start, count = self.tally.tokens, tokens.numel()
        positions = sorted({*self.first_tokens.wanted(start, count), *self.spread.wanted(start, count)})
        kept = torch.tensor([p - start for p in positions], dtype=torch.long, device=self.device)
        M, weights = self.tally.add(record, kept)
        losses = self.add_loss(output, tokens)
        for k, position in enumerate(positions):
            self.spread.offer(position, M[..., k])
            if position < self.first_tokens.count:
                row, column = divmod(position - start, tokens.shape[1])
                loss = None if losses is None or column == 0 else float(losses[row, column - 1])
                one = None if weights is None else weights[..., k]
                self.first_tokens.append(int(tokens[row, column]), loss, M[..., k], one)
        if (values := value_matrix(layers)) is not None:
            total = values.double().flatten(0, 1).sum(0)
            self.values = total if self.values is None else self.values + total
        self.context = max(self.context, tokens.shape[1])
        self.first_rows.offer(tokens)

    def add_loss(self, output: Any, tokens: Tensor) -> Tensor | None:
        """The loss [B, T−1] of each token but the first of a row; None if the model does not return logits."""
        logits = logits_of(output, tokens)
        if logits is None or tokens.shape[1] < 2:
            return None
        losses = next_token_losses(logits, tokens)[0]
        self.loss += float(losses.sum(dtype=torch.float64))
        self.predicted += losses.numel()
        return losses

    def result(
        self, magnitudes: Magnitudes | None, gradients: int, source: str, decode: Callable[[list[int]], str] | None
    ) -> Survey:
        tally, stack = self.tally, self.stack
        tensors, ranks = self.tensors(), self.ranks()
        kv_stack = next((m for m in self.model.modules() if isinstance(m, KVStack)), None)
        kv_names = [kv_stack.name] if kv_stack is not None else [name_of(type(m)) for m in value_mixers(self.model)[:1]]
        figures = {
            "format": FORMAT,
            "depthmix": version(),
            "mechanism": stack.name,
            "options": dataclasses.asdict(stack.config),
            "kv_mechanism": next(iter(kv_names), None),
            "kind": tally.kind,
            "summary": SUMMARY[tally.kind],
            "depth": stack.depth,
            "kinds": [mixer.site.kind for mixer in stack],
            "channels": tally.channels,
            "text": {"source": source, "sha256": None, "context": self.context},
            "tokens": tally.tokens,
            "loss": self.loss / self.predicted if self.predicted else None,
            "samples": {"rank": len(self.spread.kept), "gradients": gradients, "table": len(self.first_tokens.ids)},
            "histogram": {
                "relative_error": tally.histogram.relative_error,
                "absolute_error": tally.histogram.absolute_error,
                "quantiles": list(QUANTILES),
            },
            **self.row_figures(),
            **ranks,
            "magnitudes": None if magnitudes is None else magnitudes.to_dict(),
            "table": self.first_tokens.figures(decode),
        }
        finite = all(bool(t.isfinite().all()) for t in tensors.values())
        content, clean = plain(figures)
        return Survey({**content, "finite": finite and clean}, tensors)

    def tensors(self) -> dict[str, Tensor]:
        tally = self.tally
        M, lower = tally.M, tally.entries
        quantiles = tally.histogram.quantiles(QUANTILES).unflatten(1, (-1, tally.groups))  # [Q, E, G]
        quantiles = quantiles.masked_fill(~M.mean.isfinite(), torch.nan)
        tensors = {
            "M_mean": lower.table(M.mean),
            "M_std": lower.table(M.deviation(tally.tokens)),
            "M_quantiles": lower.table(quantiles.transpose(0, 1)),
            "contribution": lower.table(tally.contribution / tally.tokens),
            "share": lower.table(tally.cosine / tally.tokens),
            "table_M": lower.table(torch.stack(self.first_tokens.M, 1)),
        }
        if tally.weights is not None:
            tensors["weights_mean"] = tally.weight_entries.table(tally.weights.mean)
            tensors["weights_std"] = tally.weight_entries.table(tally.weights.deviation(tally.tokens))
            tensors["table_weights"] = tally.weight_entries.table(torch.stack(self.first_tokens.weights, 1))
        if self.values is not None:
            tensors["values_mean"] = self.values / tally.tokens
        return {name: tensor.cpu() for name, tensor in tensors.items()}

    def row_figures(self) -> dict[str, Any]:
        """Means over tokens and heads of what rows read; None for a row that weighs nothing."""
        tally = self.tally
        entries, heads = tally.weight_entries, tally.shares.mean.shape[1]
        share = entries.table(tally.shares.mean).mean(0)  # [n, C]
        deviation = entries.table(tally.shares.deviation(tally.tokens))
        newest = share[range(tally.n), [(row or [0])[-1] for row in entries.reads]]
        rows = {
            "entropy": tally.entropy.mean,
            "entropy_std": tally.entropy.deviation(tally.tokens * heads),
            "locality": newest,
            "embedding_share": share[:, 0],
            "spread": deviation.square().sum(-1).sqrt().mean(0),
        }
        readers = torch.bincount(entries.columns, minlength=share.shape[1]).clamp(min=1)
        named = tally.named
        return {
            "source_names": [] if named is None else named.names,
            "reads": [list(row) for row in entries.reads],
            "partial": [False] * tally.n if named is None else named.partial,
            "shares_of": "M" if named is None else "weights",
            "rows": {
                name: [x if row else None for x, row in zip(values.tolist(), entries.reads, strict=True)]
                for name, values in rows.items()
            },
            "sinks": (share.sum(0) / readers).tolist(),
        }

    def ranks(self) -> dict[str, Any]:
        """Of M at the sampled tokens; None where M is a summary or not finite."""
        nothing = {"rank": None, "effective_rank": None}
        if not self.spread.kept:
            return nothing
        M = self.tally.entries.table(torch.stack([*self.spread.kept.values()], 1))  # [token, G, n, n]
        if not M.isfinite().all():
            return nothing
        tolerance = 1e-9 if M.dtype == torch.float64 else 1e-5
        rank, soft = semiseparable_rank(M, tolerance), effective_rank(M)
        known = {"mean": float(rank.double().mean()), "max": int(rank.max()), "tolerance": tolerance}
        return {
            "rank": {**known, "declared": self.stack.facts.rank},
            "effective_rank": {"mean": float(soft.mean()), "std": float(soft.std(correction=0))},
        }


def checked_batch(batch: Tensor) -> Tensor:
    if not isinstance(batch, Tensor) or batch.dim() != 2:
        got = f"shape {list(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
        raise TypeError(f"a batch is of {got}; expected tokens [rows, tokens], a list of such tensors in all")
    return batch if batch.numel() else batch[:0]
