"""Runs that continue the pretraining of a model of transformers: start, training, files, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import depthmix as dm
from depthmix.analysis import ablate, survey
from depthmix.cli import main
from depthmix.data import Batches
from depthmix.training import TrainConfig, flops_per_token, load_run, open_corpus, override, score, train
from depthmix.training.loop import begin
from depthmix.training.optim import parameter_groups
from depthmix.training.retrofit import RetrofitConfig, count_parameters
from tests.runs import lines, start, steps_done, weights

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthmix[hf]'")
from depthmix.hf.base import load_folder, sizes_of_folder  # noqa: E402
from depthmix.hf.continued import ContinuedModel, wrapped  # noqa: E402
from depthmix.hf.generation import stream  # noqa: E402
from depthmix.training.build import layout_of, open_run  # noqa: E402
from tests.hf.base_models import CONFIGS, continued_run, save_base  # noqa: E402

CPU = torch.device("cpu")
FAST = ("residual", "attnres+value_residual")
KEEPING = ["residual", "block_attnres", "depth_attention", "attnres+value_residual", "mhc"]


def first_batch(config: TrainConfig) -> torch.Tensor:
    data = config.data
    batches = Batches(open_corpus(data).train, tokens_per_row=data.tokens_per_row, rows=data.rows, seed=config.run.seed)
    return next(iter(batches))


def moved(model: Any) -> float:
    """The largest query."""
    return max(p.detach().abs().max().item() for name, p in model.named_parameters() if name.endswith("query"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = continued_run(tmp_path_factory.mktemp("finished") / "run", mixer__num_blocks=2)
    train(config)
    return config


@pytest.mark.parametrize(
    "mixer", [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in KEEPING]
)
def test_the_first_loss_is_that_of_transformers(mixer: str, tmp_path: Path) -> None:
    quiet = {"run__validate_batches": 1, "run__depth_every": 0, "run__snapshot_every": 0}
    config = continued_run(tmp_path / "run", mixer, run__steps=1, **quiet)
    train(config)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    tokens = first_batch(config)
    with torch.no_grad():
        expected = float(base(tokens, labels=tokens).loss)
    assert lines(tmp_path / "run", "train")[0]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("mixer", ["residual", "block_attnres"])
def test_every_kind_of_model_starts_with_its_own_loss_and_learns(kind: str, mixer: str, tmp_path: Path) -> None:
    config = continued_run(tmp_path / "run", mixer, kind=kind, run__validate_every=0)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    tokens = first_batch(config)
    with torch.no_grad():
        expected = float(base(tokens, labels=tokens).loss)
    train(config)
    losses = [line["loss"] for line in lines(tmp_path / "run", "train")]
    if kind != "gpt2":  # which trains with dropout
        assert losses[0] == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0] - 0.15


def test_the_loss_falls_queries_move_and_diagnostics_are_written(finished: TrainConfig) -> None:
    folder = Path(finished.run.folder)
    losses = [line["loss"] for line in lines(folder, "train")]
    assert losses[-1] < losses[0] - 0.5
    assert [line["step"] for line in lines(folder, "validation")] == [6, 12]
    depth = lines(folder, "depth")[-1]
    assert len(depth["output_norm"]) == 4
    assert depth["query_norm"][-1] > 0.01
    M = load_file(folder / "snapshots" / "step-00000012.safetensors")["M"]
    assert M.shape == (5, 5)
    assert moved(load_run(folder)) > 0.01
    assert train(finished).steps == 12, "a complete run is only read"


def test_the_final_folder_gives_the_logits_of_the_run(tmp_path: Path) -> None:
    config = continued_run(tmp_path / "run", "attnres+value_residual", run__steps=3)
    run = begin(config, layout_of(config), CPU, lambda event: None)
    run.close()
    train(config)
    run = begin(config, layout_of(config), CPU, lambda event: None)  # from the last checkpoint
    run.close()
    tokens = first_batch(config)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    with torch.no_grad():
        assert torch.allclose(loaded(tokens).logits, run.model.roots[0].eval()(tokens).logits, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    assert tokenizer("depth").input_ids == [*b"depth"]
    assert (tmp_path / "run" / "final" / "tokenizer_config.json").is_file()
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    for words in ("# qwen3 with attnres and value_residual\n", "| began with | base, SHA-256 ", "| steps | 3 |"):
        assert words in card, words


@pytest.mark.full
@torch.no_grad()
def test_a_new_process_loads_the_final_folder(finished: TrainConfig, tmp_path: Path) -> None:
    folder, tokens = Path(finished.run.folder), first_batch(finished)
    expected = load_run(folder)(tokens).logits
    save_file({"tokens": tokens, "logits": expected.contiguous()}, tmp_path / "expected.safetensors")
    script = (
        "import sys, torch, depthmix\nfrom safetensors.torch import load_file\nimport transformers\n"
        "known = load_file(sys.argv[2])\nm = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "assert torch.allclose(m(known['tokens']).logits, known['logits'], atol=1e-5)"
    )
    given = [str(folder / "final"), str(tmp_path / "expected.safetensors")]
    subprocess.run([sys.executable, "-c", script, *given], check=True)


def test_without_a_mechanism_transformers_alone_reads_the_result(tmp_path: Path) -> None:
    config = continued_run(tmp_path / "run", "residual", run__steps=2)
    train(config)
    final = tmp_path / "run" / "final"
    assert json.loads((final / "config.json").read_text())["model_type"] == "qwen3"
    assert load_file(final / "model.safetensors").keys() == load_file(tmp_path / "base" / "model.safetensors").keys()
    loaded, tokens = transformers.Qwen3ForCausalLM.from_pretrained(final), first_batch(config)
    assert torch.allclose(loaded(tokens).logits, load_run(tmp_path / "run")(tokens).logits, atol=1e-6)


@pytest.mark.parametrize("mixer", ["attnres", pytest.param("depth_attention", marks=pytest.mark.full)])
def test_a_frozen_base_keeps_its_bits(mixer: str, tmp_path: Path) -> None:
    config = continued_run(tmp_path / "run", mixer, freeze_base=True)
    train(config)
    before = load_folder(tmp_path / "base", torch.float32).state_dict()
    after = load_run(tmp_path / "run").state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    mixers = {name: tensor for name, tensor in after.items() if "depthmix" in name and "_extra_state" not in name}
    assert mixers
    fresh = wrapped(load_folder(tmp_path / "base", torch.float32), config.model.wrapping()).state_dict()  # type: ignore[union-attr]
    assert any(not torch.equal(fresh[name], tensor) for name, tensor in mixers.items())


def test_a_run_resumed_from_an_earlier_checkpoint_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = continued_run(tmp_path / "run", "block_attnres+depth_attention")
    train(config)
    before = weights(tmp_path / "run"), lines(tmp_path / "run", "depth")[-1]["output_norm"]
    (tmp_path / "run" / "result.json").unlink()
    for step in (8, 12):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    train(config)
    assert (weights(tmp_path / "run"), lines(tmp_path / "run", "depth")[-1]["output_norm"]) == before


@pytest.mark.full
def test_a_run_that_is_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    alone = continued_run(tmp_path / "alone")
    train(alone)
    config = continued_run(tmp_path / "run")
    process = start(config)
    while steps_done(tmp_path / "run") < 6:
        assert process.exitcode is None
    process.kill()
    process.join()
    assert not (tmp_path / "run" / "result.json").exists()
    train(config)
    assert weights(tmp_path / "run") == weights(tmp_path / "alone")
    losses = [[line["loss"] for line in lines(tmp_path / name, "train")] for name in ("run", "alone")]
    assert losses[0] == losses[1]


def drawn(config: TrainConfig) -> torch.Tensor:
    """Parameters of a mixer that start at random."""
    run = begin(config, layout_of(config), CPU, lambda event: None)
    run.close()
    return next(p.detach() for name, p in run.model.named_parameters() if name.endswith("1.projection"))


def test_a_seed_decides_the_order_of_the_data_and_what_is_random_in_a_mixer(tmp_path: Path) -> None:
    quiet = {"run__steps": 1, "run__depth_every": 0, "run__snapshot_every": 0}
    for name, seed in (("one", 0), ("two", 1)):
        train(continued_run(tmp_path / name, "residual", run__seed=seed, **quiet))
    first = [lines(tmp_path / name, "train")[0]["loss"] for name in ("one", "two")]
    assert first[0] != first[1]
    mixers = [drawn(continued_run(tmp_path / name, "mhc", run__seed=seed)) for name, seed in (("a", 0), ("b", 0))]
    assert torch.equal(*mixers)
    assert not torch.equal(mixers[0], drawn(continued_run(tmp_path / "c", "mhc", run__seed=1)))


# What reads a run.


def test_an_unfinished_run_is_read_from_its_checkpoint_without_the_folder_of_its_model(tmp_path: Path) -> None:
    config = continued_run(tmp_path / "run", "depth_attention")
    train(config)
    tokens = first_batch(config)
    expected = load_run(tmp_path / "run")(tokens).logits
    (tmp_path / "run" / "result.json").unlink()
    shutil.rmtree(tmp_path / "base")
    opened = open_run(tmp_path / "run", "cpu", functions=False)
    assert opened.step == 12
    assert torch.allclose(opened.model(tokens).logits, expected, atol=1e-6)
    assert open_run(tmp_path / "run", "cpu", dtype=torch.float64).model(tokens).logits.dtype == torch.float64


def test_traces_cuts_and_scores_take_the_model_of_a_run(finished: TrainConfig) -> None:
    model, tokens = load_run(finished.run.folder), first_batch(finished)
    trace = dm.trace(model, tokens)
    assert trace.M.shape[-1] == 5
    assert torch.allclose(trace.contributions(4).sum(0), trace.inputs[4], atol=1e-4)
    assert survey(model, [tokens], source="tokens").figures["depth"] == 4
    assert ablate(model, tokens, ["embedding"], controls=1).effects[0].name == "embedding"
    with torch.no_grad():
        expected = float(model(tokens[:1], labels=tokens[:1]).loss)
    assert score(model, tokens[0], 16, 16, 1).loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mixer", ["residual", "block_attnres+depth_attention"])
def test_generated_texts_are_those_of_transformers(mixer: str, tmp_path: Path) -> None:
    config = continued_run(tmp_path / "run", mixer, run__steps=2, run__validate_batches=1)
    train(config)
    model, prompts = load_run(tmp_path / "run"), [[*b"depth mixes"], [*b"a layer"]]
    rows: list[list[int]] = [[], []]
    for step in stream(model, prompts, max_new_tokens=6):
        for row, token in zip(rows, step, strict=True):
            assert token is not None
            row.append(token)
    for prompt, row in zip(prompts, rows, strict=True):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert out[0, len(prompt) :].tolist() == row


def test_commands_read_a_run(finished: TrainConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = finished.run.folder
    assert main(["eval", folder, "--export", str(tmp_path / "out")]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, load_run(folder).lm_head.weight)
    assert main(["generate", folder, "--prompt", "depth", "-n", "4", "--json"]) == 0
    assert main(["trace", folder, "--tokens", "64", "--output", str(tmp_path)]) == 0
    assert main(["ablate", folder, "--rows", "2", "--routes", "0", "--controls", "0", "--output", str(tmp_path)]) == 0
    assert {"trace.json", "ablation.json"} <= {path.name for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert main(["generate", folder, "--prompt", "depth", "--compiled"]) == 2
    assert "--compiled with a model of transformers" in capsys.readouterr().err
    assert main(["explore", folder]) == 2
    assert "explore does not read" in capsys.readouterr().err
    assert main(["eval", folder, "--tp", "2"]) == 2
    assert "without --tp and --pp" in " ".join(capsys.readouterr().err.split())


# Configurations.


def test_a_configuration_survives_toml_with_every_option(tmp_path: Path) -> None:
    config = continued_run(tmp_path / "run", "block_attnres+depth_attention", mixer__num_blocks=2, freeze_base=True)
    again = TrainConfig.from_toml(config.to_toml())
    assert again.saved() == config.saved()
    assert again.digest == config.digest
    assert 'from_hf = "' in config.to_toml()
    assert "scale_by_count = true" in config.to_toml()
    other = override(again, "mixer.scale_by_count", False)
    assert TrainConfig.from_toml(other.to_toml()).model.saved()["mixer"]["scale_by_count"] is False
    assert other.digest != config.digest


def test_a_moved_folder_can_be_given_again_and_a_changed_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = continued_run(tmp_path / "run", data__folder="none")
    config = override(config, "data.folder", str(tmp_path / "tokens"))
    train(config)
    (tmp_path / "run" / "result.json").unlink()
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    command = ["train", "--folder", str(tmp_path / "run"), "--json"]
    assert main(command) == 2
    assert "--from-hf FOLDER" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--from-hf", str(tmp_path / "elsewhere")]) == 0
    assert json.loads(capsys.readouterr().out)["config_digest"] == config.digest
    (tmp_path / "run" / "result.json").unlink()
    path = tmp_path / "elsewhere" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, path, {"format": "pt"})
    assert main(command) == 2
    assert "has changed since the run began" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--from-hf", str(tmp_path / "elsewhere")]) == 2
    assert "model.digest: was" in " ".join(capsys.readouterr().err.split())


def test_sizes_and_flops_are_those_of_the_decoder_of_this_shape(tmp_path: Path) -> None:
    config = continued_run(tmp_path / "run", "block_attnres+value_residual", mixer__num_blocks=2, blend=False).model
    assert isinstance(config, RetrofitConfig)
    same = dm.DecoderConfig(
        vocab_size=260, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=48,
        mixer={"name": "block_attnres", "num_blocks": 2, "scale_by_count": True}, kv_mixer="value_residual",
    )  # fmt: skip
    assert sizes_of_folder(tmp_path / "base") == (260, 32, 2, 4, 8, 128)
    assert count_parameters(config) == count_parameters(same)
    assert flops_per_token(config, 64) == flops_per_token(same, 64)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_model_says_which_parameters_are_matrices(kind: str, tmp_path: Path) -> None:
    config = continued_run(tmp_path / "run", "attnres+depth_attention", kind=kind)
    assert isinstance(config.model, RetrofitConfig)
    module = wrapped(load_folder(tmp_path / "base", torch.float32), config.model.wrapping())
    part = ContinuedModel(module, tmp_path / "base")
    groups = parameter_groups(part, config.optimizer)
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(name for name, _ in module.named_parameters())
    muon = {name for group in groups if group["muon"] for name in group["names"]}
    assert muon
    assert not [name for name in muon if "embed" in name or "lm_head" in name or "depthmix" in name or "wpe" in name]
    assert not [name for name in muon if name.endswith(("mlp.gate.weight", "norm.weight"))]
    still = {name for group in groups if not group["weight_decay"] for name in group["names"]}
    assert {name for name in names if ".depthmix" in name} <= still
    saved = part.state_dict()
    assert ("lm_head.weight" in saved) != module.config.tie_word_embeddings


def broken(folder: Path, what: str) -> None:
    """Spoil the folder of a model."""
    config = folder / "config.json"
    content = json.loads(config.read_text())
    if what == "no configuration":
        config.unlink()
    elif what == "pickled":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif what == "another family":
        config.write_text(json.dumps({**content, "model_type": "opt"}))
    elif what == "unknown":
        config.write_text(json.dumps({**content, "model_type": "qwen9"}))
    elif what == "quantised":
        config.write_text(json.dumps({**content, "quantization_config": {"bits": 4}}))
    elif what == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif what == "no folder":
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no folder", "is not a folder"),
        ("no configuration", "has no config.json"),
        ("pickled", "only pickled weights (pytorch_model.bin)"),
        ("another family", "'opt' cannot be wrapped"),
        ("unknown", "'qwen9' is not known. Did you mean 'qwen"),
        ("quantised", "holds quantised weights"),
        ("no tokenizer", "give the model's tokenizer with --tokenizer"),
    ],
)
def test_a_folder_that_cannot_be_continued_is_refused(
    what: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_base(tmp_path / "base")
    broken(tmp_path / "base", what)
    given = ["--from-hf", str(tmp_path / "base"), "--mixer", "attnres", "--folder", str(tmp_path / "run")]
    assert main(["train", *given]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", "2"], "parallel.tp=2 with a model of transformers"),
        (["--pp", "2"], "parallel.pp=2 with a model of transformers"),
        (["--recompute", "3"], "run.recompute=3; expected 0 or 2"),
        (["--depth", "4"], "depth=4; expected only one of them"),
        (["--preset", "attnres"], "preset=attnres; expected only one of them"),
        (["--backbone", "qwen3"], "backbone=qwen3; expected only one of them"),
        (["--context", "128"], "data.tokens_per_row=128; expected at most 127"),
        (["--tokenizer", "bpe:400"], "has 400 ids; expected at most 260"),
        (["--freeze-base", "--mixer", "residual"], "nothing would be trained"),
        (["--set", "model.dim=64"], "expected 32, that of the folder"),
        (["--mixer", "attnres", "--set", "mixer.num_blocks=2"], "num_blocks"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_base(tmp_path / "base")
    given = ["--from-hf", str(tmp_path / "base"), "--folder", str(tmp_path / "run")]
    mixer = [] if "--mixer" in flags else ["--mixer", "block_attnres"]
    assert main(["train", *given, *mixer, *flags]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("parallel.tp", 2, "parallel.tp=2 with a model of transformers"),
        ("parallel.pp", 2, "parallel.pp=2 with a model of transformers"),
        ("data.rows", 3, "data.rows=3 over 2 data-parallel ranks"),
        ("run.compile", True, "run.compile=true on several processes"),
    ],
)
def test_two_processes_refuse_what_they_cannot_do(
    key: str, value: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = override(continued_run(tmp_path / "run"), key, value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=words):
        layout_of(config)


def test_a_wrapped_model_is_not_wrapped_again(finished: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--from-hf", str(Path(finished.run.folder) / "final"), "--mixer", "mhc"]) == 2
    assert "has a mechanism of depthmix already" in " ".join(capsys.readouterr().err.split())


def test_a_save_that_was_killed_leaves_nothing_and_a_foreign_base_is_not_used(tmp_path: Path) -> None:
    config = continued_run(tmp_path / "run", "residual", run__steps=1)
    for name in ("final.123.part", "final.123.old", "finally.part"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / "base").mkdir()
    with pytest.raises(ValueError, match="is not the copy of"):
        train(config)
    (tmp_path / "run" / "base").rmdir()
    train(config)
    assert sorted(path.name for path in (tmp_path / "run").glob("final*")) == ["final", "finally.part"]


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    config = continued_run(tmp_path / "run", "residual", run__steps=1)
    train(config)
    path = tmp_path / "run" / "final" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    for read in (lambda: train(config), lambda: load_run(tmp_path / "run")):
        with pytest.raises(ValueError, match=r"model\.safetensors was altered"):
            read()


# Larger runs.


@pytest.mark.full
@pytest.mark.parametrize(
    "form",
    [
        {"run__precision": "bfloat16"},
        {"run__precision": "float64"},
        {"optimizer__name": "muon"},
        {"run__accumulate": 2},
        {"run__asynchronous": True},
        {"tokenizer": "bytes"},
    ],
    ids=str,
)
def test_every_form_of_a_run_learns_and_is_read(form: dict[str, Any], tmp_path: Path) -> None:
    config = continued_run(tmp_path / "run", "block_attnres+value_residual", **form)
    train(config)
    losses = [line["loss"] for line in lines(tmp_path / "run", "train")]
    assert losses[-1] < losses[0] - 0.3
    assert main(["generate", str(tmp_path / "run"), "--prompt", "depth", "-n", "3"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    assert tokenizer("depth").input_ids == [*b"depth"]


def test_recomputed_layers_give_the_same_losses(tmp_path: Path) -> None:
    for name, every in (("plain", 0), ("again", 2)):
        train(continued_run(tmp_path / name, "block_attnres+depth_attention", run__recompute=every, run__steps=4))
    one, two = ([line["loss"] for line in lines(tmp_path / name, "train")] for name in ("plain", "again"))
    assert one == pytest.approx(two, rel=1e-6)


@pytest.mark.full
@pytest.mark.inductor
def test_a_compiled_run_follows_the_plain_one(tmp_path: Path) -> None:
    for name, compiled in (("plain", False), ("compiled", True)):
        train(continued_run(tmp_path / name, run__compile=compiled, run__steps=4))
    one, two = ([line["loss"] for line in lines(tmp_path / name, "train")] for name in ("plain", "compiled"))
    assert one == pytest.approx(two, rel=1e-3)


def test_a_bad_loss_names_the_sublayer(tmp_path: Path) -> None:
    config = continued_run(tmp_path / "run", optimizer__lr=3000.0, run__steps=60, schedule__warmup=0.9)
    with pytest.raises(dm.training.BadLoss, match=r"Layer with the largest output: sublayer \d \((attention|MLP)\)"):
        train(config)


def test_compare_refuses_another_backbone_of_a_trained_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_base(tmp_path / "base")
    assert main(["compare", "--from-hf", str(tmp_path / "base"), "--backbone", "kimi_linear"]) == 2
    assert "backbone=kimi_linear; expected only one of them" in " ".join(capsys.readouterr().err.split())


@pytest.mark.full
def test_compare_pairs_seeds_from_the_same_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = continued_run(tmp_path / "run")
    settings = {"data.tokens_per_row": 16, "data.rows": 4, "run.steps": 4, "run.validate_batches": 2}
    given = ["--from-hf", str(tmp_path / "base"), "--data", config.data.source, "--folder", str(tmp_path / "study")]
    given += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    assert main(["compare", *given, "--mixers", "residual", "attnres", "--seeds", "2"]) == 0
    assert "attnres: " in capsys.readouterr().out
    page = (tmp_path / "study" / "comparison.md").read_text()
    assert "4 sublayers of width 32, 256 tokens in 4 steps" in page
    firsts = {path.name[:-11]: lines(path, "train")[0]["loss"] for path in (tmp_path / "study" / "runs").iterdir()}
    for seed in (0, 1):
        assert firsts[f"residual_seed_{seed}"] == pytest.approx(firsts[f"attnres_seed_{seed}"], rel=1e-5)
    assert not math.isclose(firsts["residual_seed_0"], firsts["residual_seed_1"], rel_tol=1e-7)


@pytest.mark.full
def test_training_and_the_configuration_of_a_run_do_not_import_transformers(finished: TrainConfig) -> None:
    script = (
        "import sys\nfrom depthmix.training import read_config\nread_config(sys.argv[1]).digest\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, finished.run.folder], check=True)
