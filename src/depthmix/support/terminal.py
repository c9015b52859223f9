"""Terminal output and child processes: tables, plain texts, messages, progress, durations.

Names from files and from users may look like markup; nothing here interprets them as such.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

T = TypeVar("T")
SOURCE = Path(__file__).parents[2]  # where a child finds this package
BAR = 20  # columns of a bar
REDRAW = 0.2  # seconds between two states of a bar
LINE = 20.0  # seconds between two lines where there is no terminal


def console(*, stderr: bool = False) -> Console:
    """Prints tables, titles and texts without reading markup, emoji codes or highlights into them."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Text of which some parts, given as (text, style), have a style."""
    from rich.text import Text

    return Text.assemble(*parts)


def print_table(title: str, headings: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """A plain table; columns without any content are left out.

    Where it is wider than the terminal, the cells of the first column have lines of their own: no word is broken.
    """
    from rich.cells import cell_len, set_cell_size

    shown = [k for k in range(len(headings)) if any(row[k] for row in cells)] or [0]
    rows = [[row[k] for k in shown] for row in (headings, *cells)]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    stacked = sum(widths) + 2 * (len(widths) - 1) > (room := console().width)
    if title:
        print(title)
    for number, (first, *others) in enumerate(rows):
        padded = [set_cell_size(cell, width) for cell, width in zip(others, widths[1:], strict=True)]
        if stacked:
            print(wrapped(first, room))
            first, widths[0] = "", 0
        print("  ".join([set_cell_size(first, widths[0]), *padded]).rstrip())
        if number == 0:
            print("─" * (sum(widths) + 2 * (len(widths) - 1)))


def wrapped(text: str, width: int, first: str = "", later: str = "") -> str:
    """Broken between words only, with an indent of the first line and one of those after it."""
    lines = textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)


def print_wrapped(text: str, indent: str = "") -> None:
    """On stdout, at the width of the terminal (80 columns where there is none)."""
    print(wrapped(text, console().width, later=indent))


def cut(text: str, width: int) -> str:
    """At most `width` characters, cut after a whole word and marked with an ellipsis."""
    if len(text) <= width:
        return text
    return text[:width].rpartition(" ")[0].rstrip(" ,;:") + "…"


def printable(text: str) -> str:
    """Control characters of names and texts as escapes, so that a terminal does not obey them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def say(text: str) -> None:
    """A message on stderr, at once; above the bar where one is shown. On a terminal it is broken between words."""
    if sys.stderr.isatty():
        width = console(stderr=True).width
        text = "\n".join(wrapped(line, width) for line in text.split("\n"))
    print(text, file=sys.stderr, flush=True)


def format_duration(seconds: float) -> str:
    """In seconds, minutes, hours and minutes, or days and hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24:,} days {hours % 24} h"


class Progress:
    """Progress of some work on stderr: the time left and a bar on a terminal, elsewhere a plain line now and then.

    Only `update` draws, and no thread does, so that nothing disturbs what is measured in between.
    """

    def __init__(self, total: float | None, *, first: float = 0.0, every: float = LINE) -> None:
        """`first` of `total` were done before; without a terminal there is a plain line every `every` seconds."""
        self.total, self.first = total, first
        self.on_terminal = sys.stderr.isatty()
        self.every = REDRAW if self.on_terminal else every
        self.begun = self.shown = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()

    def due(self) -> bool:
        """Whether an update would be shown now."""
        return time.monotonic() - self.shown >= self.every

    def update(self, done: float, text: str) -> None:
        """Show `text` and the time left by the pace so far, unless something was shown a moment ago."""
        if self.due():
            self.show(done, text, self.seconds_left(done))

    def show(self, done: float, text: str, left: float | None) -> None:
        """At once, with `left` seconds as the caller knows them; None: unknown."""
        self.shown = time.monotonic()
        remaining = "" if left is None else f"about {format_duration(left)} left"
        if self.on_terminal:
            self.draw(done, text, remaining)
        else:
            say(f"{remaining}: {text}" if remaining else text)

    def seconds_left(self, done: float) -> float | None:
        if self.total is None or not self.first < done <= self.total:
            return None
        return (time.monotonic() - self.begun) / (done - self.first) * (self.total - done)

    def draw(self, done: float, text: str, remaining: str) -> None:
        """Time left, bar and text in one row; the text is cut where the row is full."""
        from rich import progress as rich

        if self.bar is None:
            columns = [
                rich.TextColumn(f"{{task.{name}}}", markup=False) for name in ("fields[remaining]", "description")
            ]
            self.bar = rich.Progress(
                columns[0],
                rich.BarColumn(BAR),
                columns[1],
                console=console(stderr=True),
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
            )
            self.bar.start()
            self.task = self.bar.add_task("", total=self.total, remaining="")
        room = max(self.bar.console.width - BAR - len(remaining) - 3, 10)
        self.bar.update(self.task, completed=done, description=cut(text, room), remaining=remaining, refresh=True)


def track(items: Iterable[T], label: str, unit: str, total: int) -> Iterator[T]:
    """The same items, with progress."""
    with Progress(total) as progress:
        for done, item in enumerate(items, 1):
            yield item
            progress.update(done, f"{label}: {done} of {total} {unit}")


def child_environment(threads: int | None = None) -> dict[str, str]:
    """Of a child process: ours, with this package before any other of its name, and its number of threads."""
    paths = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    count = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {**os.environ, "PYTHONPATH": paths, **count}


def start_child(module: str, *arguments: str, threads: int | None = None, **streams: Any) -> subprocess.Popen[bytes]:
    """`python -m module arguments` with the streams that `subprocess.Popen` takes.

    In a session of its own: Ctrl-C comes to us alone, and `end_children` hands it on.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=child_environment(threads),
        start_new_session=True,
        **streams,
    )


def end_children(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask those that still run to end, all at once, and wait: a training run writes a checkpoint first."""
    for child in children:
        child.terminate()
    for child in children:
        child.wait()


def describe_signal(code: int) -> str | None:
    """What ended a child process, from its exit code; None where it ended by itself."""
    if code >= 0:
        return None
    name = signal.Signals(-code).name
    return f"ended by {name}" + ("; is there enough memory?" if name == "SIGKILL" else "")
