"""`depthmix verify`: the invariants of every mechanism, measured on this machine."""

from __future__ import annotations

import json as json_format
import platform
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
import tyro

from depthmix.analysis.invariants import Check, verify
from depthmix.cli.shared import flag, switch
from depthmix.mechanisms import PluginError, mechanism
from depthmix.mechanisms.registry import naming_plugin, survey
from depthmix.ops.attend import dispatch
from depthmix.support.checks import check_device
from depthmix.support.terminal import console, print_wrapped, styled, track

Outcome = tuple[str, Mapping[str, Any], list[Check]]


EXAMPLES = (
    "depthmix verify attnres mhc",
    "depthmix verify residual --dtype float32 --checks",
)


def run(
    names: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        flag("Mechanisms to check, each with every option.", "[NAME ...]", default="all of them"),
    ] = (),
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16"], flag("Data type of the stream.")
    ] = "float64",
    device: Annotated[str, flag("Device to run on, such as cpu or cuda.", "DEVICE")] = "cpu",
    dim: Annotated[int, flag("Width: a multiple of 8, so that every option fits, at most 4096.", "D")] = 8,
    depth: Annotated[int, flag("Number of sublayers, 4 to 256.", "L")] = 7,
    checks: Annotated[bool, switch("Print every check instead of one line for each set of options.")] = False,
    json: Annotated[bool, switch("Print one JSON object, with the machine and a list of checks.")] = False,
) -> int:
    """Check the invariants of every mechanism and option on this machine.

    Exit code 1 if a check fails or a plug-in is broken. The last line says which backend serves the reads of attnres
    and block_attnres on this device and in this data type.
    """
    if dim % 8 or not 8 <= dim <= 4096 or not 4 <= depth <= 256:
        raise ValueError(f"dim={dim}, depth={depth}; expected a multiple of 8 up to 4096 and a depth of 4 to 256")
    if not names:
        known, broken = survey("depth")
        names = (*known, *broken)
    jobs = [(name, options) for name in names for options in variants(name)]
    kind = getattr(torch, dtype)
    check_device(device)
    work = ((n, o, run_checks(n, o, dtype=kind, device=device, dim=dim, depth=depth)) for n, o in jobs)
    outcomes = list(work) if json else list(track(work, "verifying", "sets of options", len(jobs)))
    where = f"{platform.machine()}, torch {torch.__version__}, {dtype} on {device}, D = {dim}, L = {depth}"
    reads = dispatch.describe(device, kind)
    if json:
        report = {"where": where, "reads": reads, "checks": [*records(outcomes)]}
        print(json_format.dumps(report, indent=2, ensure_ascii=False))
    else:
        print_table(outcomes, where, checks)
        print_wrapped(f"reads of attnres and block_attnres on {device}: {reads}")
    return 0 if all(check.holds for _, _, measured in outcomes for check in measured) else 1


def variants(name: str) -> tuple[Mapping[str, Any], ...]:
    try:
        return mechanism(name).variants
    except PluginError:  # `run_checks` says so
        return ({},)


def run_checks(name: str, options: Mapping[str, Any], **setting: Any) -> list[Check]:
    """The checks; of a plug-in that raises an error, one failed check that tells it."""
    try:
        with naming_plugin(name):
            return verify(name, options, **setting)
    except PluginError as error:
        return [Check(f"can be used: {error}", float("inf"), 0)]


def records(outcomes: list[Outcome]) -> Iterator[dict[str, Any]]:
    for name, options, measured in outcomes:
        for check in measured:
            yield {
                "mechanism": name,
                "options": dict(options),
                "check": check.name,
                "error": check.error if check.error < float("inf") else None,
                "bound": check.bound,
                "holds": check.holds,
            }


def print_table(outcomes: list[Outcome], where: str, every_check: bool) -> None:
    from rich.table import Table

    table = Table(title=f"Invariants: {where}", title_justify="left")
    for heading in ("mechanism", "options", "check", "error", "at most", ""):
        table.add_column(heading, overflow="fold", no_wrap=heading not in ("options", "check"))
    for name, options, measured in outcomes:
        words = " ".join(f"{k}={v}" for k, v in options.items()) or "defaults"
        shown = measured if every_check else [check for check in measured if not check.holds]
        for check in shown:
            mark = styled(("holds", "green") if check.holds else ("FAILS", "red"))
            table.add_row(name, words, check.name, f"{check.error:.1e}", f"{check.bound:.1e}", mark)
        if not shown:
            worst = max((c for c in measured if c.bound > 0), key=lambda c: c.error / c.bound)
            text = f"all {len(measured)}"
            table.add_row(name, words, text, f"{worst.error:.1e}", f"{worst.bound:.1e}", styled(("hold", "green")))
    terminal = console()
    terminal.print(table)
    failed = sum(not check.holds for _, _, measured in outcomes for check in measured)
    total = sum(len(measured) for _, _, measured in outcomes)
    terminal.print(f"{total - failed} of {total} checks hold")
