"""A decoder on any layout of ranks trains as it does in one process.

Processes are started once for each number of ranks and run all cases of it; a test reports every case that is wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import depthmix as dm
from depthmix import cli
from depthmix.mechanisms import kv_mechanism
from depthmix.parallel.config import ParallelConfig
from depthmix.parallel.layout import make_layout
from tests.decoders import KIMI, tiny_config
from tests.parallel.test_pipeline import refuse_mistakes, run_cases

FSDP, TP = {"fsdp": 2}, {"tp": 2}
NAIVE, CACHED = {"pp": 2, "pp_cache": False}, {"pp": 2, "virtual_stages": 2}
HSDP = {"replicate": 2, "fsdp": 2}
TWO = (FSDP, TP, NAIVE, CACHED)
FOUR = (FSDP | TP, FSDP | CACHED, TP | CACHED)


def case(mixer: str = "block_attnres", parallel: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    config = {"mixer": {"name": mixer, **dm.mechanism(mixer).variants[0]}} | settings.pop("config", {})
    base: dict[str, Any] = {"form": "dense", "config": config, "parallel": parallel, "dtype": "float64"}
    base |= {"steps": 3, "rows": 4, "accumulate": 2, "tokens": 7, "optimizer": "adamw", "clip": 0.5, "evaluate": [2]}
    base |= {"recompute": None, "compile": False, "stance": "fail_on_recompile", "bfloat16": False}
    assert settings.keys() <= base.keys()
    return base | settings


MECHANISMS = [
    *((name, {}) for name in dm.list_mechanisms()),
    *(
        (mixer, {"kv_mixer": {"name": name, **kv_mechanism(name).variants[0]}})
        for name, mixer in zip(dm.list_mechanisms(kind="kv"), ("block_attnres", "residual"), strict=False)
    ),
]


def every(layouts: tuple[dict[str, Any], ...], **settings: Any) -> list[dict[str, Any]]:
    """Every mechanism on every layout; the layouts of one mechanism share a reference."""
    return [case(name, layout, config=dict(more), **settings) for name, more in MECHANISMS for layout in layouts]


def mistakes(case: dict[str, Any], results: list[dict[str, Any]]) -> list[str]:
    """What is wrong with a case, from the results of all ranks."""
    if errors := [result["error"] for result in results if "error" in result]:
        return errors[:1]
    found = []
    single = case["dtype"] == "float32"
    step, last = (1e-5, 1e-5) if single else (1e-11, 1e-9)
    if not all(result["start"] for result in results):
        found.append("whole_state before the first step is not the one of one process")
    difference, name = max(result["gradient"] for result in results)
    if case["bfloat16"]:
        least = 0.95 if "kda" in case["config"].get("attention", ()) else 0.99  # rounding adds up in a state
        if (angle := min(result["cosine"] for result in results)) < least:
            found.append(f"cosine of gradients {angle}")
        if (off := max(value for result in results for value in result["losses"][:1])) > 0.02:
            found.append(f"loss differs by {off:.1e}")
        return found
    if not difference <= step:
        found.append(f"gradient of {name} differs by {difference:.1e}")
    for kind, limit in (("evaluated", step), ("losses", last), ("norms", last)):
        off = max((value for result in results for value in result[kind]), default=0.0)
        if not off <= limit:
            found.append(f"{kind} differ by {off:.1e}: {results[0][kind]}")
    if not single:
        difference, name = results[0]["weights"]
        if not difference <= last:
            found.append(f"{name} after {case['steps']} steps differs by {difference:.1e}")
    if not results[0]["names"] or {n for r in results for n in r["held"]} != {*results[0]["all"]}:
        found.append("ranks do not hold every parameter")
    if not all(result["clipped"] for result in results):
        found.append("gradients are not clipped")
    depth = tiny_config(case["form"], **case["config"]).depth
    if "tp" in case["parallel"] and "pp" not in case["parallel"] and not case["recompute"]:
        found += wrong_calls("evaluated", depth * len(case["evaluate"]), results)
        found += wrong_calls("step", 2 * depth * case["accumulate"], results)  # forward and backward
    if loads := sorted({name for result in results for name in result["loads"]}):
        found.append(f"loads differ: {loads}")
    return found


def wrong_calls(when: str, want: int, results: list[dict[str, Any]]) -> list[str]:
    """Tensor parallelism gathers and scatters once per sublayer, and never for mixers."""
    wrong = [r["calls"][when] for r in results if r["calls"][when] != {"all_gather": want, "reduce_scatter": want}]
    return [f"{call} instead of {want} each for {when}" for call in wrong[:1]]


def check(cases: list[dict[str, Any]], ranks: int, folder: Path, seconds: float = 600) -> list[list[dict[str, Any]]]:
    results = run_cases(cases, ranks, folder, seconds, "tests.parallel.layout_worker")
    refuse_mistakes(cases, results, mistakes)
    return results


ONE = {"steps": 1, "accumulate": 1, "evaluate": [3]}
SINGLE = {"dtype": "float32", "steps": 1}
BOTH = ("block_attnres", "mhc")  # with HSDP
LOOP = {"first": 1, "last": 2, "repeats": 3}
AUXILIARY = {"experts": 4, "active": 2, "shared": 1, "hidden": 16, "balance": "loss", "balance_rate": 0.5}
SCALED = {"experts": 4, "active": 2, "shared": 1, "hidden": 16, "scale": 2.5, "dense_layers": 1}
SOME = (
    {"form": "moe"},
    {"config": {"moe": AUXILIARY}},
    {"form": "moe", "config": {"moe": SCALED}},
    {"config": {"tie_embeddings": True}},
    {"form": "moe", "config": {"loop": LOOP}},
    {"config": {"loop": LOOP | {"share_mixers": True}}},
    {"config": {"loop": LOOP | {"share_mixers": True}, "kv_mixer": "value_residual"}},
    {"recompute": 3},
    {"form": "moe", "recompute": 3, "config": {"kv_mixer": "depth_attention"}},
    {"evaluate": [1, 2, 3, 5, 8]},
    {"optimizer": "muon"},
    {"optimizer": "muon", "form": "moe", "config": {"tie_embeddings": True, "loop": LOOP}},
    {"config": {"mixer": {"name": "block_attnres", "block_sublayers": 3}}, "accumulate": 1},
)
UNSHARED = {"virtual_stages": 1}  # FSDP2 cannot shard a looped layer in two stages of a rank


def some(*layouts: dict[str, Any]) -> list[dict[str, Any]]:
    """Other kinds of decoders, options and optimisers on every layout."""
    return [
        case("block_attnres", layout | UNSHARED if "fsdp" in layout and "loop" in str(change) else layout, **change)
        for change in SOME
        for layout in layouts
    ]


def test_every_mechanism_takes_the_step_of_one_process_on_two_ranks(tmp_path: Path) -> None:
    attention = [case("block_attnres", layout, config=KIMI, tokens=20, **ONE) for layout in (FSDP, CACHED)]
    check([*every((FSDP, TP, CACHED), **ONE), *attention], 2, tmp_path)


@pytest.mark.full
def test_every_mechanism_on_two_ranks(tmp_path: Path) -> None:
    results = check(every(TWO), 2, tmp_path, 1800)
    assert results[0][-1]["cuts"] == [0, 1, 3, 4, 6], "blocks are of two sublayers"


@pytest.mark.full
def test_every_mechanism_on_two_ranks_in_single_precision(tmp_path: Path) -> None:
    check(every(TWO, **SINGLE), 2, tmp_path, 1800)


@pytest.mark.full
def test_every_mechanism_on_four_ranks(tmp_path: Path) -> None:
    check([*every(FOUR), *(case(name, HSDP) for name in BOTH)], 4, tmp_path, 1800)


@pytest.mark.full
def test_every_mechanism_on_four_ranks_in_single_precision(tmp_path: Path) -> None:
    check([*every(FOUR, **SINGLE), *(case(name, HSDP, **SINGLE) for name in BOTH)], 4, tmp_path, 1800)


@pytest.mark.full
def test_the_attention_of_kimi_linear_on_two_ranks(tmp_path: Path) -> None:
    looped = KIMI | {"loop": LOOP}
    changes: list[dict[str, Any]] = [{"optimizer": "muon"}, {"recompute": 3}, {"config": looped}, {"form": "moe"}]
    schedules = [CACHED | {"schedule": "InterleavedZeroBubble"}, CACHED | {"divide": "flops"}]
    cases = [
        case("attnres", layout, **{"config": KIMI, "tokens": 20} | change)
        for change in changes
        for layout in TWO
        if layout is not TP
    ]
    check([*cases, *(case("mhc", layout, config=KIMI, tokens=20) for layout in schedules)], 2, tmp_path, 1800)


@pytest.mark.full
def test_experts_tied_embeddings_loops_checkpointing_and_muon_on_two_ranks(tmp_path: Path) -> None:
    schedules = ("LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    more = [case("attnres", CACHED | {"schedule": schedule}) for schedule in schedules]
    cases = [*some(*TWO), *more, case("attnres", CACHED | {"divide": "flops"})]
    check_mixtures(cases, check(cases, 2, tmp_path, 1800))


@pytest.mark.full
def test_experts_tied_embeddings_loops_checkpointing_and_muon_on_four_ranks(tmp_path: Path) -> None:
    cases = [*some(*FOUR, HSDP), case("attnres", TP | CACHED | {"schedule": "InterleavedZeroBubble"})]
    check_mixtures(cases, check(cases, 4, tmp_path, 1800))


def check_mixtures(cases: list[dict[str, Any]], results: list[list[dict[str, Any]]]) -> None:
    """Mixtures of experts that are balanced by a bias had a load, which `mistakes` has compared."""
    for number, case in enumerate(cases):
        counted, held = zip(*(of_rank[number]["mixtures"] for of_rank in results), strict=True)
        assert counted == held if case["form"] == "moe" else not any(counted)


@pytest.mark.full
def test_bfloat16_is_near_single_precision(tmp_path: Path) -> None:
    half = {"bfloat16": True, "dtype": "float32", "steps": 1, "evaluate": []}
    names = ("residual", "block_attnres", "mhc")
    cases = [case(name, layout, **half) for name in names for layout in TWO]
    check([*cases, *(case("block_attnres", layout, config=KIMI, **half) for layout in (FSDP, NAIVE))], 2, tmp_path)


@pytest.mark.full
def test_bfloat16_on_four_ranks_is_near_single_precision(tmp_path: Path) -> None:
    half = {"bfloat16": True, "dtype": "float32", "steps": 1, "evaluate": []}
    check([case("block_attnres", layout, **half) for layout in (*FOUR, HSDP)], 4, tmp_path)


@pytest.mark.full
@pytest.mark.inductor
def test_24_compiled_sublayers_are_exact_and_never_run_without_the_compiler(tmp_path: Path) -> None:
    """The worker raises an error where torch would give up compiling, and where a later step compiles anything."""
    deep = {"compile": True, "config": {"layers": 12}, "evaluate": []}
    cases = [case("block_attnres", layout, **deep) for layout in (FSDP, NAIVE, CACHED)]
    without = case("block_attnres", FSDP, stance="force_eager", **deep)  # shows that the count counts
    for of_rank in check([*cases, without], 2, tmp_path, 1800):
        assert all(result["graphs"] for result in of_rank)
        *compiled, eager = [result["uncompiled"] for result in of_rank]
        assert compiled == [0, 0, 0]
        assert eager == 24 * 2, "micro-batches"


ERRORS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    # what: (parallel, model, arguments of make_layout, words of the message)
    "too many stages": (
        {"pp": 2, "virtual_stages": 4}, {}, {"processes": 2},
        ("parallel.pp=2", "virtual_stages=4", "8 stages for 6 sublayers", "at most 6"),
    ),
    "heads": (
        {"tp": 3}, {"kv_heads": 4}, {"processes": 3}, ("parallel.tp=3", "model.heads=4", "divides it", "1, 2, 4"),
    ),
    "kv_heads": ({"tp": 4}, {}, {"processes": 4}, ("parallel.tp=4", "model.kv_heads=2", "divides it", "1, 2")),
    "hidden": ({"tp": 2}, {"hidden": 41}, {"processes": 2}, ("parallel.tp=2", "model.hidden=41", "divides it", ": 1")),
    "expert width": (
        {"tp": 2}, {"moe": {"experts": 4, "active": 2, "hidden": 15}}, {"processes": 2},
        ("parallel.tp=2", "model.moe.hidden=15", "divides it", ": 1"),
    ),
    "width of the dense layers before experts": (
        {"tp": 2}, {"hidden": 41, "moe": {"experts": 4, "active": 2, "hidden": 16, "dense_layers": 1}},
        {"processes": 2}, ("parallel.tp=2", "model.hidden=41", "divides it", ": 1"),
    ),
    "processes": ({"tp": 2}, {}, {"processes": 3}, ("tp=2", "on 3 processes", "expected 2 or a multiple", "torchrun")),
    "all processes": (
        {"fsdp": 2, "pp": 2}, {}, {"processes": 8},
        ("pp=2", "fsdp=2", "on 8 processes", "expected 4.", "--nproc-per-node 4"),
    ),
    "rows": (
        {"replicate": 2}, {}, {"processes": 4, "rows": 6},
        ("data.rows=6", "4 data-parallel ranks", "a multiple, such as 4"),
    ),
    "micro-batches": (
        {"pp": 2, "microbatches": 3}, {}, {"processes": 2}, ("parallel.microbatches=3", "4 rows", "a divisor of 4"),
    ),
    "rows of a schedule": (
        {"pp": 2, "virtual_stages": 2}, {}, {"processes": 2, "rows": 3},
        ("3 rows", "a multiple of 2", "Interleaved1F1B", "data.rows", "a multiple of 4"),
    ),
    "virtual stages of a schedule": (
        {"pp": 2, "virtual_stages": 2, "schedule": "1F1B"}, {}, {"processes": 2},
        ("parallel.virtual_stages=2", "1F1B", "expected 1", "parallel.schedule=Interleaved1F1B"),
    ),
    "V-shaped schedule": (
        {"pp": 2, "schedule": "ZBVZeroBubble"}, {}, {"processes": 2},
        ("parallel.virtual_stages=1", "ZBVZeroBubble", "expected 2", "parallel.schedule=InterleavedZeroBubble"),
    ),
    "interleaved schedule": (
        {"pp": 2, "schedule": "LoopedBFS"}, {}, {"processes": 2},
        ("parallel.virtual_stages=1", "LoopedBFS", "at least 2", "parallel.schedule=GPipe"),
    ),
    "too few micro-batches": (
        {"pp": 2, "schedule": "1F1B", "microbatches": 1}, {}, {"processes": 2},
        ("microbatches=1", "'1F1B'", "at least as many as stages, 2"),
    ),
    "compile": (
        {"tp": 2}, {}, {"processes": 2, "compile": True}, ("run.compile=true", "parallel.tp=2", "tp=1", "FSDP2"),
    ),
    "looped layer in two stages": (
        {"pp": 2, "virtual_stages": 2}, {"loop": LOOP}, {"processes": 4},
        ("sublayers.3", "stages 1 and 3", "rank 1", "each parameter in one stage", "parallel.virtual_stages=1"),
    ),
    "tied embedding in two stages": (
        {"pp": 2, "virtual_stages": 2, "schedule": "ZBVZeroBubble"}, {"tie_embeddings": True}, {"processes": 4},
        ("embed.weight", "stages 0 and 3", "rank 0", "not V-shaped"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ERRORS)
def test_a_layout_that_cannot_work_is_refused_with_what_would(what: str) -> None:
    parallel, model, given, words = ERRORS[what]
    settings: dict[str, Any] = {"rows": 4, "tokens": 7} | given
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make_layout(ParallelConfig(**parallel), tiny_config(**model), **settings)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ep": 2}, ("parallel.ep=2", "expected 1", "parallel.tp")),
        ({"cp": 2}, ("parallel.cp=2", "expected 1", "parallel.tp", "parallel.pp")),
        ({"virtual_stages": 2}, ("parallel.virtual_stages=2", "parallel.pp=1", "expected 1")),
        ({"schedule": "Interleaved"}, ("'Interleaved'", "Did you mean", "Interleaved1F1B", "GPipe")),
        ({"divide": "equal"}, ("divide='equal'", "'count', 'flops'")),
        ({"tp": 0}, ("parallel.tp=0", "1")),
    ],
)
def test_a_configuration_that_no_layout_has_is_refused_with_what_would_work(
    fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        ParallelConfig(**fields)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", "2"], ("tp=2", "on 1 process;", "torchrun --nproc-per-node 2")),
        (["--pp", "2", "--fsdp", "2"], ("pp=2", "fsdp=2", "on 1 process;", "torchrun --nproc-per-node 4")),
        (["--ep", "2"], ("parallel.ep=2", "parallel.tp")),
        (["--cp", "2"], ("parallel.cp=2", "parallel.tp")),
        (["--set", "parallel.ep=2"], ("parallel.ep=2", "parallel.tp")),
        (["--virtual-stages", "2"], ("parallel.virtual_stages=2", "parallel.pp=1")),
    ],
)
def test_the_command_line_refuses_a_layout_before_any_process_group(
    flags: list[str],
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    begun: list[object] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: begun.append(args))
    folder = tmp_path / "run"
    try:
        code: object = cli.main(["train", "--depth", "4", "--steps", "2", "--folder", str(folder), *flags])
    except SystemExit as end:  # from the parser of options
        code = end.code
    message = capsys.readouterr().err
    assert code == 2
    assert [word for word in words if word not in message] == [], message
    assert not begun
    assert not folder.exists()
