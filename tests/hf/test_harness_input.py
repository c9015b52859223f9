"""What is refused before any task runs, and what an interrupted evaluation leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import depthmix as dm
from depthmix.cli import main
from depthmix.data import ByteTokenizer
from depthmix.support.terminal import child_environment
from tests.decoders import tiny
from tests.hf.tasks_of_ours import write_tasks

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'depthmix[harness]'")
transformers = pytest.importorskip("transformers")
from depthmix.hf import DepthmixForCausalLM, evaluate, from_tokenizer, harness  # noqa: E402
from depthmix.hf.opening import open_pretrained  # noqa: E402

BYTES = from_tokenizer(ByteTokenizer())
SLOW = """
import time
from pathlib import Path

def process_results(doc, results):
    while not Path(__file__).with_name("go").exists():
        time.sleep(0.05)
    return {"exact_match": 1.0}
"""


@pytest.fixture
def model() -> DepthmixForCausalLM:
    return DepthmixForCausalLM.from_decoder(tiny(dtype=torch.float32, vocab_size=256, mixer="block_attnres"))


@pytest.fixture
def folder(model: DepthmixForCausalLM, tmp_path: Path) -> Path:
    dm.save_model(model.decoder, tmp_path / "model")
    return tmp_path / "model"


def refuse(folder: Path, *given: object, capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The message of a command that ends with this code."""
    assert main(["eval", str(folder), *map(str, given)]) == code
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_a_misspelt_task_is_answered_with_the_one_that_was_meant(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_tasks(tmp_path / "tasks")
    said = refuse(folder, "--tasks", "choose", "arc_esy", "--task-folder", tasks, capsys=capsys)
    assert "unknown task 'arc_esy'. Did you mean 'arc_easy'?" in said
    assert "attnres-paper, depth-attention-paper" in said


@pytest.mark.parametrize(
    ("names", "marked"),
    [(["arc_easy", "humaneval"], "humaneval:"), (["attnres-paper"], "humaneval, mbpp:"), (["trial"], "trial:")],
)
def test_tasks_that_execute_code_are_refused_by_name_before_anything_is_loaded(
    names: list[str], marked: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also inside a group. The file's own function would be imported with the task, so it must not be loaded."""
    tasks = write_tasks(tmp_path / "tasks", run_it={"kind": "write", "unsafe_code": True})
    (tasks / "trial.yaml").write_text(json.dumps({"group": "trial", "task": ["run_it"]}))
    spy = tasks / "spy.py"
    spy.write_text("raise SystemExit('imported')")
    text = (tasks / "run_it.yaml").read_text()[:-1] + ', "process_docs": !function spy.run}'
    (tasks / "run_it.yaml").write_text(text)
    said = refuse(folder, "--tasks", *names, "--task-folder", tasks, capsys=capsys)
    assert f"depthmix: {marked} these tasks execute code" in said
    assert "--allow-code" in said


def test_allowed_code_is_allowed_for_the_evaluation_only(
    model: DepthmixForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    tasks = write_tasks(tmp_path / "tasks", run_it={"kind": "write", "unsafe_code": True})
    (tasks / "look.py").write_text(
        "import os\n\ndef process_results(doc, results):\n"
        "    return {'exact_match': float(os.environ['HF_ALLOW_CODE_EVAL'])}\n"
    )
    text = (tasks / "run_it.yaml").read_text()[:-1] + ', "process_results": !function look.process_results}'
    (tasks / "run_it.yaml").write_text(text)
    document = evaluate(model, "run_it", tokenizer=BYTES, task_folder=tasks, allow_code=True)
    assert document["tasks"]["run_it"]["rows"][0]["value"] == 1
    assert "HF_ALLOW_CODE_EVAL" not in os.environ


def test_a_task_whose_data_is_missing_is_named_before_another_is_evaluated(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_tasks(tmp_path / "tasks", good={"kind": "choose"}, remote={"kind": "choose"})
    fields = json.loads((tasks / "remote.yaml").read_text())
    fields |= {"dataset_path": "nobody/no_such_data", "dataset_kwargs": None}
    (tasks / "remote.yaml").write_text(json.dumps(fields))
    given = ["--tasks", "good", "remote", "--task-folder", tasks, "--output", tmp_path / "out.json"]
    said = refuse(folder, *given, capsys=capsys, code=1)
    assert "the data of task 'remote' cannot be loaded" in said
    assert "Without a network, only data that was downloaded before" in said
    assert not (tmp_path / "out.json").exists(), "nothing was evaluated"


def test_a_task_that_needs_a_missing_package_is_named(model: DepthmixForCausalLM, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks", odd={"kind": "choose"})
    (tasks / "needs.py").write_text("import no_such_package\n")
    (tasks / "odd.yaml").write_text((tasks / "odd.yaml").read_text()[:-1] + ', "process_docs": !function needs.run}')
    with pytest.raises(ModuleNotFoundError, match=r"(?s)task 'odd' needs a package.*no_such_package.*pip install"):
        evaluate(model, "odd", tokenizer=BYTES, task_folder=tasks)


def test_a_context_without_room_for_an_answer_is_refused(model: DepthmixForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'write' generates up to 5 tokens.* longest context is 5.*tokens-per-row"):
        evaluate(model, "write", tokenizer=BYTES, task_folder=write_tasks(tmp_path), max_length=5)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path)
    small = tiny(dtype=torch.float32, vocab_size=200)
    with pytest.raises(ValueError, match=r"ids up to 255, and the model a vocabulary of 200"):
        evaluate(small, "choose", tokenizer=BYTES, task_folder=tasks)
    endless = transformers.PreTrainedTokenizerFast(tokenizer_object=BYTES.backend_tokenizer)
    with pytest.raises(ValueError, match=r"eos_token=None"):
        evaluate(tiny(dtype=torch.float32, vocab_size=256), "choose", tokenizer=endless, task_folder=tasks)
    with pytest.raises(TypeError, match=r"tokenizer=None with a model in memory"):
        evaluate(small, "choose", task_folder=tasks)
    with pytest.raises(TypeError, match=r"evaluate got a Linear"):
        evaluate(torch.nn.Linear(2, 2), "choose", tokenizer=BYTES, task_folder=tasks)


@pytest.mark.parametrize(("name", "value"), [("limit", 0), ("shots", -1), ("batch", 0), ("max_length", 1)])
def test_numbers_out_of_range_are_refused(name: str, value: int, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{name}={value}; expected at least"):
        evaluate(folder, "choose", task_folder=write_tasks(tmp_path / "tasks"), **{name: value})


def test_folders_without_what_is_needed_are_refused(model: DepthmixForCausalLM, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no config.json; expected the folder of a run"):
        open_pretrained(tmp_path / "empty")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"is an unfinished run"):
        open_pretrained(tmp_path / "run")
    plain = transformers.LlamaConfig(vocab_size=256, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    transformers.LlamaForCausalLM(plain).save_pretrained(tmp_path / "plain")
    with pytest.raises(FileNotFoundError, match=r"plain has no tokenizer"):
        open_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "model.safetensors").rename(tmp_path / "plain" / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"has no \*.safetensors; other weights are not read"):
        open_pretrained(tmp_path / "plain")


def test_weights_that_lack_a_tensor_are_refused(model: DepthmixForCausalLM, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["decoder.depth.mixers.3.query"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lack decoder.depth.mixers.3.query"):
        open_pretrained(tmp_path)


def test_a_folder_that_brings_its_own_code_does_not_run_it(model: DepthmixForCausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.M"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match=r"unheard_of|custom code|trust_remote_code"):
        open_pretrained(tmp_path)
    assert not (tmp_path / "ran").exists()


# Files of results


def test_tasks_that_a_file_has_are_not_evaluated_again(
    model: DepthmixForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, output = write_tasks(tmp_path / "tasks"), tmp_path / "below" / "out.json"
    evaluated = []
    real = harness.evaluate_task
    monkeypatch.setattr(harness, "evaluate_task", lambda *given: (evaluated.append(given[2]), real(*given))[1])

    def start(*names: str) -> dict[str, Any]:
        return evaluate(model, names, tokenizer=BYTES, task_folder=tasks, output=output)

    first = start("choose")
    both = start("choose", "complete")
    assert evaluated == ["choose", "complete"]
    assert both["tasks"]["choose"] == first["tasks"]["choose"]
    assert json.loads(output.read_text()) == both
    alone = evaluate(model, "complete", tokenizer=BYTES, task_folder=tasks)
    assert alone["tasks"]["complete"]["rows"] == both["tasks"]["complete"]["rows"], "whatever ran before"
    moved = shutil.move(tasks, tmp_path / "moved")
    evaluate(model, "choose", tokenizer=BYTES, task_folder=moved, output=output, batch=3)
    assert len(evaluated) == 3, "neither the place of a task file nor the batch counts"


@pytest.mark.parametrize("change", ["weights", "options", "tokenizer", "limit", "task file"])
def test_a_file_of_another_evaluation_is_refused_and_stays(
    change: str, model: DepthmixForCausalLM, tmp_path: Path
) -> None:
    tasks, output = write_tasks(tmp_path / "tasks", choose={"kind": "choose"}), tmp_path / "out.json"
    given: dict[str, Any] = {"tokenizer": BYTES, "task_folder": tasks, "output": output}
    evaluate(model, "choose", **given)
    before = output.read_bytes()
    said = {"weights": "weights: was", "options": "config: was", "tokenizer": "tokenizer: was"}.get(change, change)
    if change == "weights":
        with torch.no_grad():
            model.decoder.depth.out.query[0] += 1
    elif change == "options":
        choice = {"name": "block_attnres", "scale_by_count": True}
        other = tiny(dtype=torch.float32, vocab_size=256, mixer=choice)
        other.load_state_dict(
            {**other.state_dict(), **dict(model.decoder.named_parameters())}  # not the record of options
        )
        model = DepthmixForCausalLM.from_decoder(other)
    elif change == "tokenizer":
        given["tokenizer"] = BYTES.__class__(tokenizer_object=BYTES.backend_tokenizer, eos_token="!", pad_token="!")
    elif change == "limit":
        given["limit"] = 2
    else:
        write_tasks(tasks, choose={"kind": "choose", "doc_to_text": "Q: {{question}}"})
        said = "choose: its task file has changed"
    with pytest.raises(ValueError, match=rf"(?s)results of another evaluation.*{said}.*Remove it"):
        evaluate(model, "choose", **given)
    assert output.read_bytes() == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tasks": {}}'])
def test_a_file_that_is_no_result_is_not_overwritten(text: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text(text)
    with pytest.raises(ValueError, match=r"out.json is damaged.*Remove it, or choose another file"):
        evaluate(folder, "choose", task_folder=write_tasks(tmp_path / "tasks"), output=tmp_path / "out.json")
    assert (tmp_path / "out.json").read_text() == text


def test_an_evaluation_that_is_killed_keeps_its_first_task_and_resumes_with_the_second(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, output = write_tasks(tmp_path / "tasks", choose={"kind": "choose"}, slow={"kind": "write"}), tmp_path / "out"
    (tasks / "slow.py").write_text(SLOW)
    text = (tasks / "slow.yaml").read_text()[:-1] + ', "process_results": !function slow.process_results}'
    (tasks / "slow.yaml").write_text(text)
    given = ["eval", str(folder), "--tasks", "choose", "slow", "--task-folder", str(tasks), "--output", str(output)]
    child = subprocess.Popen([sys.executable, "-m", "depthmix", *given], env=child_environment(1), cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not output.exists() and time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.05)
        assert main(given) == 2, "two processes do not write one file"
        assert "another process is writing" in capsys.readouterr().err
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    first = json.loads(output.read_text())
    assert [*first["tasks"]] == ["choose"]
    (tasks / "go").touch()
    assert main([*given, "--json"]) == 0
    said = capsys.readouterr()
    assert "has 1 of 2 tasks already" in said.err
    whole = json.loads(said.out)
    assert [*whole["tasks"]] == ["choose", "slow"]
    assert whole["tasks"]["choose"] == first["tasks"]["choose"]
    assert json.loads(output.read_text())["tasks"] == whole["tasks"]
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out", "out.lock"]
