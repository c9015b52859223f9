"""Tasks of the lm-evaluation-harness, offline: the numbers are those of a plain loop over the model's logits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import depthmix as dm
from depthmix.cli import main
from depthmix.data import ByteTokenizer
from depthmix.training import load_run, train
from tests.decoders import tiny
from tests.hf.tasks_of_ours import KINDS, questions, value_of, write_tasks
from tests.runs import tiny_run

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'depthmix[harness]'")
transformers = pytest.importorskip("transformers")
from depthmix.hf import DepthmixForCausalLM, evaluate, from_tokenizer  # noqa: E402
from depthmix.hf.opening import open_pretrained  # noqa: E402
from depthmix.hf.tasks import SUITES  # noqa: E402
from depthmix.hf.tasks.lookup import index_of, leaves  # noqa: E402

BYTES = from_tokenizer(ByteTokenizer())
FOLDERS = ("run", "ours", "own", "wrapped", "plain")


def moved(model: nn.Module) -> Any:
    """Away from the start, so that every mixer mixes and texts differ."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval()


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def make_folder(kind: str, folder: Path) -> Path:
    """A folder with a tiny model that reads bytes."""
    if kind == "run":
        train(tiny_run(folder))
    elif kind == "ours":
        dm.save_model(tiny(dtype=torch.float32, vocab_size=256, mixer="attnres"), folder)
    else:
        if kind == "own":
            model: Any = DepthmixForCausalLM.from_decoder(tiny(dtype=torch.float32, vocab_size=256, mixer="mhc"))
        else:
            model = llama()
            if kind == "wrapped":
                dm.wrap(model, "block_attnres", num_blocks=2, kv_mixer="value_residual")
            moved(model)
            BYTES.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


@torch.no_grad()
def log_likelihood(model: Any, context: str, text: str) -> float:
    """Of a text after a context, token by token."""
    tokens = list((context + text).encode())
    scores = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return sum(float(scores[k - 1, tokens[k]]) for k in range(len(context.encode()), len(tokens)))


@torch.no_grad()
def greedy(model: Any, context: str, most: int) -> list[int]:
    """Without a cache."""
    tokens = list(context.encode())
    for _ in range(most):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-most:]


def written(model: Any, context: str, most: int) -> str:
    """The greedy text up to the end of its line or of the text."""
    text = bytes(greedy(model, context, most)).decode("utf-8", errors="replace")
    return text.split("\n")[0].split("\0")[0]


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_harness_says_of_any_folder_what_a_plain_loop_says(kind: str, tmp_path: Path) -> None:
    folder = make_folder(kind, tmp_path / kind)
    model, _ = open_pretrained(folder)
    docs = questions()
    for number, doc in enumerate(docs):  # every second answer is what the model writes
        doc["written"] = written(model, doc["question"], 5) if number % 2 else "neither this nor that"
    tasks = write_tasks(tmp_path / "tasks", docs)
    document = evaluate(folder, KINDS, task_folder=tasks, max_length=64, batch=2)

    scores = [[log_likelihood(model, d["question"], " " + choice) for choice in d["choices"]] for d in docs]
    best = [max(range(3), key=row.__getitem__) for row in scores]
    right = [row[d["answer"]] for row, d in zip(scores, docs, strict=True)]
    accuracy = sum(b == d["answer"] for b, d in zip(best, docs, strict=True)) / len(docs)
    assert value_of(document, "choose", "acc") == accuracy
    assert math.log(value_of(document, "complete", "perplexity")) == pytest.approx(-sum(right) / len(right), rel=1e-4)
    assert value_of(document, "write", "exact_match") == 0.5


def test_an_answer_ends_with_the_text_though_the_model_names_no_end(tmp_path: Path) -> None:
    model, _ = open_pretrained(make_folder("ours", tmp_path / "model"))
    assert model.generation_config.eos_token_id is None
    tokens = {d["question"]: greedy(model, d["question"], 5) for d in questions()}
    docs = [doc for doc in questions() if 0 in tokens[doc["question"]][:-1]]
    assert docs, "some texts end and go on"
    for doc in docs:
        doc["written"] = written(model, doc["question"], 5)
    document = evaluate(model, "write", tokenizer=BYTES, task_folder=write_tasks(tmp_path / "tasks", docs), batch=2)
    assert value_of(document, "write", "exact_match") == 1
    assert model.generation_config.eos_token_id is None, "as it was"


@pytest.mark.parametrize("kind", ["wrapped", "own"])
def test_a_model_in_memory_has_the_results_of_its_folder(kind: str, tmp_path: Path) -> None:
    folder, tasks = make_folder(kind, tmp_path / kind), write_tasks(tmp_path / "tasks")
    model, _ = open_pretrained(folder)
    model.train()
    model.get_input_embeddings().eval()
    inside = evaluate(model, "complete", tokenizer=BYTES, task_folder=tasks)
    assert model.training, "the mode that it was in"
    assert not model.get_input_embeddings().training
    outside = evaluate(folder, "complete", task_folder=tasks)
    assert inside["tasks"]["complete"]["rows"] == outside["tasks"]["complete"]["rows"]
    assert inside["model"] | {"source": str(folder)} == outside["model"]


def test_a_decoder_in_memory_has_the_log_likelihood_that_its_own_logits_give(tmp_path: Path) -> None:
    decoder = tiny(dtype=torch.float32, vocab_size=256, mixer="block_attnres")
    tasks = write_tasks(tmp_path)
    document = evaluate(decoder, ["complete"], tokenizer=BYTES, task_folder=tasks, limit=1)
    (doc,) = questions(1)
    tokens = torch.tensor([list(f"{doc['question']} {doc['choices'][doc['answer']]}".encode())])
    length = len(doc["question"])
    with torch.no_grad():
        scores = decoder(tokens)[0, length - 1 : -1].log_softmax(-1)
    expected = float(scores.gather(-1, tokens[0, length:, None]).sum())
    assert -math.log(value_of(document, "complete", "perplexity")) == pytest.approx(expected, rel=1e-5)
    (row, _) = document["tasks"]["complete"]["rows"]
    assert (row["n"], row["shots"], row["version"], row["stderr"]) == (1, 0, 1.5, None)


def test_mixing_changes_the_results_of_a_wrapped_model(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path)
    model = moved(dm.wrap(llama(), "block_attnres", num_blocks=2))
    mixed = evaluate(model, "complete", tokenizer=BYTES, task_folder=tasks)
    with pytest.warns(UserWarning, match="mixers had left"):
        dm.unwrap(model)
    plain = evaluate(model, "complete", tokenizer=BYTES, task_folder=tasks)
    assert value_of(mixed, "complete", "perplexity") != pytest.approx(value_of(plain, "complete", "perplexity"), 1e-3)
    assert mixed["model"]["weights"] != plain["model"]["weights"]


def test_shots_and_limit_reach_the_harness(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path, choose={"kind": "choose", "fewshot_split": "validation"})
    model = tiny(dtype=torch.float32, vocab_size=256)
    document = evaluate(model, ["choose"], tokenizer=BYTES, task_folder=tasks, shots=2, limit=4)
    (row,) = document["tasks"]["choose"]["rows"]
    assert (row["shots"], row["n"]) == (2, 4)
    assert document["settings"] | {"lm_eval": ""} == {"limit": 4, "shots": 2, "max_length": 2048, "lm_eval": ""}


def test_a_group_has_one_row_and_a_tag_one_for_each_of_its_tasks(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path, one={"kind": "choose", "tag": "both"}, two={"kind": "choose", "tag": "both"})
    group = {"group": "joined", "task": ["one", "two"], "aggregate_metric_list": [{"metric": "acc"}]}
    (tmp_path / "joined.yaml").write_text(json.dumps(group))
    model = tiny(dtype=torch.float32, vocab_size=256)
    document = evaluate(model, ["joined", "both"], tokenizer=BYTES, task_folder=tasks)
    (whole,) = document["tasks"]["joined"]["rows"]
    parts = document["tasks"]["both"]["rows"]
    assert [row["task"] for row in parts] == ["one", "two"]
    assert (whole["n"], whole["value"]) == (12, sum(row["value"] for row in parts) / 2)


@pytest.mark.parametrize("json_flag", [False, True])
def test_the_command_evaluates_a_run_with_the_context_of_its_training(
    json_flag: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_run(tmp_path / "run", data__tokens_per_row=48))
    tasks = write_tasks(tmp_path / "tasks")
    given = ["--tasks", "choose", "complete", "--task-folder", str(tasks), "--limit", "3", "--batch", "2"]
    assert main(["eval", str(tmp_path / "run"), *given, *["--json"][: int(json_flag)]]) == 0
    out = capsys.readouterr().out
    expected = evaluate(tmp_path / "run", ["choose", "complete"], task_folder=tasks, limit=3, max_length=48)
    if json_flag:
        found = json.loads(out)
        assert found["settings"] == expected["settings"]
        assert found["tasks"]["choose"]["rows"] == expected["tasks"]["choose"]["rows"]
    else:
        assert "only the first 3 questions" in out
        assert f"{value_of(expected, 'choose', 'acc'):.4f}" in out


def test_the_command_evaluates_the_newest_checkpoint_of_an_unfinished_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_run(tmp_path / "run"))
    (tmp_path / "run" / "result.json").unlink()
    tasks = write_tasks(tmp_path / "tasks")
    assert main(["eval", str(tmp_path / "run"), "--tasks", "choose", "--task-folder", str(tasks), "--json"]) == 0
    said = capsys.readouterr()
    assert "is unfinished: using its checkpoint of step 12" in said.err
    expected = evaluate(load_run(tmp_path / "run"), "choose", tokenizer=BYTES, task_folder=tasks, max_length=16)
    assert json.loads(said.out)["model"]["weights"] == expected["model"]["weights"]


def test_a_run_that_ended_with_a_model_of_transformers_is_opened_with_the_auto_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_run(tmp_path / "run"))
    for file in (tmp_path / "run" / "final").iterdir():
        file.unlink()
    make_folder("wrapped", tmp_path / "run" / "final")
    tasks = write_tasks(tmp_path / "tasks")
    assert main(["eval", str(tmp_path / "run"), "--tasks", "choose", "--task-folder", str(tasks), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["type"] == "DepthmixLlamaForCausalLM"
    assert found["settings"]["max_length"] == 96, "what its configuration says"


def test_every_task_of_a_suite_is_known_to_the_installed_harness() -> None:
    from depthmix.hf.tasks import FOLDER

    names = [name for suite in SUITES.values() for name in suite]
    assert [len(suite) for suite in SUITES.values()] == [15, 8]
    index = index_of(names, [FOLDER]).task_index
    assert [name for name in names if name not in index] == []
    assert all(config is not None for name in names for _, config in leaves(name, index))
    assert Path(index["cmath"].yaml_path) == FOLDER / "cmath.yaml"
    marked = [name for name in names if any((config or {}).get("unsafe_code") for _, config in leaves(name, index))]
    assert marked == ["humaneval", "mbpp"]


def test_cmath_reads_answers_of_a_model_as_its_task_file_says(tmp_path: Path) -> None:
    """With the fields of the data set, of which older copies call the question `input`."""
    from depthmix.hf.tasks import FOLDER

    model, _ = open_pretrained(make_folder("ours", tmp_path / "model"))
    lines = [{"grade": 1, "question": f"{k}个苹果？", "golden": str(k)} for k in range(4)]
    lines = [lines[0], *({"grade": 1, "input": line["question"], "golden": line["golden"]} for line in lines[1:])]
    for name in ("dev", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines[: 1 if name == "test" else 4])))
    files = {"validation": str(tmp_path / "dev.jsonl"), "test": str(tmp_path / "test.jsonl")}
    own = {"include": str(FOLDER / "cmath.yaml"), "task": "cmath_here", "dataset_path": "json"}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "here.yaml").write_text(json.dumps({**own, "dataset_kwargs": {"data_files": files}}))
    document = evaluate(model, "cmath_here", tokenizer=BYTES, task_folder=tmp_path / "tasks")
    (row,) = document["tasks"]["cmath_here"]["rows"]
    assert (row["metric"], row["n"], row["shots"]) == ("exact_match", 1, 3)


def test_the_page_about_evaluation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.test_snippets import commands, depthmix_arguments, python_blocks

    page = "docs/evaluation.md"
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": page}
    blocks = python_blocks(page)
    assert blocks
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{page}, block {number}", "exec"), scope)
    given = [words for line in commands(page) if (words := depthmix_arguments(line)) and "--task-folder" in words]
    assert given
    train(tiny_run(tmp_path / "runs" / "block"))
    for words in given:
        assert main(words) == 0
