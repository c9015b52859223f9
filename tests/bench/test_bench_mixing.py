"""The time of mixing: its arithmetic and verdicts, and that cheap sublayers leave the mechanism's own work whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from depthmix.bench import CONTROL, Report, Settings, Size, mixing, ratio_rows
from depthmix.bench.mixing import MIXING, MIXING_CPU, MIXING_CPU_MS, MIXING_MS, REAL, TURNS, cheap_sublayers
from depthmix.bench.model import BenchModel, build, options_for, tokens_for
from depthmix.bench.page import render
from depthmix.bench.suite import QUICK, timed_rows
from depthmix.cli import main
from depthmix.cli.bench import BOUNDS

SMALL = Size(dim=64, depth=6, hidden=128, tokens=32)
MIXERS = ("block_attnres", "attnres", "mhc", "denseformer")


class Recorder(TorchDispatchMode):
    """Names of the operators that run while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def with_cheap_sublayers(name: str) -> tuple[BenchModel, BenchModel]:
    """A model with its real sublayers, and the same mechanism with cheap ones."""
    real = build(name, options_for(name, SMALL.depth), SMALL)
    return real, build(name, options_for(name, SMALL.depth), SMALL, cheap_sublayers(real.sublayers, SMALL))


@contextmanager
def recorded_mixing(model: BenchModel) -> Iterator[list[list[str]]]:
    """The operators of every read and every write, in their order."""
    calls: list[list[str]] = []

    def spy(function: Any) -> Any:
        def call(*args: Any) -> Any:
            with Recorder() as recorder:
                result = function(*args)
            calls.append(recorder.names)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for mixer in model.depth.all_mixers():
            patch.setattr(mixer, "read", spy(mixer.read))
            patch.setattr(mixer, "write", spy(mixer.write))
        yield calls


def loss(model: BenchModel) -> Tensor:
    result: Tensor = model(tokens_for(SMALL)).square().mean()
    return result


@pytest.mark.parametrize("name", MIXERS)
def test_reads_and_writes_run_the_same_operators_as_in_a_real_step(name: str) -> None:
    real, cheap = with_cheap_sublayers(name)
    with recorded_mixing(real) as expected:
        loss(real)
    with recorded_mixing(cheap) as calls:
        loss(cheap)
    assert calls == expected
    assert len(calls) == 2 * SMALL.depth + 1, "every site reads, every sublayer writes, the head reads"
    assert sum(map(len, calls)) > 2 * SMALL.depth


def operators_of_backward(model: BenchModel) -> Counter[str]:
    value = loss(model)
    with Recorder() as recorder:
        value.backward()
    return Counter(recorder.names)


@pytest.mark.parametrize("name", MIXERS)
def test_what_a_mechanism_adds_to_the_backward_pass_is_the_same_as_in_a_real_step(name: str) -> None:
    added = []
    for model, plain in zip(with_cheap_sublayers(name), with_cheap_sublayers("residual"), strict=True):
        operators = operators_of_backward(model)
        operators.subtract(operators_of_backward(plain))
        added.append({operator: count for operator, count in operators.items() if count})
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.depth.parameters())
    assert added[0] == added[1]
    assert sum(added[0].values()) > 0


def test_every_query_gets_a_gradient() -> None:
    _, cheap = with_cheap_sublayers("block_attnres")
    loss(cheap).backward()
    queries = [p for key, p in cheap.depth.named_parameters() if key.endswith("query")]
    assert len(queries) == SMALL.depth
    assert all(q.grad is not None and q.grad.abs().min() > 0 for q in queries)


def test_cheap_sublayers_compute_nothing_and_keep_the_weights_out_of_the_graph() -> None:
    real, cheap = with_cheap_sublayers("residual")

    def flops(model: BenchModel) -> int:
        with FlopCounterMode(display=False) as counter:
            loss(model).backward()
        return counter.get_total_flops()

    assert flops(cheap) == 0
    assert flops(real) > 10**6
    real.zero_grad()
    loss(cheap).backward()
    assert all(p.grad is None for p in real.sublayers.parameters())
    kept = {id(p) for p in cheap.parameters()} & {id(p) for p in real.sublayers.parameters()}
    assert not kept


def test_outputs_are_distinct_require_gradients_and_their_inputs_are_kept() -> None:
    _, cheap = with_cheap_sublayers("residual")
    x = tokens_for(SMALL)
    outputs = [sublayer(x) for sublayer in cheap.sublayers]
    again = cheap.sublayers[0](x)
    assert len({y.data_ptr() for y in (*outputs, again)}) == SMALL.depth + 1
    assert all(y.requires_grad and y.shape == x.shape for y in outputs)
    assert not torch.equal(outputs[0], outputs[1])
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        cheap.sublayers[0](x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


def test_the_gradient_of_the_input_is_a_tensor_of_its_own() -> None:
    """A gradient that somebody else holds could not be added to in place, as that of a product can."""
    _, cheap = with_cheap_sublayers("residual")
    x = tokens_for(SMALL).requires_grad_()
    first, second = (torch.autograd.grad(cheap.sublayers[0](x).sum(), x)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert first.data_ptr() not in (second.data_ptr(), cheap.sublayers[0].stored.data_ptr())


def test_the_ratio_is_one_plus_what_is_added_over_the_real_step() -> None:
    times = {REAL: [10.0, 20.0], "residual": [1.0, 2.0], "mhc": [3.0, 6.0], CONTROL: [1.5, 2.0]}
    assert mixing.mixing_ratios(times) == {"mhc": [1.2, 1.2], CONTROL: [1.05, 1.0]}


def test_of_the_turns_in_a_round_the_median_counts() -> None:
    steps = {"residual": lambda: None, "mhc": lambda: None}
    names = list(mixing.with_turns(lambda: None, steps))
    assert names[0] == (REAL, 0)
    assert Counter(name for name, _ in names) == {REAL: 1, "residual": TURNS, "mhc": TURNS}
    assert all(a[0] != b[0] for a, b in pairwise(names)), "never itself behind itself"
    times = {("mhc", 0): [1.0, 9.0], ("mhc", 1): [2.0, 4.0], ("mhc", 2): [50.0, 5.0]}
    assert mixing.medians_of_turns(times) == {"mhc": [2.0, 5.0]}


@pytest.mark.parametrize(
    ("ratios", "control", "verdict"),
    [
        ([1.040, 1.041, 1.042], [1.001, 0.999, 1.000], "holds"),
        ([1.060, 1.061, 1.062], [1.001, 0.999, 1.000], "fails"),
        ([1.045, 1.049, 1.052], [1.001, 0.999, 1.000], "undecided (control 0.999 – 1.001)"),
        ([1.040, 1.041, 1.042], [1.010, 1.012, 1.020], "undecided (control 1.010 – 1.020)"),
        ([1.060, 1.061, 1.062], [0.970, 0.988, 1.000], "undecided (control 0.970 – 1.000)"),
    ],
)
def test_a_bound_is_decided_where_it_is_farther_away_than_the_control(
    ratios: list[float], control: list[float], verdict: str
) -> None:
    samples = {"block_attnres": [[r] for r in ratios], CONTROL: [[c] for c in control]}
    settings = Settings(mixers=("block_attnres",))
    rows = timed_rows({MIXING: samples, MIXING_CPU: samples, "step": samples}, settings, BOUNDS)
    assert {row.part: row.verdict for row in rows if row.what == "block_attnres"} == {
        MIXING: verdict,
        MIXING_CPU: "",
        "step": "",
    }, "one figure decides; whole steps stand beside it"


def test_sources_are_decided_by_the_second_time_of_the_fewest() -> None:
    def verdict(fewest: list[float]) -> str:
        samples = {
            "sources 8": {"8 sources, time of each": [[f] for f in fewest]},
            "sources 64": {"64 sources, time of each": [[1.10], [1.11], [1.12]]},
        }
        return timed_rows(samples, Settings(mixers=("mhc",)), BOUNDS)[-1].verdict

    assert verdict([1.0, 1.01, 0.99]) == "holds"
    assert verdict([1.0, 1.04, 1.05]) == "undecided (control 1.000 – 1.050)"


def test_a_run_gives_ratios_and_milliseconds_by_both_clocks() -> None:
    result = mixing.run({name: options_for(name, SMALL.depth) for name in MIXERS}, vars(SMALL), rounds=2)
    assert list(result) == [MIXING, MIXING_CPU, MIXING_MS, MIXING_CPU_MS]
    for part in (MIXING, MIXING_CPU):
        assert list(result[part]) == [*MIXERS, CONTROL]
    for part in (MIXING_MS, MIXING_CPU_MS):
        assert set(result[part]) == {REAL, "residual", *MIXERS, CONTROL}
    assert all(len(each) == 2 for part in result.values() for each in part.values())
    assert all(ms > 0 for ms in result[MIXING_MS]["residual"])


def test_the_page_shows_the_part_with_the_whole_step_beside_it() -> None:
    ratios = {"block_attnres": [[1.04], [1.041]], CONTROL: [[1.0], [1.001]]}
    ms = {REAL: [[2000.0]], "residual": [[14.0]], "block_attnres": [[95.5]], CONTROL: [[14.1]]}
    rows = [*ratio_rows(MIXING, ratios, bounds=BOUNDS), *ratio_rows(MIXING_CPU, ratios)]
    rows += [row for part in (MIXING_MS, MIXING_CPU_MS) for row in ratio_rows(part, ms, unit="ms")]
    rows += ratio_rows("step", {"block_attnres": [[1.03]], CONTROL: [[0.97]]})
    facts = {"machine": "here", "reads": "torch", "command": "depthmix bench", "rounds": 1, "processes": 2}
    report = Report(**facts, quick=False, sizes=QUICK.to_dict(), rows=rows)
    assert Report.from_json(report.to_json()) == report
    page = render(report, {}, Path())
    assert "takes 14.0 ms (14.0 ms of processor time), its real step 2,000 ms (2,000 ms of processor time)" in page
    assert (
        "| block_attnres | 1.040 × | 1.040 – 1.041 | 1.040 × | 1.030 × | 95.5 ms | 95.5 ms | 2 × 1 | 1.05 | holds |"
        in page
    )


def test_the_command_measures_it_quickly_and_takes_it_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "quick.json"
    command = ["bench", "--quick", "--parts", "mixing", "--mixers", "mhc", "--output", str(output)]
    monkeypatch.setattr(Report, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    assert main(command) == 1
    monkeypatch.undo()
    assert main(command) == 0
    assert "mixing: already measured" in capsys.readouterr().err
    report = Report.from_json(output.read_text())
    assert {row.what for row in report.of(MIXING)} == {"mhc", CONTROL}
    assert {row.unit for row in report.of(MIXING_MS, MIXING_CPU_MS)} == {"ms"}
    assert {(row.figure, row.verdict) for row in report.rows} == {(None, "runs")}, "small sizes say nothing about speed"
