"""`explore` as typed: what it prints, which models it serves, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

import depthmix as dm
from depthmix.cli import explore, main
from depthmix.training import load_run, train
from tests.cli.test_generate_command import stop_after
from tests.runs import tiny_run

TEXT = "what a layer"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A finished run and a folder of `save_model`."""
    where = tmp_path_factory.mktemp("explored")
    torch.manual_seed(0)
    train(tiny_run(where / "run", "attnres", optimizer__lr=0.05))
    dm.save_model(dm.Decoder(tiny_run(where / "other", "residual").model), where / "saved")
    return where / "run", where / "saved"


def ask(address: str, **question: Any) -> Any:
    body = json.dumps({"run": 0, "text": TEXT, **question}).encode()
    request = urllib.request.Request(f"{address}api/run", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as reply:
        return json.load(reply)


def document(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=20) as reply:
        page = reply.read().decode()
    return json.loads(page.split('<script type="application/json" id="document">')[1].split("</script>")[0])


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[str], None]]]:
    """Functions of the address that run beside the command, once it serves; then the command ends by --idle."""
    functions: list[Callable[[str], None]] = []
    failures: list[BaseException] = []
    announce = explore.announce

    def announcing(server: Any, runs: Any, as_json: bool) -> None:
        announce(server, runs, as_json)

        def call() -> None:
            try:
                for function in functions:
                    function(server.address)
            except BaseException as error:
                failures.append(error)

        threading.Thread(target=call).start()

    monkeypatch.setattr(explore, "announce", announcing)
    yield functions
    assert not failures, failures


def test_it_serves_runs_and_saved_models_and_ends_when_nobody_asks(
    folders: tuple[Path, Path], during: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def visit(address: str) -> None:
        seen["document"] = document(address)
        seen["first"], seen["second"] = (ask(address, run=i) for i in (0, 1))

    during.append(visit)
    before = signal.getsignal(signal.SIGTERM), threading.active_count()
    assert main(["explore", *map(str, folders), "--idle", "0.5", "--json"]) == 0
    assert (signal.getsignal(signal.SIGTERM), threading.active_count()) == before
    printed = json.loads(capsys.readouterr().out)
    assert printed["runs"] == ["run", "saved"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", urlsplit(printed["address"]).port))
    first, second = seen["document"]["runs"]
    assert seen["document"]["kind"] == "explorer"
    assert [first[key] for key in ("name", "mechanism", "depth", "dim", "finished")] == ["run", "attnres", 4, 16, True]
    assert first["curves"]["train"]["loss"], "what the run has saved is there too"
    assert [second[key] for key in ("name", "mechanism", "kinds")] == ["saved", "residual", ["attn", "mlp"] * 2]
    assert second["missing"][0] == explore.NO_RUN
    logits = load_run(folders[0])(torch.tensor([list(TEXT.encode())]))[0, -1]
    assert seen["first"]["plain"]["next"][0]["id"] == int(logits.argmax())
    assert seen["first"]["plain"]["next"] != seen["second"]["plain"]["next"]


def test_it_says_what_it_serves_where_and_how_to_end_it(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert main(["explore", str(folders[0]), "--idle", "0.1"]) == 0
    captured = capsys.readouterr()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/\n", captured.out)
    assert "run: attnres, 4 sublayers, 12," in captured.err
    assert "texts of up to 16 tokens" in captured.err, "as in training"
    assert "Ctrl-C ends the explorer" in captured.err
    assert opened == [], "no browser is opened unasked"
    assert main(["explore", str(folders[0]), "--idle", "0.1", "--open"]) == 0
    assert opened == [capsys.readouterr().out.strip()]


def test_every_start_has_another_secret(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["explore", str(folders[1]), "--idle", "0.01"]) == 0
    first, second = (urlsplit(line).path for line in capsys.readouterr().out.split())
    assert first != second


def test_of_an_unfinished_run_the_newest_checkpoint_is_served(
    tmp_path: Path, during: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    stop_after(5, tiny_run(run, "residual"), monkeypatch)
    seen: list[Any] = []
    during.append(lambda address: seen.extend((document(address), ask(address))))
    assert main(["explore", str(run), "--idle", "0.5"]) == 0
    assert f"{run} is unfinished: using its checkpoint of step 5" in capsys.readouterr().err
    assert seen[0]["runs"][0]["finished"] is False
    logits = load_run(run)(torch.tensor([list(TEXT.encode())]))[0, -1]
    assert seen[1]["plain"]["next"][0]["id"] == int(logits.argmax())


def test_tokens_of_a_bpe_are_shown_as_they_are_and_incomplete_characters_as_bytes(
    tmp_path: Path, during: list[Any]
) -> None:
    pytest.importorskip("tokenizers", reason="pip install 'depthmix[bpe]'")
    train(tiny_run(tmp_path / "run", data__tokenizer="bpe:300", model__vocab_size=320))
    seen: list[Any] = []
    during.append(lambda address: seen.append(ask(address, text="what reads é<|endoftext|>")))
    assert main(["explore", str(tmp_path / "run"), "--idle", "0.5"]) == 0
    tokens = seen[0]["table"]["tokens"]
    assert "".join(tokens) == "what reads \\xc3\\xa9<|endoftext|>"
    assert {"what", "<|endoftext|>"} <= {token.strip() for token in tokens}, "and not byte by byte"
    assert all(re.fullmatch(r"<\d+>", one["text"]) for one in seen[0]["plain"]["next"] if one["id"] >= 300)


def test_wrong_input_ends_with_a_message(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    run = str(folders[0])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        wrong = [
            ([], 2, "explore takes at least one folder"),
            ([f"{run}/nothing"], 2, "does not exist"),
            ([str(Path(run) / "checkpoints")], 2, "is neither the folder of a run"),
            ([run, "--port", "65536"], 2, "port=65536; expected 0 to 65535"),
            ([run, "--port", "-1"], 2, "port=-1"),
            ([run, "--idle", "0"], 2, "idle=0.0; expected a number above 0"),
            ([run, "--idle", "nan"], 2, "idle=nan"),
            ([run, "--device", "nowhere"], 2, "device='nowhere' is not available"),
            ([run, "--port", port, "--idle", "0.1"], 1, f"port {port} cannot be used"),
        ]
        for words, code, message in wrong:
            assert main(["explore", *words]) == code, words
            assert message in capsys.readouterr().err
    assert threading.active_count() == 1 or not [t for t in threading.enumerate() if "answers" in t.name]


def test_a_configuration_that_names_a_function_is_not_imported_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = dm.Decoder(tiny_run(tmp_path / "run", "attnres", model__mixer__mixing="linear",
                                model__mixer__kernel="torch.nn.functional:softplus").model)  # fmt: skip
    dm.save_model(model, tmp_path / "saved")
    assert main(["explore", str(tmp_path / "saved"), "--idle", "0.1"]) == 2
    assert "torch.nn.functional:softplus" in capsys.readouterr().err
    assert main(["explore", str(tmp_path / "saved"), "--idle", "0.1", "--functions"]) == 0


def test_ctrl_c_ends_it_with_a_word_and_frees_the_port(folders: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "depthmix", "explore", str(folders[0])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    ask(address)
    with socket.create_connection(("127.0.0.1", urlsplit(address).port or 0)):  # a client that says nothing
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    assert err.endswith("depthmix: stopped\n")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", urlsplit(address).port or 0))


def test_sigterm_ends_it_like_ctrl_c(
    folders: tuple[Path, Path], during: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = threading.active_count()
    during.extend((ask, lambda address: os.kill(os.getpid(), signal.SIGTERM)))
    assert main(["explore", str(folders[0]), "--idle", "20"]) == 130
    captured = capsys.readouterr()
    assert captured.err.endswith("depthmix: stopped\n")
    assert threading.active_count() <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", urlsplit(captured.out.strip()).port))
