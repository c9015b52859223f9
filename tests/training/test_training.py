"""What the loop does to a model, what it tells, and when it stops."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import depthmix as dm
from depthmix.cli import main
from depthmix.models import count_parameters
from depthmix.parallel.layout import Layout
from depthmix.training import (
    BadLoss,
    DataConfig,
    ScheduleConfig,
    TrainConfig,
    flops_per_token,
    initial_model,
    load_run,
    override,
    train,
)
from depthmix.training.identity import FREE
from depthmix.training.optim import Optimizers, parameter_groups
from depthmix.training.overrides import override_all
from depthmix.training.precision import check_precision
from depthmix.training.schedule import rate_factor
from tests.decoders import KIMI, tiny
from tests.runs import CHILD, lines, tiny_run, weights

MOE = {"model__moe": {"experts": 4, "active": 2, "shared": 1, "hidden": 16}}


def test_a_configuration_survives_toml(tmp_path: Path) -> None:
    for mixer in ("residual", "depth_attention", "attnres+value_residual"):
        config = tiny_run(tmp_path / "run", mixer, **MOE)
        assert TrainConfig.from_toml(config.to_toml()) == config
        assert TrainConfig.from_toml(config.to_toml()).digest == config.digest


def test_the_digest_is_of_what_decides_the_result(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run")
    for key, value in zip(FREE, ("a", "b", 7, 9, True, "trackio", "skip", 9, 2), strict=True):
        assert override(config, key, value).digest == config.digest, key
    for key, value in (("parallel.tp", 2), ("parallel.schedule", "GPipe")):
        assert override(config, key, value).digest == config.digest, key
    for key, value in (("run.seed", 1), ("optimizer.lr", 1), ("mixer.block_sublayers", 4), ("data.rows", 8)):
        assert override(config, key, value).digest != config.digest, key
    assert override(config, "optimizer.lr", "1").digest == override(config, "optimizer.lr", "1.0").digest


def test_fields_of_a_loop_and_of_experts_are_set_together(tmp_path: Path) -> None:
    """None of them makes sense alone; in any order, and where some are there already."""
    config = tiny_run(tmp_path / "run")
    assert config.model.loop is None
    loop = [("model.loop.repeats", "2"), ("run.seed", "3"), ("model.loop.first", "0"), ("model.loop.last", "2")]
    looped = override_all(config, loop)
    assert looped.model.loop == dm.LoopConfig(first=0, last=2, repeats=2)
    assert looped.run.seed == 3
    moved = override_all(looped, [("model.layers", "4"), ("model.loop.first", "3"), ("model.loop.last", "4")])
    assert moved.model.loop == dm.LoopConfig(first=3, last=4, repeats=2)
    experts = override_all(config, [("model.moe.experts", "4"), ("model.moe.active", "2"), ("model.moe.hidden", "8")])
    assert experts.model.moe == dm.MoEConfig(experts=4, active=2, hidden=8)


def test_kinds_of_attention_are_set_together_with_their_sizes(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", depth=8)
    sizes = {"rank": 8, "nope": 4, "shared": 2, "value": 4}
    pairs = [("model.kda.heads", "2"), ("model.attention", "kda, kda,mla,kda"), ("model.kda.head_dim", "8")]
    mixed = override_all(config, [*pairs, *((f"model.mla.{name}", str(value)) for name, value in sizes.items())])
    assert mixed.model.attention_kinds == ("kda", "kda", "mla", "kda")
    assert (mixed.model.kda, mixed.model.mla) == (dm.KDAConfig(heads=2, head_dim=8), dm.MLAConfig(**sizes))
    assert TrainConfig.from_toml(mixed.to_toml()).saved() == mixed.saved()
    assert mixed.digest != config.digest
    assert override_all(mixed, [("model.kda.bound", "-5")]).model.kda == dm.KDAConfig(heads=2, head_dim=8, bound=-5)
    back = [("model.attention", "gqa"), ("model.kda", "none"), ("model.mla", "none")]
    assert override_all(mixed, back).digest == config.digest
    with pytest.raises(ValueError, match=r"model\.attention=kda: attention='kda' without kda; expected its sizes"):
        override_all(config, [("model.attention", "kda")])


def test_short_convolutions_take_no_decay_and_no_muon(tmp_path: Path) -> None:
    model = tiny(**KIMI)
    groups = parameter_groups(model, tiny_run(tmp_path / "run").optimizer)
    of = {name: (group["weight_decay"], group["muon"]) for group in groups for name in group["names"]}
    assert of.keys() == dict(model.named_parameters()).keys()
    place = "sublayers.0."
    vectors = ("q_conv", "k_conv", "v_conv", "A_log", "dt_bias", "o_norm.weight", "norm.weight")
    assert {of[place + name] for name in vectors} == {(0.0, False)}
    assert of["sublayers.6.kv_norm.weight"] == (0.0, False)
    matrices = [place + f"{name}_proj.weight" for name in ("q", "k", "v", "f_a", "f_b", "g_a", "g_b", "b", "o")]
    assert {of[name] for name in (*matrices, "sublayers.6.kv_a.weight", "sublayers.6.kv_b.weight")} == {(0.1, True)}


def test_a_run_with_kda_and_mla_learns_and_its_model_generates(tmp_path: Path) -> None:
    mla = {"rank": 8, "nope": 4, "shared": 2, "value": 4}
    parts = {"attention": ("kda", "mla"), "kda": {"heads": 2, "head_dim": 8}, "mla": mla}
    run = tiny_run(tmp_path / "run")
    train(dataclasses.replace(run, model=dataclasses.replace(run.model, **parts)))
    losses = [line["loss"] for line in lines(tmp_path / "run", "train")]
    assert losses[-1] < losses[0] - 0.5
    model = dm.load_model(tmp_path / "run" / "final")
    assert model.config.attention_kinds == ("kda", "mla")
    assert len(dm.generate(model, [[100, 101]], max_new_tokens=3)[0]) == 3


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (
            [("model.loop.first", "0"), ("model.loop.last", "1")],
            r"model\.loop\.first=0, model\.loop\.last=1: loop\.repeats must be set too: loop needs",
        ),
        ([("model.moe.experts", "4")], r"model\.moe\.experts=4: moe\.hidden must be set too"),
        ([("model.loop.repeat", "4")], r"loop has no field 'repeat'\. Did you mean 'repeats'\?"),
    ],
)
def test_fields_that_are_missing_beside_others_are_named(
    pairs: list[tuple[str, str]], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        override_all(tiny_run(tmp_path / "run"), pairs)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("optimizer.rate", "1", "unknown key 'optimizer.rate'"),
        ("nothing.lr", "1", "has no 'nothing'"),
        ("lr", "1", r"unknown key 'lr'\. Did you mean 'optimizer\.lr'\?"),
        (
            "optimizer.weight_decy",
            "1",
            r"Did you mean 'optimizer\.weight_decay'\?",
        ),
        ("optimizer.lr", "fast", "expected a finite number"),
        ("run.steps", "1.5", "expected a whole number"),
        ("run.precision", "float8", "expected one of 'float32', 'bfloat16'"),
        ("mixer.blocks", "2", "no option 'blocks'"),
        ("schedule.warmup", "2", "expected 0 to 1"),
        ("optimizer", "muon", r"expected its fields, such as optimizer\.name"),
        ("model", "3", r"expected its fields, such as model\."),
    ],
)
def test_a_wrong_override_names_the_key(key: str, value: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        override(tiny_run(tmp_path / "run"), key, value)


@pytest.mark.parametrize("text", ["1e3", "007", "true", "2024"])
def test_a_text_stays_the_text_that_was_given(text: str, tmp_path: Path) -> None:
    assert override(tiny_run(tmp_path / "run"), "run.folder", text).run.folder == text


def test_tokens_that_differ_have_folders_that_differ() -> None:
    assert DataConfig().path == Path("data/stdlib_bytes")
    assert DataConfig(folder="here", validation=0.2).path == Path("here")
    several: list[dict[str, Any]] = [
        *({}, {"validation": 0.2}, {"field": "body"}, {"validation": 0.2, "field": "body"}, {"tokenizer": "bpe:300"}),
        *({"source": "a/b"}, {"source": "a-b"}, {"source": "a/b", "validation": 0.1}),
    ]
    assert len({DataConfig(**each).path for each in several}) == len(several)


def test_a_run_reads_the_field_that_its_data_names(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"body": f"row {i} " * 20}) + "\n" for i in range(60)))
    config = tiny_run(tmp_path / "run", data__source=str(rows), data__field="body", run__steps=1)
    train(config)
    with pytest.raises(ValueError, match="was prepared with field='body', not 'text'"):
        train(tiny_run(tmp_path / "other", data__source=str(rows), run__steps=1))


def test_one_dial_derives_the_rest() -> None:
    small, large = TrainConfig.from_dial(4), TrainConfig.from_dial(24, "block_attnres")
    assert large.model.depth == 24
    assert large.model.dim == 768
    assert large.optimizer.lr < small.optimizer.lr
    tokens = large.run.steps * large.tokens_per_step
    assert tokens == pytest.approx(20 * count_parameters(large.model).active_without_embeddings, rel=0.01)


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> TrainConfig:
    assert main(["train", "--print-config", *arguments]) == 0
    return TrainConfig.from_toml(capsys.readouterr().out)


def test_flags_and_keys_change_what_the_dial_derives(capsys: pytest.CaptureFixture[str]) -> None:
    config = printed(["--depth", "4", "--dim", "64", "--mixer", "attnres", "--set", "data.rows=64"], capsys)
    assert (config.model.depth, config.model.dim, config.model.heads) == (4, 64, 2)
    assert config.model == printed(["--depth", "4", "--mixer", "attnres", "--set", "model.dim=64"], capsys).model
    tokens = 20 * count_parameters(config.model).active_without_embeddings
    assert config.run.steps == round(tokens / (64 * 256)), "as many tokens, in fewer steps"
    config = printed(["--data", "notes", "--tokenizer", "bpe:300", "--tokens", "1e5", "--seed", "3"], capsys)
    assert (config.data.source, config.data.tokenizer, config.model.vocab_size) == ("notes", "bpe:300", 300)
    assert (config.run.steps, config.run.seed) == (round(1e5 / config.tokens_per_step), 3)
    assert printed(["--tokens", "1e5", "--set", "run.steps=7"], capsys).run.steps == 7
    for wrong, words in (("--tokens=-1", "tokens=-1.0"), ("--tokens=inf", "tokens=inf"), ("--set=lr", "expected KEY=")):
        assert main(["train", "--print-config", wrong]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_the_rate_warms_up_stays_within_bounds_and_ends_at_its_final_share(kind: Any) -> None:
    schedule = ScheduleConfig(kind=kind, warmup=0.1, decay=0.2, final=0.05)
    rates = [rate_factor(step, 200, schedule) for step in range(200)]
    assert rates[:20] == sorted(rates[:20])
    assert 0 < rates[0] < 0.1
    assert max(rates) == pytest.approx(1)
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[-1] == pytest.approx(0.05)
    if kind == "wsd":
        assert set(rates[20:159]) == {1.0}


@pytest.mark.parametrize("name", dm.list_mechanisms())
@pytest.mark.parametrize("kv", [None, "value_residual"])
def test_each_parameter_is_in_exactly_one_group(name: str, kv: str | None, tmp_path: Path) -> None:
    mixer = name if kv is None else f"{name}+{kv}"
    config = tiny_run(tmp_path / "run", mixer, **MOE, optimizer__name="muon")
    model = initial_model(config)
    made = parameter_groups(model, config.optimizer)
    found = [n for group in made for n in group["names"]]
    assert sorted(found) == sorted(n for n, _ in model.named_parameters())
    for group in made:
        for parameter, n in zip(group["params"], group["names"], strict=True):
            assert parameter is model.get_parameter(n)
            if parameter.dim() < 2 and not n.startswith("depth."):
                assert group["weight_decay"] == 0, n
            if group["muon"]:
                assert parameter.dim() == 2
                assert not n.startswith(("embed", "head", "norm"))
                assert "router" not in n
    muon = {n for group in made if group["muon"] for n in group["names"]}
    assert "sublayers.0.q_proj.weight" in muon
    assert "sublayers.1.gate_proj" not in muon, "[E, F, D] goes to AdamW"
    optimizers = Optimizers([model], config.optimizer)
    assert len([*optimizers.parameters()]) == len(found)


def test_a_device_that_is_not_here_is_named(tmp_path: Path) -> None:
    for name in ("abacus", "meta", "cuda"):
        if name == "cuda" and torch.cuda.is_available():
            continue
        with pytest.raises(ValueError, match=f"device='{name}' is not available; try cpu"):
            train(tiny_run(tmp_path / "run", run__device=name))


def test_arms_share_their_initial_weights_where_names_and_shapes_agree(tmp_path: Path) -> None:
    one, two = (dict(initial_model(tiny_run(tmp_path / "run", m)).named_parameters()) for m in ("residual", "mhc"))
    for name, parameter in one.items():
        assert torch.equal(parameter, two[name]), name
    other = dict(initial_model(tiny_run(tmp_path / "run", "residual", run__seed=1)).named_parameters())
    assert not torch.equal(one["embed.weight"], other["embed.weight"])
    assert not torch.equal(one["sublayers.0.q_proj.weight"], one["sublayers.2.q_proj.weight"])


def test_flops_are_counted_by_hand(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", "residual").model
    d, layers, row = config.dim, config.layers, 16
    layer = 4 * d * d + 3 * d * config.hidden + 2 * d + 2 * config.width
    used = layers * layer + d + config.vocab_size * d
    added = 3 * 2 * d  # by the residual, twice in a layer
    assert flops_per_token(config, row) == 6 * used + layers * (12 * d * (row + 1) // 2 + added)
    looped = dataclasses.replace(config, loop=dm.LoopConfig(first=0, last=1, repeats=3))
    assert flops_per_token(looped, row) == 6 * (used + 2 * layer) + (layers + 2) * (12 * d * (row + 1) // 2 + added)


FORMS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optimizer__name": "muon", "schedule__kind": "wsd"},
    "moe": MOE,
    "accumulated": {"run__accumulate": 2},
    "bfloat16": {"run__precision": "bfloat16"},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_run_learns_and_tells_all_that_it_promises(form: str, tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", **FORMS[form])
    result = train(config)
    trained = lines(tmp_path / "run", "train")
    assert [line["step"] for line in trained] == [*range(1, 13)]
    assert trained[-1]["loss"] < trained[0]["loss"] - 0.3
    assert trained[0]["loss"] == pytest.approx(math.log(256), rel=0.05)
    assert {"tokens", "lr", "grad_norm", "seconds", "tokens_per_second", "memory_bytes"} <= trained[0].keys()
    assert [line["flops"] for line in trained] == [step * result.flops // 12 for step in range(1, 13)]
    assert [line["step"] for line in lines(tmp_path / "run", "validation")] == [6, 12]
    depth = lines(tmp_path / "run", "depth")[-1]
    assert len(depth["output_norm"]) == len(depth["gradient_norm"]) == 4
    assert all(x > 0 for x in depth["output_norm"] + depth["gradient_norm"])
    assert len(depth["query_norm"]) == 4, "the first site reads one source and has none"
    assert len(depth["weight_entropy"]) == 5
    assert depth["weight_entropy"][0] == 0
    with safe_open(tmp_path / "run" / "snapshots" / "step-00000012.safetensors", "pt") as file:
        M = file.get_tensor("M")
    assert M.shape == (5, 5)
    torch.testing.assert_close(M[:, [0, 1, 3]].sum(-1), torch.ones(5))  # the embedding and the first of each block
    torch.testing.assert_close(M[[2, 3, 4], 2], M[[2, 3, 4], 1])  # one weight for a block of two
    assert result.validation_loss == lines(tmp_path / "run", "validation")[-1]["loss"]
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == dataclasses.asdict(result)
    assert train(config) == result, "a complete run is only read"


def test_accumulating_two_halves_is_the_step_of_the_whole(tmp_path: Path) -> None:
    train(tiny_run(tmp_path / "whole", data__rows=4, run__steps=1))
    train(tiny_run(tmp_path / "halves", data__rows=2, run__accumulate=2, run__steps=1))
    one, two = (lines(tmp_path / n, "train")[0] for n in ("whole", "halves"))
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)


def test_norms_and_traces_do_not_touch_the_training(tmp_path: Path) -> None:
    train(tiny_run(tmp_path / "watched", **MOE, run__depth_every=1, run__snapshot_every=1))
    train(tiny_run(tmp_path / "bare", **MOE, run__depth_every=0, run__validate_every=0))
    assert weights(tmp_path / "watched") == weights(tmp_path / "bare")


@pytest.mark.inductor
@pytest.mark.full
def test_a_compiled_run_follows_the_plain_one(tmp_path: Path) -> None:
    for name, compiled in (("plain", False), ("compiled", True)):
        train(tiny_run(tmp_path / name, run__compile=compiled))
    one, two = ([line["loss"] for line in lines(tmp_path / n, "train")] for n in ("plain", "compiled"))
    assert one == pytest.approx(two, rel=1e-3)


def test_an_exploding_loss_stops_with_step_layer_and_last_good_checkpoint(tmp_path: Path) -> None:
    config = tiny_run(
        tmp_path / "run", optimizer__lr=3000.0, run__steps=60, schedule__warmup=0.9, run__checkpoint_every=1
    )
    with pytest.raises(BadLoss) as caught:
        train(config)
    said = str(caught.value)
    assert said.startswith("step ")
    assert "Layer with the largest output: sublayers." in said
    assert "checkpoints/step-" in said
    assert not (tmp_path / "run" / "result.json").exists()


def test_bad_losses_are_skipped_by_choice_but_not_for_ever(tmp_path: Path) -> None:
    config = tiny_run(
        tmp_path / "run", optimizer__lr=3000.0, run__steps=60, schedule__warmup=0.9, run__on_bad_loss="skip"
    )
    with pytest.raises(BadLoss, match="17 bad steps in a row"):
        train(config)
    skipped = lines(tmp_path / "run", "skipped")
    assert len(skipped) >= 16


def test_a_run_that_stopped_goes_on_in_its_folder_by_skipping(tmp_path: Path) -> None:
    """What its message says can be done."""
    broken = {"optimizer__lr": 3000.0, "run__steps": 60, "schedule__warmup": 0.9}
    with pytest.raises(BadLoss, match=r"resume in this one with run\.on_bad_loss=skip"):
        train(tiny_run(tmp_path / "run", **broken))
    stopped = len(lines(tmp_path / "run", "train"))
    with pytest.raises(BadLoss, match="17 bad steps in a row"):
        train(tiny_run(tmp_path / "run", **broken, run__on_bad_loss="skip"))
    assert lines(tmp_path / "run", "skipped")[0]["step"] == stopped + 1


def test_another_configuration_in_the_same_folder_is_refused_with_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_run(tmp_path / "run")
    train(config)
    with pytest.raises(ValueError, match=r"optimizer\.lr: was 0\.01, is now 0\.001"):
        train(override(config, "optimizer.lr", 1e-3))
    assert main(["train", "--folder", str(tmp_path / "run"), "--set", "run.seed=3"]) == 2
    assert "run.seed: was 0, is now 3" in capsys.readouterr().err


def test_a_configuration_that_is_damaged_altered_or_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_run(tmp_path / "run"))
    (tmp_path / "run" / "result.json").unlink()
    file = tmp_path / "run" / "config.toml"
    whole = file.read_text()

    def said() -> str:
        assert main(["train", "--folder", str(tmp_path / "run")]) == 2
        return capsys.readouterr().err

    for old, new, words in (
        ("[model]", "[model", "is damaged: it is not valid TOML"),
        (
            "lr = 0.01",
            "lr = 0.004",
            "differs from the configuration of the checkpoints:\n  optimizer.lr: was 0.01, is now 0.004",
        ),
        ("clip = ", "cut = ", "is not a valid configuration of this version: unknown fields cut in optimizer"),
    ):
        file.write_text(whole.replace(old, new, 1))
        assert f"{file} {words}" in said(), old
    file.unlink()
    assert f"{file} of this run is missing. Restore it" in said()
    assert not file.exists()
    file.write_text(whole)
    train(tiny_run(tmp_path / "run"))


def test_a_start_that_failed_leaves_its_folder_to_the_next(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        train(tiny_run(tmp_path / "run", data__source="nowhere"))
    train(tiny_run(tmp_path / "run", run__steps=1))


def test_other_data_under_a_checkpoint_is_refused(tmp_path: Path) -> None:
    import shutil

    train(tiny_run(tmp_path / "run"))
    (tmp_path / "run" / "result.json").unlink()
    shutil.rmtree(tmp_path / "tokens")
    (tmp_path / "text" / "0.txt").write_text("something else " * 100)
    with pytest.raises(ValueError, match="not those that"):
        train(tiny_run(tmp_path / "run"))


def test_a_cpu_without_the_instruction_is_told_what_to_set() -> None:
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    with pytest.raises(ValueError, match="ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"):
        check_precision("bfloat16", torch.device("cpu"), trial=dies)


def test_two_ranks_follow_the_same_curve_as_one(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "one", **MOE, optimizer__name="muon", run__asynchronous=True)
    train(config)
    (tmp_path / "c.toml").write_text(config.to_toml())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "depthmix", "train"]
    command += ["--folder", str(tmp_path / "two"), "--config", str(tmp_path / "c.toml")]

    def two_ranks() -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=CHILD)
        assert done.returncode == 0, done.stderr
        return done.stderr

    two_ranks()
    for kind, field in (("train", "loss"), ("train", "grad_norm"), ("validation", "loss")):
        one, two = ([line[field] for line in lines(tmp_path / n, kind)] for n in ("one", "two"))
        assert one == pytest.approx(two, rel=2e-3), (kind, field)
    one, two = (lines(tmp_path / n, "depth")[-1] for n in ("one", "two"))
    for field in ("output_norm", "gradient_norm", "read_norm", "contribution", "query_norm", "weight_entropy", "sinks"):
        assert one[field] == pytest.approx(two[field], rel=0.05, abs=1e-3), field
    # One process reads what two wrote.
    (tmp_path / "two" / "result.json").unlink()
    found = load_run(tmp_path / "two").state_dict()
    final = dm.load_model(tmp_path / "two" / "final").state_dict()
    assert all(torch.equal(found[name], final[name]) for name in final)
    # Two go on from a checkpoint of theirs.
    whole = weights(tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-00000012")
    assert "resuming after step 8; estimated time" in two_ranks()
    assert weights(tmp_path / "two") == whole


def test_the_loop_costs_little_more_than_the_bare_step(tmp_path: Path) -> None:
    """Bare: forward, backward and the optimiser's step, in turns with the loop; a generous bound for a busy machine."""
    from depthmix.training import loop

    config = tiny_run(tmp_path / "run", depth=8, run__steps=10_000, data__tokens_per_row=128, data__rows=8)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dim=64, hidden=192),
        run=dataclasses.replace(config.run, depth_every=100),
    )
    Path(config.run.folder).mkdir()
    run = loop.begin(config, Layout(), torch.device("cpu"), lambda event: None)
    tokens = next(run.batches)

    def bare() -> None:
        run.model.loss_of(tokens).backward()
        run.optimizers.step(0.1)
        run.model.zero_grad()

    ratios = []
    for _ in range(15):
        times = []
        for work in (bare, lambda: loop.step(run)):
            begun = time.perf_counter()
            work()
            times.append(time.perf_counter() - begun)
        ratios.append(times[1] / times[0])
    assert sorted(ratios)[len(ratios) // 2] < 1.15, ratios
