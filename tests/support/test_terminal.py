"""Progress, durations and messages: a bar on a terminal, plain lines elsewhere; children that end with us."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from depthmix.support import terminal
from depthmix.support.terminal import (
    Progress,
    child_environment,
    describe_signal,
    end_children,
    format_duration,
    start_child,
    track,
)

pty = pytest.importorskip("pty", reason="no pseudo-terminals on Windows")

WORK = """
import time
from depthmix.support import terminal
terminal.REDRAW = terminal.LINE = 0.0
with terminal.Progress(4, every=0.0) as progress:
    for done in range(1, 5):
        time.sleep(0.01)
        progress.update(done, f"work [/b] {done} of 4")
        if done == 2:
            terminal.say("a message [bold]in between")
terminal.say("the end")
"""


def shown_on_a_terminal(code: str) -> str:
    """What a child writes to a stderr that is a terminal."""
    ours, theirs = pty.openpty()
    environment = {**child_environment(), "TERM": "xterm", "COLUMNS": "100"}
    child = subprocess.Popen([sys.executable, "-c", code], stderr=theirs, env=environment)
    os.close(theirs)
    text = b""
    while True:
        try:
            block = os.read(ours, 4096)
        except OSError:  # the other end is closed
            block = b""
        if not block:
            break
        text += block
    os.close(ours)
    assert child.wait() == 0, text.decode()
    return text.decode()


def test_a_table_wider_than_the_terminal_breaks_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["a" * 50, "1", "", "x" * 18], ["b c", "22", "", "y"]]
    terminal.print_table("title", ["name", "number", "empty", "rest"], rows)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["title", f"{'name':50}  number  rest"]
    assert lines[3:] == [f"{'a' * 50}  1       {'x' * 18}", f"{'b c':50}  22      y"]
    terminal.print_table("title", ["name", "number", "empty", "rest"], [["a" * 70, *rows[0][1:]], rows[1]])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:3] == ["name", "  number  rest"]
    assert lines[4:] == ["a" * 70, f"  1       {'x' * 18}", "b c", "  22      y"]
    terminal.print_table("nothing", ["name", "number"], [])
    assert capsys.readouterr().out.splitlines()[:2] == ["nothing", "name"]


def test_on_a_terminal_there_is_a_bar_with_the_time_left_which_goes_away() -> None:
    text = shown_on_a_terminal(WORK)
    assert "━" in text
    assert "work [/b] 1 of 4" in text
    assert "about 0 s left" in text
    assert "a message [bold]in between" in text
    assert text.rstrip().endswith("the end")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"


def test_elsewhere_there_are_plain_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORK], capture_output=True, text=True, check=True, env=child_environment()
    )
    lines = done.stderr.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == [
        *("work [/b] 1 of 4", "work [/b] 2 of 4"),
        "a message [bold]in between",
        *("work [/b] 3 of 4", "work [/b] 4 of 4", "the end"),
    ]
    assert lines[-2] == "about 0 s left: work [/b] 4 of 4"


def test_lines_come_at_intervals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    for second in track(range(1, 61), "work", "rounds", 60):
        now[0] = float(second)
    assert capsys.readouterr().err.splitlines() == [
        "about 40 s left: work: 20 of 60 rounds",
        "about 20 s left: work: 40 of 60 rounds",
        "about 0 s left: work: 60 of 60 rounds",
    ]


def test_the_time_left_counts_what_was_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    progress = Progress(100, first=50)
    now[0] = 10.0
    assert progress.seconds_left(60) == 40.0
    assert progress.seconds_left(50) is None
    assert progress.seconds_left(101) is None, "a total that was too small says nothing"
    assert Progress(None).seconds_left(5) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.4, "0 s"), (99, "99 s"), (100, "2 min"), (5900, "98 min"), (6000, "1 h 40 min"), (86_400, "24 h 0 min")),
        *((86_459, "24 h 1 min"), (172_800, "2 days 0 h"), (1e7, "115 days 18 h"), (1e9, "11,574 days 2 h")),
    ],
)
def test_durations_are_days_hours_and_minutes(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_text_is_cut_after_a_word() -> None:
    text = "step 3/20, loss 2.5173, validation 2.4456"
    assert terminal.cut(text, len(text)) == text
    assert terminal.cut(text, 30) == "step 3/20, loss 2.5173…"
    assert terminal.cut(text, 11) == "step 3/20…"


def test_a_bar_has_the_time_left_in_front_and_no_broken_word() -> None:
    words = "step 3/20, loss 2.5173, validation 2.4456, about some more words that have no room here"
    text = shown_on_a_terminal(WORK.replace("work [/b] {done} of 4", words + " {done}"))
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    row = next(line for line in drawn.splitlines() if "step 3/20" in line)
    assert re.search(r"about \d+ s left +[━╸╺ ]+ step 3/20, loss 2.5173, validation 2.4456, about some more…", row), row


def test_a_message_is_broken_between_words_on_a_terminal_only() -> None:
    words = "a message that is longer than the hundred columns of this terminal and has a_rather_long_name in it, twice"
    code = f"from depthmix.support.terminal import say; say({words!r})"
    assert shown_on_a_terminal(code).split("\r\n") == [words.removesuffix(" twice"), "twice", ""]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == words + "\n"


def test_a_child_has_this_package_and_its_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    environment = child_environment(3)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(terminal.SOURCE), str(tmp_path)]
    assert (terminal.SOURCE / "depthmix").is_dir()


def test_children_end_with_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeper.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    children = [start_child("sleeper", stdout=subprocess.PIPE) for _ in range(2)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        assert os.getsid(child.pid) == child.pid, "Ctrl-C is not theirs"
        child.stdout.close()
    end_children(children)
    assert [describe_signal(child.returncode) for child in children] == ["ended by SIGTERM"] * 2
    assert describe_signal(-signal.SIGKILL) == "ended by SIGKILL; is there enough memory?"
    assert describe_signal(1) is None
