"""What `depthmix trace` prints: a survey in a few lines of at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from depthmix.analysis import Survey
from depthmix.support.terminal import print_table, print_wrapped, printable

STRONGEST = 8  # routes that are listed
SINKS = 4


def print_summary(survey: Survey) -> None:
    figures = survey.figures
    print_wrapped(printable(heading(figures)))
    print_wrapped(printable(reading(figures)))
    print()
    print_table(
        "strongest routes between sublayers", ("from", "to", "M", "of the read", "even share"), [*routes(survey)]
    )
    print()
    for label, line in lines(survey):
        print_wrapped(f"{label:17}{printable(line)}", indent=" " * 17)
    if not figures["finite"]:
        print_wrapped("Some figures are not finite numbers: the model overflows on this text.")


def heading(figures: dict[str, Any]) -> str:
    kv = "" if figures["kv_mechanism"] is None else f" + {figures['kv_mechanism']}"
    return f"{figures['mechanism']}{kv}, {figures['depth']} sublayers; M: {figures['summary']}"


def reading(figures: dict[str, Any]) -> str:
    text, loss = figures["text"], figures["loss"]
    told = "" if loss is None else f", loss {loss:.4f}"
    return f"{figures['tokens']:,} tokens of {text['source']}, rows of {text['context']}{told}"


def routes(survey: Survey) -> Iterator[Sequence[str]]:
    """The sublayers' outputs with the largest share of a read, over an even share of its row."""
    share, M = survey["share"], survey["M_mean"].mean(0)
    sizes = {(r, i): float(share[r, i]) for r in range(1, len(share)) for i in range(1, r + 1)}
    ranked = sorted(sizes, key=lambda route: -abs(sizes[route]) * (route[0] + 1))
    kinds = survey.figures["kinds"]
    for r, i in ranked[:STRONGEST]:
        times = f"{abs(sizes[r, i]) * (r + 1):.1f} ×"
        yield place(i, kinds), place(r + 1, kinds), f"{float(M[r, i]):.3f}", f"{sizes[r, i]:.1%}", times


def place(number: int, kinds: Sequence[str]) -> str:
    """Sublayer `number`, from 1."""
    return "head" if number > len(kinds) else f"{number} ({kinds[number - 1]})"


def lines(survey: Survey) -> Iterator[tuple[str, str]]:
    figures, rows = survey.figures, survey.figures["rows"]
    of = "weights over sources" if figures["shares_of"] == "weights" else "|M|"
    yield "shares of", of
    along_read = survey["share"][1:, 0]
    yield "embedding", spread_of(rows["embedding_share"], "{:.1%}")
    yield "of the read", f"{float(along_read.mean()):.1%} of what a row reads comes from the embedding"
    yield "newest source", spread_of(rows["locality"], "{:.1%}")
    yield "entropy", spread_of(rows["entropy"], "{:.2f} nats")
    yield "over tokens", f"{spread_of(rows['spread'], '{:.3f}')} (how far a row's shares are from their mean)"
    yield "read most", ", ".join(f"{name} {share:.1%}" for name, share in most_read(figures))
    yield from rank_lines(figures)
    yield from norm_lines(figures["magnitudes"])


def spread_of(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values[1:] if value is not None]
    if not known:
        return "no row weighs its sources"
    low, mean, high = min(known), sum(known) / len(known), max(known)
    return f"{form.format(mean)} of a row, from {form.format(low)} to {form.format(high)}"


def most_read(figures: dict[str, Any]) -> list[tuple[str, float]]:
    """The sources with the largest mean share in the rows that can read them."""
    names = figures["source_names"] or ["embedding", *(f"output {i + 1}" for i in range(figures["depth"]))]
    known = [(name, share) for name, share in zip(names, figures["sinks"], strict=True) if share is not None]
    return sorted(known, key=lambda pair: -pair[1])[:SINKS]


def rank_lines(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    rank, soft = figures["rank"], figures["effective_rank"]
    if rank is None or soft is None:
        return
    declared = "" if rank["declared"] is None else f", at most {rank['declared']} by its formula"
    tokens = figures["samples"]["rank"]
    yield "rank", f"{rank['mean']:.2f}, effective {soft['mean']:.2f} (mean of {tokens} tokens){declared}"


def norm_lines(norms: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if norms is None:
        return
    yield "norm of reads", along(norms["read_norm"])
    yield "norm of outputs", along(norms["output_norm"])
    if any(gradient is not None for gradient in norms["gradient_norm"]):
        yield "gradient", along(norms["gradient_norm"])


def along(values: Sequence[float | None]) -> str:
    """First, middle and last of some values over depth."""
    known = [value for value in values if value is not None]
    if not known:
        return "not finite"
    return f"{known[0]:.3g}, in the middle {known[len(known) // 2]:.3g}, last {known[-1]:.3g}"
