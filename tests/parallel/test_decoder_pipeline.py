"""Pipelines of a Decoder in real processes give the losses, gradients and loads of one process.

Processes are started once for each number of ranks and run all cases of it; a test reports every case that is wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import depthmix as dm
from depthmix.mechanisms import kv_mechanism
from tests.parallel.test_pipeline import TOLERANCE, refuse_mistakes, run_cases

AUXILIARY = {"experts": 4, "active": 2, "shared": 1, "hidden": 16, "balance": "loss", "balance_rate": 0.5}


def case(mixer: str = "block_attnres", form: str = "dense", **settings: Any) -> dict[str, Any]:
    config = {"mixer": {"name": mixer, **dm.mechanism(mixer).variants[0]}} | settings.pop("config", {})
    base = {"form": form, "config": config, "cache": True, "schedule": "Interleaved1F1B", "microbatches": 2}
    return base | settings


def mistakes(case: dict[str, Any], results: list[dict[str, Any]]) -> list[str]:
    """What is wrong with a case, from the results of all ranks."""
    found = []
    dp = case.get("dp", 1)
    difference, name = max(result["difference"] for result in results)
    if not difference <= TOLERANCE:
        found.append(f"gradient of {name} differs by {difference:.1e}")
    for kind in ("loss", "evaluated"):
        off = [value for result in results for value in result[kind]]
        if len(off) != 2 * dp or not max(off) <= TOLERANCE:
            found.append(f"{kind} differs by {off}")
    if {name for result in results for name in result["names"]} != {*results[0]["all_names"]}:
        found.append("stages do not hold every parameter")
    if sorted(results[0]["all_names"] * dp) != sorted(n for result in results for n in result["counted"]):
        found.append("not every parameter is counted once")
    if "dp" not in case and any(result["copies"] for result in results):
        found.append("a rank holds a parameter twice")
    if not all(right for result in results for right in result["loads"]):
        found.append("loads differ")
    if any(counted != wanted for counted, wanted in (result["reductions"] for result in results)):
        found.append(f"reductions in two steps, modules: {[result['reductions'] for result in results]}")
    runs = 2 * 2 * case["microbatches"] * dp  # two steps, two directions
    for unit in ("tensors", "bytes"):
        sent, planned = sum(r["sent"].get(unit, 0) for r in results), runs * results[0]["planned"][unit]
        if sent != planned:
            found.append(f"{sent} {unit} sent, {planned} planned")
    if any(result["left"] for result in results):
        found.append("the store is not empty after a step")
    if any(peak != planned for peak, planned in (result["stored"] for result in results)):
        found.append(f"stored, planned: {[result['stored'] for result in results]}")
    return found


def check(cases: list[dict[str, Any]], ranks: int, folder: Path, seconds: float = 600) -> list[list[dict[str, Any]]]:
    results = run_cases(cases, ranks, folder, seconds, "tests.parallel.decoder_worker")
    refuse_mistakes(cases, results, mistakes)
    return results


LOOP = {"first": 1, "last": 2, "repeats": 3}
ON_TWO = [
    *(case(name, cache=cache) for name in ("block_attnres", "attnres", "mhc", "residual") for cache in (True, False)),
    case(config={"kv_mixer": "depth_attention"}),
    case(config={"moe": AUXILIARY}),
    case(form="moe"),
    case(config={"tie_embeddings": True}),
    case(form="moe", config={"loop": LOOP | {"share_mixers": True}}),
    case(plan={"divide": "flops"}),
    case(schedule="InterleavedZeroBubble", config={"moe": AUXILIARY}),
]


KV = [(name, dict(options)) for name in dm.list_mechanisms(kind="kv") for options in kv_mechanism(name).variants]
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
EVERYTHING_ON_TWO = [
    *(case(name, cache=cache) for name in dm.list_mechanisms() for cache in (True, False)),
    *(case(config={"kv_mixer": {"name": name, **options}}, cache=c) for name, options in KV for c in (True, False)),
    *(
        case(schedule=schedule, plan={"placement": placement}, microbatches=4, **change)
        for schedule, placement in zip(ZERO_BUBBLE, ("loop", "v", "v"), strict=True)
        for change in (
            {},
            {"cache": False},
            {"config": {"kv_mixer": "depth_attention", "moe": AUXILIARY}},
            {"form": "moe", "config": {"loop": LOOP | {"share_mixers": True}, "tie_embeddings": True}},
        )
    ),
    *(case(schedule=schedule, plan={"virtual": 1}) for schedule in ("GPipe", "1F1B")),
    case(form="moe", config={"loop": LOOP}, plan={"virtual": 4}),
    case(form="moe", config={"loop": {"first": 0, "last": 3, "repeats": 2}, "kv_mixer": "value_residual"}),
    case(checkpoint_every=2, config={"moe": AUXILIARY}),
    case("mhc", checkpoint_every=2, config={"kv_mixer": "depth_attention"}),
    case(checkpoint_every=1, schedule="InterleavedZeroBubble"),
    case(form="moe", checkpoint_every=2),
]
FSDP = [
    case(dp=2),
    case(dp=2, cache=False),
    case("attnres", dp=2, config={"kv_mixer": "depth_attention", "moe": AUXILIARY}),
    case(dp=2, form="moe", config={"loop": LOOP, "tie_embeddings": True}),
    case(dp=2, plan={"virtual": 1}, schedule="1F1B"),
    case(dp=2, checkpoint_every=2),
    case(dp=2, fsdp={"reshard_after_forward": False}),
    case(dp=2, config={"layers": 4}, plan={"virtual": 4}),
    case(dp=2, config={"layers": 4}, plan={"virtual": 4}, schedule="InterleavedZeroBubble"),
    *(
        case(dp=2, schedule=schedule, plan={"placement": placement}, microbatches=4, fsdp=fsdp, **change)
        for schedule, placement in zip(ZERO_BUBBLE, ("loop", "v", "v"), strict=True)
        for fsdp, change in (
            ({"reshard_after_forward": True}, {"config": {"moe": AUXILIARY}}),
            ({"reshard_after_forward": False}, {"form": "moe", "config": {"loop": LOOP, "tie_embeddings": True}}),
        )
    ),
]

DEEP = {"layers": 8, "mixer": {"name": "block_attnres", "block_sublayers": 2}}
ON_FOUR = [
    case(config=DEEP, microbatches=4),
    case(config=DEEP, microbatches=4, cache=False),
    case(form="moe", config={"loop": {"first": 0, "last": 3, "repeats": 4, "share_mixers": True}}, microbatches=4),
    case(form="moe", config={"layers": 6, "loop": LOOP, "tie_embeddings": True}, microbatches=4),
]


def test_two_ranks_give_the_losses_and_gradients_of_one_process(tmp_path: Path) -> None:
    check(ON_TWO, 2, tmp_path)


@pytest.mark.full
def test_every_mechanism_and_schedule_on_two_ranks(tmp_path: Path) -> None:
    check(EVERYTHING_ON_TWO, 2, tmp_path, 3600)


@pytest.mark.full
def test_compiled_sublayers_on_two_ranks(tmp_path: Path) -> None:
    check([case(compile=True, cache=cache) for cache in (True, False)], 2, tmp_path, 3600)


@pytest.mark.full
def test_four_ranks_of_two_stages(tmp_path: Path) -> None:
    results = check(ON_FOUR, 4, tmp_path, 3600)
    assert [results[0][number]["planned"]["tensors"] for number in (0, 1)] == [21, 35]


@pytest.mark.full
def test_fsdp2_in_stages_on_four_ranks(tmp_path: Path) -> None:
    check(FSDP, 4, tmp_path, 3600)
