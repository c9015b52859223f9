"""The page and the figure of a scaling study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from depthmix.analysis.figures import new_figure, save
from depthmix.studies.comparison import Run, seeds_of
from depthmix.studies.comparison_figures import COLOURS, MARKERS, Sweeps
from depthmix.studies.page import Provenance, edge_notes, figure_lines, markdown_table, provenance_lines, sweep_table
from depthmix.studies.published import Published, draw_published, published_lines
from depthmix.studies.scaling import Factor, Fit, factor_between, fit, verdict_of
from depthmix.studies.study import Study, best_rate, read_runs

LAW_HEADINGS = ("arm", "sizes", "a", "95 % interval", "b", "95 % interval")
IRREDUCIBLE_HEADINGS = ("irreducible", "95 % interval")
FACTOR_HEADINGS = ("arm", "compute (FLOPs)", "compute-equivalent factor", "95 % interval")
SIZE_HEADINGS = ("arm", "size", "parameters", "tokens", "compute (FLOPs)", "lr", "seeds", "final loss")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size of an arm: the mean over its seeds."""

    arm: str
    size: str
    runs: tuple[Run, ...]

    @property
    def compute(self) -> float:
        return self.runs[0].flops

    @property
    def loss(self) -> float:
        return math.fsum(run.final for run in self.runs) / len(self.runs)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    points: list[Point]
    fits: dict[str, Fit]  # by arm, the baseline first
    factors: dict[str, list[Factor]]  # by arm, over the baseline's sizes
    verdicts: list[str]
    notes: list[str]
    beside: Published | None = None  # a paper's own figures, drawn and listed with these and part of no fit

    @property
    def has_irreducible(self) -> bool:
        return any(f.has_irreducible for f in self.fits.values())

    @property
    def formula(self) -> str:
        """Of the laws as they were fitted."""
        return f"L(C) = {'irreducible + ' if self.has_irreducible else ''}a (C / unit)^(−b)"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "beside": None if self.beside is None else self.beside.to_dict()}


def read_points(study: Study) -> list[Point]:
    """Of all complete runs of a study, arm by arm."""
    runs = read_runs(study)
    arms = list(dict.fromkeys(arm.mixer for arm in study.arms))
    points = [
        Point(arm=arm.mixer, size=str(arm.size), runs=tuple(run for run in runs if run.arm == arm.label))
        for arm in sorted(study.arms, key=lambda arm: arms.index(arm.mixer))
    ]
    return [point for point in points if point.runs]


def fit_scaling(points: Sequence[Point], *, baseline: str | None = None, irreducible: bool = False) -> Scaling:
    """A law for each arm, and what each arm is worth in the baseline's compute; the first arm's where none is named.

    The factor of an arm rests on the sizes that both have, for both laws.
    """
    arms = list(dict.fromkeys(point.arm for point in points))
    base = baseline or arms[0]
    by_size = {arm: {p.size: p for p in points if p.arm == arm} for arm in [base, *arms]}
    fits: dict[str, Fit] = {}
    factors: dict[str, list[Factor]] = {}
    verdicts, notes = [], []
    for arm, mine in by_size.items():
        shared = [size for size in mine if size in by_size[base] or not by_size[base]]
        try:
            fits[arm] = law_through([mine[size] for size in shared], irreducible)
        except ValueError as error:
            notes.append(f"{arm}: no law ({error})")
            continue
        if fits[arm].law.b <= 0:
            notes.append(f"{arm}: its loss does not fall with compute (b = {fits[arm].law.b:.4f}); do not use this law")
        if arm != base and base in fits:
            theirs = [by_size[base][size] for size in shared]
            baseline_fit = law_through(theirs, irreducible)
            factors[arm] = [factor_between(fits[arm], baseline_fit, p.compute) for p in theirs]
            seeds = min(len(p.runs) for p in (*theirs, *(mine[size] for size in shared)))
            basis = f"{len(shared)} sizes, {seeds_of(seeds)} each"
            verdicts.append(verdict_of(arm, base, max(factors[arm], key=lambda f: f.compute), basis))
    return Scaling(points=list(points), fits=fits, factors=factors, verdicts=verdicts, notes=notes)


def law_through(points: Sequence[Point], irreducible: bool) -> Fit:
    return fit([p.compute for p in points], [p.loss for p in points], irreducible=irreducible)


def render(
    scaling: Scaling, sweeps: Sweeps, provenance: Provenance, figures: Mapping[str, Path], page_folder: Path
) -> str:
    lines = ["# Scaling", "", f"    {provenance.command}", "", *(f"- {line}" for line in verdict_lines(scaling))]
    lines += [
        "",
        "## Laws",
        "",
        *markdown_table(law_headings(scaling), law_cells(scaling)),
        "",
        f"{scaling.formula}, {LAW_NOTE}",
    ]
    lines += figure_lines(figures, "scaling", page_folder)
    if scaling.factors:
        lines += [
            "",
            "## Compute-equivalent factor",
            "",
            *markdown_table(FACTOR_HEADINGS, factor_cells(scaling)),
            "",
            FACTOR_NOTE,
        ]
    lines += ["", "## Sizes", "", *markdown_table(SIZE_HEADINGS, size_cells(scaling))]
    lines += [] if scaling.beside is None else published_lines(scaling.beside)
    if any(best_rate(losses) is not None for losses in sweeps.values()):
        lines += ["", "## Learning rates", "", *sweep_table(sweeps), *edge_notes(sweeps)]
    return "\n".join([*lines, *provenance_lines(provenance)]) + "\n"


def verdict_lines(scaling: Scaling) -> list[str]:
    """What the page begins with and the command line prints: every verdict, what limits all of them, and notes."""
    limits = []
    if any(factor.low is not None for each in scaling.factors.values() for factor in each):
        limits = [
            "Intervals show the scatter of these sizes around the laws, not whether the laws hold beyond them. Compute "
            "is counted in FLOPs, so the time that a mechanism costs is not included."
        ]
    return [*scaling.verdicts, *limits, *scaling.notes]


LAW_NOTE = (
    "C in FLOPs, by least squares in ln L over the means of the seeds. The unit is the geometric mean of each arm's "
    "compute. Intervals are Student's; the degrees of freedom are the number of sizes minus the number of parameters "
    "of the law."
)
FACTOR_NOTE = (
    "The compute that the baseline's law needs for the loss of the arm's law at this compute, divided by this compute."
)


def law_headings(scaling: Scaling) -> Sequence[str]:
    return LAW_HEADINGS + (IRREDUCIBLE_HEADINGS if scaling.has_irreducible else ())


def law_cells(scaling: Scaling) -> list[Sequence[str]]:
    return [
        (
            arm,
            str(len(f.losses)),
            f"{f.law.a:.4f}",
            span(f.intervals.get("a")),
            f"{f.law.b:.4f}",
            span(f.intervals.get("b")),
            *((f"{f.law.irreducible:.4f}", span(f.intervals.get("irreducible"))) if f.has_irreducible else ()),
        )
        for arm, f in scaling.fits.items()
    ]


def console_laws(scaling: Scaling) -> tuple[Sequence[str], list[Sequence[str]]]:
    """The table of the laws for 80 columns: where an irreducible loss was fitted, a and its interval are left out."""
    headings, cells = law_headings(scaling), law_cells(scaling)
    shown = [k for k in range(len(headings)) if not (scaling.has_irreducible and k in (2, 3))]
    return [headings[k] for k in shown], [[row[k] for k in shown] for row in cells]


def span(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.4f} to {ends[1]:.4f}"


def factor_cells(scaling: Scaling) -> list[Sequence[str]]:
    return [
        (
            arm,
            f"{factor.compute:.3g}",
            "never reached" if factor.factor is None else f"{factor.factor:.3f}",
            factor.span,
        )
        for arm, factors in scaling.factors.items()
        for factor in factors
    ]


def size_cells(scaling: Scaling) -> list[Sequence[str]]:
    return [
        (
            p.arm,
            p.size,
            f"{p.runs[0].parameters:,}",
            f"{p.runs[0].tokens[-1]:,.0f}",
            f"{p.compute:.3g}",
            f"{p.runs[0].lr:g}",
            str(len(p.runs)),
            f"{p.loss:.4f}",
        )
        for p in scaling.points
    ]


def draw_scaling(scaling: Scaling, folder: Path) -> dict[str, Path]:
    """Loss against compute, points and laws, both axes in logarithms."""
    if not scaling.points:
        return {}
    figure = new_figure()
    figure.set_size_inches(8, 4.8)
    axis = figure.subplots()
    arms = list(dict.fromkeys(p.arm for p in scaling.points))
    for k, arm in enumerate(arms):
        colour, marker = COLOURS[k % len(COLOURS)], MARKERS[k % len(MARKERS)]
        mine = [p for p in scaling.points if p.arm == arm]
        runs = [run for p in mine for run in p.runs]
        if len(runs) > len(mine):
            axis.plot([r.flops for r in runs], [r.final for r in runs], marker, color=colour, alpha=0.35, markersize=3)
        label = arm
        if (f := scaling.fits.get(arm)) is not None:
            low, high = min(f.compute), max(f.compute)
            xs = [low * (high / low) ** (i / 50) for i in range(51)]
            axis.plot(xs, [f.law.loss(x) for x in xs], color=colour, linewidth=1.2, linestyle="-" if k == 0 else "--")
            label = f"{arm}: b = {f.law.b:.3f}"
        axis.plot([p.compute for p in mine], [p.loss for p in mine], marker, color=colour, markersize=6, label=label)
    if scaling.beside is not None:
        draw_published(axis, scaling.beside)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:.2f}")
    axis.yaxis.set_minor_formatter("{x:.2f}")
    axis.set_xlabel("compute of a run (FLOPs)")
    axis.set_ylabel("final validation loss")
    axis.grid(color="0.92", which="both")
    axis.set_axisbelow(True)
    ncols = 3 if scaling.beside is None else 2  # names of papers are long
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=ncols, fontsize=8, frameon=False)
    save(figure, folder / "scaling.png")
    return {"scaling": folder / "scaling.png"}
