"""Losses that papers report, drawn and listed beside the points of a study; no fit of a study uses them.

Compute is 6 · N · D from the paper's own columns, N active parameters without embeddings and D tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from depthmix.studies.comparison_figures import MARKERS
from depthmix.studies.page import markdown_table
from depthmix.studies.scaling import Fit, fit
from depthmix.studies.study import Study
from depthmix.support.checks import did_you_mean
from depthmix.training.recipes import TABLE, TOKENS_PER_PARAMETER
from depthmix.training.retrofit import count_parameters

PFLOP_S_DAY = 1e15 * 86_400  # FLOPs
POINT_HEADINGS = ("size", "parameters", "tokens", "6·N·D (FLOPs)", "PFLOP/s-days")
LAW_HEADINGS = ("arm", "a", "b", "as printed in the paper")


@dataclass(frozen=True, kw_only=True)
class Published:
    """Losses of one paper over several sizes."""

    source: str
    sizes: tuple[str, ...]
    parameters: tuple[float, ...]  # active, without embeddings
    tokens: tuple[float, ...]
    losses: Mapping[str, tuple[float, ...]]  # by arm, one for each size
    printed: Mapping[str, tuple[float, float]]  # by arm: the paper's own a and b of L = a C^(−b), C in PFLOP/s-days
    note: str

    @property
    def compute(self) -> tuple[float, ...]:
        return tuple(6 * n * d for n, d in zip(self.parameters, self.tokens, strict=True))

    def refit(self) -> dict[str, Fit]:
        """L = a C^(−b) through the paper's points of each arm, C = 6 · N · D in PFLOP/s-days."""
        days = [compute / PFLOP_S_DAY for compute in self.compute]
        return {arm: fit(days, losses) for arm, losses in self.losses.items()}

    def to_dict(self) -> dict[str, Any]:
        laws = {arm: {"a": f.law.loss(1.0), "b": f.law.b} for arm, f in self.refit().items()}
        return {**asdict(self), "compute": self.compute, "refit": laws}


PUBLISHED: dict[str, Published] = {
    "attnres-paper": Published(
        source="arXiv 2603.15031, Table 2",
        sizes=tuple(TABLE),
        parameters=tuple(row.parameters for row in TABLE.values()),
        tokens=tuple(row.tokens for row in TABLE.values()),
        losses={
            "PreNorm": (1.931, 1.895, 1.829, 1.766, 1.719),
            "Block AttnRes": (1.909, 1.875, 1.809, 1.746, 1.693),
            "Full AttnRes": (1.899, 1.874, 1.804, 1.737, 1.692),
            "mHC-lite": (1.906, 1.869, 1.807, 1.747, 1.694),
        },
        printed={"PreNorm": (1.891, 0.057), "Block AttnRes": (1.870, 0.058), "Full AttnRes": (1.865, 0.057)},
        note=(
            "Its models are mixtures of experts with another backbone, training text and vocabulary: the losses cannot "
            "be compared with those of this study, only slopes and gaps between arms. The paper does not report the "
            "compute of a row; its printed laws fit a count that is 1.2 to 1.4 times 6·N·D. FLOPs of this study also "
            "count attention and the head."
        ),
    )
}


def find_published(name: str) -> Published:
    if name not in PUBLISHED:
        raise ValueError(f"unknown beside={name!r}. {did_you_mean(name, PUBLISHED)}Known: {', '.join(PUBLISHED)}")
    return PUBLISHED[name]


def describe_regime(study: Study) -> str:
    """How many tokens per parameter the runs of a study see, compared with the paper's."""
    configs = [arm.config for arm in study.arms if arm.baseline is None]
    ratios = [c.run.steps * c.tokens_per_step / count_parameters(c.model).active_without_embeddings for c in configs]
    return (
        f"tokens per parameter, without embeddings: {span(ratios, '.3g')}. {PUBLISHED['attnres-paper'].source} has "
        f"{TOKENS_PER_PARAMETER:.0f}; this study has {span([r / TOKENS_PER_PARAMETER for r in ratios], '.2g')} times "
        "as many"
    )


def span(values: Sequence[float], form: str) -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def published_lines(published: Published) -> list[str]:
    """The section of a page that lists the paper's points and laws."""
    given = (published.sizes, published.parameters, published.tokens, published.compute, *published.losses.values())
    sizes = []
    for size, n, d, c, *losses in zip(*given, strict=True):
        numbers = (f"{n / 1e6:.0f}M", f"{d / 1e9:.1f}B", f"{c:.3g}", f"{c / PFLOP_S_DAY:.3g}")
        sizes.append((size, *numbers, *(f"{loss:.3f}" for loss in losses)))
    laws = []
    for arm, f in published.refit().items():
        printed = published.printed.get(arm)
        words = "" if printed is None else f"{printed[0]:.3f} C^(−{printed[1]:.3f})"
        laws.append((arm, f"{f.law.loss(1.0):.3f}", f"{f.law.b:.4f}", words))
    return [
        "",
        f"## For comparison: {published.source}",
        "",
        f"These numbers are the paper's. No law or factor above uses them. {published.note}",
        "",
        *markdown_table((*POINT_HEADINGS, *published.losses), sizes),
        "",
        "L(C) = a C^(−b) through these points, C = 6·N·D in PFLOP/s-days:",
        "",
        *markdown_table(LAW_HEADINGS, laws),
    ]


def draw_published(axis: Any, published: Published) -> Sequence[Any]:
    """Draw hollow grey markers and dotted laws, unlike the points of the study; return the drawn lines."""
    drawn = []
    for k, (arm, f) in enumerate(published.refit().items()):
        label = f"{published.source.partition(',')[0]}, {arm}: b = {f.law.b:.4f}"
        style = {"color": "0.5", "linewidth": 0.9, "marker": MARKERS[k % len(MARKERS)], "markerfacecolor": "none"}
        drawn += axis.plot(published.compute, published.losses[arm], linestyle="none", label=label, **style)
        ends = (published.compute[0], published.compute[-1])
        losses = [f.law.loss(end / PFLOP_S_DAY) for end in ends]  # a law is a straight line on logarithmic axes
        drawn += axis.plot(ends, losses, color="0.5", linewidth=0.9, linestyle=":")
    return drawn
