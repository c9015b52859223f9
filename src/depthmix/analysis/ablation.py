"""Causal importance: cut routes of a running model, and measure how the loss and the predictions change.

Weight is not importance: what a row reads most may change nothing when it is gone. A cut is compared with random cuts
of as many edges in the same rows.

Axes: B sequence, T token, V vocabulary, n = L + 1 rows and sources.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthmix import ops
from depthmix.analysis.cuts import Cut, default_cuts, parse_cut
from depthmix.analysis.edits import editing
from depthmix.analysis.passes import evaluation_mode, logits_of
from depthmix.analysis.recording import find_stack, value_mixers
from depthmix.analysis.routes import Columns
from depthmix.analysis.shares import Shares, shares_read
from depthmix.analysis.statistics import CONFIDENCE, Estimate, estimate
from depthmix.support.checks import check_range
from depthmix.support.files import read_object, version, write_text

FORMAT = 1
AGAIN = "Measure it again: depthmix ablate"
ROUTES, CONTROLS = 24, 4


@dataclass(frozen=True, kw_only=True)
class Change:
    """A mean over sequences with its interval; None where there is one sequence."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, found: Estimate) -> Change:
        return cls(mean=found.mean, low=found.low, high=found.high)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What one cut changes.

    mass: the share of |M| that was cut, the mean over the rows that were cut.
    loss: change of the mean next-token loss, in nats.
    kl: divergence of the predictions from those of the whole model, in nats per token.
    controls: the same numbers for random cuts of as many edges in the same rows.
    """

    name: str
    kind: str
    edges: int
    mass: float
    loss: Change
    kl: Change
    sources: tuple[int, ...] | None = None
    row: int | None = None
    source: int | None = None
    controls: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What `ablate` measured; `to_dict` is the content of ablation.json."""

    mechanism: str
    tokens: int
    rows: int
    loss: float
    renormalise: bool
    how: str
    effects: list[Effect]
    text: Mapping[str, Any] = field(default_factory=dict)
    confidence: float = CONFIDENCE

    def __getitem__(self, name: str) -> Effect:
        for effect in self.effects:
            if effect.name == name:
                return effect
        raise KeyError(f"{name!r} was not cut; expected one of {', '.join(e.name for e in self.effects)}")

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "depthmix": version(), **dataclasses.asdict(self)}

    def save(self, path: str | os.PathLike[str]) -> None:
        write_text(Path(path), json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Ablation:
        content = read_object(Path(path), AGAIN, tuple(f.name for f in dataclasses.fields(cls)))
        if content.get("format") != FORMAT:
            raise ValueError(f"{path} has format {content.get('format')!r}; expected {FORMAT}. {AGAIN}")
        try:
            effects = [read_effect(each) for each in content.pop("effects")]
            return cls(
                effects=effects, **{f.name: content[f.name] for f in dataclasses.fields(cls) if f.name in content}
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged ({error}). {AGAIN}") from error


def read_effect(content: Mapping[str, Any]) -> Effect:
    changes = {name: Change(**content[name]) for name in ("loss", "kl")}
    return Effect(**{**content, **changes, "sources": content["sources"] and tuple(content["sources"])})


@torch.no_grad()
def ablate(
    model: nn.Module,
    tokens: Tensor,
    cuts: Sequence[str | Cut] | None = None,
    *,
    renormalise: bool = False,
    controls: int = CONTROLS,
    routes: int = ROUTES,
    batch: int = 8,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Ablation:
    """Cut routes of `model` and measure the change of its loss and predictions.

    Args:
        model: a model that runs one `DepthStack` and returns logits [B, T, V] (or an object with `logits`).
        tokens: [B, T]; each row is a sequence, and the intervals are over rows: use at least 4.
        cuts: "embedding", "recent", "older", "partial", "source 3", "route 2→7", "value 1→4" or a `Cut`. None: every
            family, every source and the strongest routes.
        renormalise: as in `editing`.
        controls: number of random cuts beside each family, and beside every cut that was asked for by name.
        routes: number of the strongest routes that are cut where `cuts` is None.
        batch: sequences at once.
        seed: of the random cuts.
        progress: called with the number of passes done and their total.
    """
    stack, layers = find_stack(model), len(value_mixers(model))
    check_tokens(tokens)
    check_range("controls", controls, 0)
    check_range("routes", routes, 0)
    with evaluation_mode(model):
        shares = shares_read(model, tokens)
        if cuts is None:
            chosen = default_cuts(stack, shares.strongest(routes), shares.strongest_values(routes))
        else:
            chosen = [cut if isinstance(cut, Cut) else parse_cut(cut, stack, layers) for cut in cuts]
        counts = [controls if cuts is not None or cut.kind == "family" else 0 for cut in chosen]
        rows = {"value": shares.values_readable}
        readable = Columns(stack).readable
        plan = [
            (cut, [cut.shuffled(seed, k, rows.get(cut.kind, readable)) for k in range(n)])
            for cut, n in zip(chosen, counts, strict=True)
        ]
        passes = [each for cut, others in plan for each in (cut, *others)]
        measured = measure(model, tokens, passes, renormalise, batch, progress)
    changes = iter(measured.changes)
    effects = [make_effect(cut, next(changes), [next(changes) for _ in others], shares) for cut, others in plan]
    return Ablation(
        mechanism=stack.name,
        tokens=tokens.numel(),
        rows=len(tokens),
        loss=measured.loss,
        renormalise=renormalise,
        how=measured.how,
        effects=effects,
    )


@dataclass
class Measured:
    """The loss without cuts, and for each cut the changes of loss and the divergences, one number per sequence."""

    loss: float
    changes: list[tuple[list[float], list[float]]]
    how: str


def measure(
    model: nn.Module,
    tokens: Tensor,
    cuts: Sequence[Cut],
    renormalise: bool,
    batch: int,
    progress: Callable[[int, int], None],
) -> Measured:
    """Every cut on every batch of sequences; the whole model's predictions are kept for one batch only."""
    losses: list[float] = []
    changes: list[tuple[list[float], list[float]]] = [([], []) for _ in cuts]
    ran: dict[str, None] = {}  # a set in order
    done, total = 0, len(cuts) * -(-len(tokens) // batch)
    for rows in tokens.split(batch):
        whole = predictions(model, rows)
        before = sequence_losses(whole, rows)
        if not before.isfinite().all():
            raise ValueError("the loss of the model is not finite on this text; expected a trained model")
        losses += before.tolist()
        for cut, (loss, divergence) in zip(cuts, changes, strict=True):
            with cutting(model, cut, renormalise) as sentence:
                after = predictions(model, rows)
            ran[sentence] = None
            change, distance = sequence_losses(after, rows) - before, divergences(whole, after)
            if not (change.isfinite().all() and distance.isfinite().all()):
                raise ValueError(f"without {cut.name} the predictions are not finite; leave this cut out")
            loss += change.tolist()
            divergence += distance.tolist()
            progress(done := done + 1, total)
    return Measured(sum(losses) / len(losses), changes, ". ".join(ran) or "Nothing was cut")


@contextmanager
def cutting(model: nn.Module, cut: Cut, renormalise: bool = False) -> Iterator[str]:
    """While open, the model runs without the edges of `cut`. Yields a sentence that says what runs."""
    if cut.kind == "value":
        with editing(model, values=cut.scale(len(value_mixers(model)))) as edited:
            yield edited.how
    else:
        with editing(model, cut.scale(find_stack(model).depth + 1), renormalise=renormalise) as edited:
            yield edited.how


def predictions(model: nn.Module, tokens: Tensor) -> Tensor:
    """Log-probabilities [B, T, V] after each token."""
    output = model(tokens)
    logits = logits_of(output, tokens)
    if logits is None:
        got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(f"the model returned {got}; expected logits [B, T, V], or an object with `logits`")
    return torch.log_softmax(ops.wide(logits), -1)


def sequence_losses(log_probabilities: Tensor, tokens: Tensor) -> Tensor:
    """[B]: the mean next-token loss of each sequence."""
    return -log_probabilities[:, :-1].gather(-1, tokens[:, 1:, None].long()).squeeze(-1).mean(-1)


def divergences(whole: Tensor, after: Tensor) -> Tensor:
    """[B]: mean divergence of the predictions after a cut; words that the whole model excludes count nothing."""
    terms = torch.where(whole.isneginf(), 0, whole.exp() * (whole - after))
    return terms.sum(-1).mean(-1)


def make_effect(
    cut: Cut, change: tuple[list[float], list[float]], others: Sequence[tuple[list[float], list[float]]], shares: Shares
) -> Effect:
    loss, divergence = (Change.of(estimate(values)) for values in change)
    means = [[sum(values) / len(values) for values in column] for column in zip(*others, strict=True)] or [[], []]
    sources = sorted({source for _, source in cut.edges})
    one = len(cut.edges) == 1
    row = min(row for row, _ in cut.edges) if one else None
    return Effect(
        name=cut.name,
        kind=cut.kind,
        edges=len(cut.edges),
        mass=shares.mass_of(cut.edges, values=cut.kind == "value"),
        loss=loss,
        kl=divergence,
        sources=tuple(sources),
        row=row,
        source=sources[0] if len(sources) == 1 else None,
        controls={"count": len(others), "loss": means[0], "kl": means[1]} if others else None,
    )


def check_tokens(tokens: Tensor) -> None:
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] < 2:
        got = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"tokens: got {got}; expected ids [sequences, tokens] with at least 2 tokens in each row")
