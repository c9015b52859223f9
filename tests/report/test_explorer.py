"""The explorer: what the server lets in and what it refuses, and whether its answers are those of the model."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

import depthmix as dm
from depthmix.analysis.tally import sampled_channels
from depthmix.data import ByteTokenizer
from depthmix.report import server as server_module
from depthmix.report.answers import Explorable, answer_with, read_question
from depthmix.report.packed import unpack
from depthmix.report.server import MOST_BYTES, ExplorerServer
from tests.decoders import tiny

PAGE = "<!doctype html><title>é</title><script>let a = 1</script>"
N = 7  # rows of the tiny decoders: 6 sublayers and the head
JSON = {"Content-Type": "application/json"}
Answer = tuple[int, dict[str, str], bytes]


def explorable(mixer: str = "attnres", **changes: Any) -> Explorable:
    model = tiny(mixer=mixer, vocab_size=256, dtype=torch.float32, **changes)
    return Explorable(mixer, model, ByteTokenizer(), most_tokens=64)


@contextlib.contextmanager
def serving(answer: Callable[[Any], Any]) -> Iterator[ExplorerServer]:
    server = ExplorerServer(PAGE, answer)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def runs() -> list[Explorable]:
    return [explorable("attnres"), explorable("residual")]


@pytest.fixture(scope="module")
def server(runs: list[Explorable]) -> Iterator[ExplorerServer]:
    with serving(lambda body: answer_with(runs, body)) as one:
        yield one


def send(server: ExplorerServer, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    reply = connection.getresponse()
    with contextlib.closing(connection):
        return reply.status, dict(reply.headers), reply.read()


def ask(server: ExplorerServer, body: Any, **headers: str) -> tuple[int, Any]:
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)
    given = {"Content_Type": "application/json", **headers}
    status, _, reply = send(server, "POST", f"{server.prefix}api/run", content, **given)
    return status, json.loads(reply)


def raw(server: ExplorerServer, content: bytes, timeout: float = 10) -> bytes:
    """What the server answers to these bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=timeout) as connection:
        connection.sendall(content)
        reply = b""
        while part := connection.recv(1 << 16):
            reply += part
        return reply


def without_time(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key != "seconds"}


def post(server: ExplorerServer, *headers: str, path: str | None = None) -> bytes:
    lines = [f"POST {path or server.prefix + 'api/run'} HTTP/1.1", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


# Who may ask


def test_the_page_comes_with_a_policy_that_lets_only_its_own_script_run(server: ExplorerServer) -> None:
    status, headers, body = send(server, "GET", server.prefix)
    assert (status, body.decode()) == (200, PAGE)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "unsafe-inline" not in policy.split("style-src")[0]
    assert "frame-ancestors 'none'; base-uri 'none'; form-action 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Cross-Origin-Resource-Policy"] == headers["Cross-Origin-Opener-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers
    status, headers, body = send(server, "HEAD", server.prefix)
    assert (status, int(headers["Content-Length"]), body) == (200, len(PAGE.encode()), b"")


def test_the_policy_has_the_hash_that_a_browser_computes() -> None:
    import base64
    import hashlib

    data = '<script type="application/json" id="document">null</script>'
    policy = server_module.security_policy(f"{data}<SCRIPT type=module>\nlet b = '<script>'\n</SCRIPT>")
    hashed = base64.b64encode(hashlib.sha256(b"\nlet b = '<script>'\n").digest()).decode()
    assert f"script-src 'sha256-{hashed}'; " in policy, "and none of the document, which is data"
    assert "script-src 'none'" in server_module.security_policy(data)


def test_it_listens_on_this_machine_only(server: ExplorerServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert len(urlsplit(server.address).path) > 30


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "[::1]:{port}", ""]
)
def test_a_foreign_host_is_refused(server: ExplorerServer, host: str) -> None:
    given = host.format(port=server.port)
    status, _, body = send(server, "GET", server.prefix, Host=given)
    assert status == 403
    assert "open the address that was printed" in json.loads(body)["error"]
    assert ask(server, {"run": 0, "text": "a"}, Host=given)[0] == 403


def test_localhost_is_this_machine_too(server: ExplorerServer) -> None:
    name = f"localhost:{server.port}"
    assert send(server, "GET", server.prefix, Host=name)[0] == 200
    assert ask(server, {"run": 0, "text": "a"}, Host=name, Origin=f"http://{name}")[0] == 200


@pytest.mark.parametrize("host", [(), ("Host: 127.0.0.1:{port}", "Host: evil.example")])
def test_a_host_that_is_missing_or_there_twice_is_refused(server: ExplorerServer, host: tuple[str, ...]) -> None:
    lines = [line.format(port=server.port) for line in host]
    reply = raw(server, "\r\n".join([f"GET {server.prefix} HTTP/1.1", *lines, "", ""]).encode())
    assert reply.split()[1] in (b"400", b"403")
    assert PAGE.encode() not in reply


@pytest.mark.parametrize(
    "origin", ["null", "http://evil.example", "https://127.0.0.1:{port}", "http://localhost:{port}"]
)
def test_a_foreign_origin_is_refused(server: ExplorerServer, origin: str) -> None:
    given = origin.format(port=server.port)
    status, answer = ask(server, {"run": 0, "text": "a"}, Origin=given)
    assert (status, "another site" in answer["error"]) == (403, True)
    assert send(server, "GET", server.prefix, Origin=given)[0] == 403


def test_a_request_that_a_browser_calls_cross_site_is_refused(server: ExplorerServer) -> None:
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        assert ask(server, {"run": 0, "text": "a"}, Sec_Fetch_Site=site)[0] == status


def test_without_the_secret_nothing_is_found(server: ExplorerServer) -> None:
    right, wrong = server.prefix, f"/{'A' * len(server.prefix[1:-1])}/"
    paths = ["/", "/favicon.ico", wrong, f"{wrong}api/run", right[:-1], f"{right}api", f"{right}api/run/",
             f"{right}?a=1", f"{right}page.html", f"{right}../", f"{right}..%2f..%2fetc/passwd",
             f"{right}%2e%2e/%2e%2e/etc/passwd", f"{right}....//etc/passwd", "/../../etc/passwd", "/%00",
             f"{right}\\..\\"]  # fmt: skip
    replies = {send(server, method, path)[::2] for path in paths for method in ("GET", "POST")}
    assert replies == {(404, b'{"error": "not found"}')}, "and the same for a right secret as for a wrong one"


def test_other_methods_are_refused(server: ExplorerServer) -> None:
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get"):
        status, headers, _ = send(server, method, server.prefix)
        assert (status, headers["Allow"]) == (405, "GET, HEAD, POST")
        assert not [name for name in headers if name.startswith("Access-Control")]
    assert send(server, "POST", server.prefix, "{}", **{"Content_Type": "application/json"})[0] == 405
    assert send(server, "GET", f"{server.prefix}api/run")[0] == 405


# What may be asked


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_form_of_another_page_can_send_is_refused(server: ExplorerServer, kind: str) -> None:
    status, answer = ask(server, {"run": 0, "text": "a"}, Content_Type=kind)
    assert (status, answer["error"]) == (400, "expected Content-Type: application/json")


def test_a_body_of_10_mb_is_refused_at_once_and_the_client_reads_why(server: ExplorerServer) -> None:
    begun = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("POST", f"{server.prefix}api/run", b" " * 10_000_000, JSON)
    reply = connection.getresponse()
    assert (reply.status, json.loads(reply.read())) == (
        413,
        {"error": "the body is too long; expected at most 200,000 bytes"},
    )
    connection.close()
    announced = post(
        server, f"Host: 127.0.0.1:{server.port}", "Content-Type: application/json", "Content-Length: 10000000"
    )
    assert b" 413 " in raw(server, announced), "before a byte of it has come"
    huge = post(
        server, f"Host: 127.0.0.1:{server.port}", "Content-Type: application/json", f"Content-Length: {'9' * 5000}"
    )
    assert b" 413 " in raw(server, huge)
    assert time.monotonic() - begun < 5


def test_a_body_in_chunks_or_of_unknown_length_is_refused(server: ExplorerServer) -> None:
    usual = (f"Host: 127.0.0.1:{server.port}", "Content-Type: application/json")
    for lines in (("Transfer-Encoding: chunked",), (), ("Content-Length: -1",), ("Content-Length: 1e3",),
                  ("Content-Length: 2", "Content-Length: 3"), ("Content-Length: 2", "Transfer-Encoding: chunked"),
                  ("Content-Length: \xb2",), ("Content-Length: +2",)):  # fmt: skip
        reply = raw(server, post(server, *usual, *lines) + b"2\r\n{}\r\n0\r\n\r\n")
        assert b" 400 " in reply.splitlines()[0], lines
        assert b"Content-Length" in reply.split(b"\r\n\r\n")[1], lines


MALFORMED = {
    "not JSON": (b"{", "not valid JSON"),
    "empty": (b"", "not valid JSON"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "deep object": (b'{"a":' * 30_000, "nested too deeply"),
    "not UTF-8": (b'{"run":0,"text":"\xff"}', "not valid JSON"),
    "UTF-16": ('{"run":0,"text":"a"}'.encode("utf-16"), "not valid JSON"),
    "NaN": (b'{"run":0,"text":"a","edits":[{"row":1,"source":0,"scale":NaN}]}', "NaN is not a number of JSON"),
    "long number": (b'{"run":' + b"9" * 50_000 + b"}", "not valid JSON"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_body_is_an_error_that_says_so(server: ExplorerServer, name: str) -> None:
    body, words = MALFORMED[name]
    status, answer = ask(server, body)
    assert status == 400
    assert words in answer["error"]
    assert len(answer["error"]) < 300


def edit(**changes: Any) -> dict[str, Any]:
    return {"run": 0, "text": "abc", "edits": [{"row": 3, "source": 1, "scale": 0.5, **changes}]}


WRONG: list[tuple[Any, str]] = [
    ([], "a question is a list; expected an object"),
    ({"text": "a"}, "a question has no run"),
    ({"run": 0}, "a question has no text"),
    ({"run": 2, "text": "a"}, "run is 2; expected a number from 0 to 1"),
    ({"run": -1, "text": "a"}, "run is -1"),
    ({"run": True, "text": "a"}, "run is True; expected a whole number"),
    ({"run": 0, "text": ""}, "text is empty"),
    ({"run": 0, "text": None}, "text is null; expected a text"),
    ({"run": 0, "text": ["a"]}, "text is a list; expected a text"),
    ({"run": 0, "text": "\ud800"}, "half a surrogate pair"),
    ({"run": 0, "text": "a", "token": 1}, "token is 1; expected 0 to 0"),
    ({"run": 0, "text": "a", "token": -1}, "token is -1"),
    ({"run": 0, "text": "a", "token": 0.0}, "token is 0.0; expected a whole number or null"),
    ({"run": 0, "text": "a", "renormalise": 1}, "renormalise is 1; expected true or false"),
    ({"run": 0, "text": "a", "edits": {}}, "edits is an object; expected a list"),
    ({"run": 0, "text": "a", "edits": [1]}, "an edit in edits is 1; expected an object"),
    ({"run": 0, "text": "a", "editz": []}, "Did you mean 'edits'?"),
    ({"run": 0, "text": "a", "value_edits": [{"row": 0, "source": 0, "scale": 0}]}, "mixes values over depth"),
    (edit(row=N), f"row {N}; expected 0 to {N - 1}"),
    (edit(row=-1), "row -1"),
    (edit(row=10**400), "row 1000"),
    (edit(row="3"), "row is '3'; expected a whole number"),
    (edit(source=4), "row 3 has no source 4; expected 0 to 3"),
    (edit(source=-1), "row 3 has no source -1"),
    (edit(scale=10.5), "edits: scale=10.5; expected -10.0 to 10.0"),
    (edit(scale=None), "scale is null; expected a finite number"),
    (edit(scale=10**400), "scale is 1000"),
    (edit(other=1), "an edit in edits has no field 'other'"),
    ({"run": 0, "text": "a", "edits": edit()["edits"] * (N * N + 1)}, f"expected at most {N * N}"),
]


@pytest.mark.parametrize(("question", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_wrong_question_gets_an_error_that_names_it(server: ExplorerServer, question: Any, words: str) -> None:
    status, answer = ask(server, question)
    assert status == 400
    assert words in answer["error"]
    assert len(answer["error"]) < 300
    if isinstance(question, dict) and question.get("text") == "abc":
        scale = json.dumps(question).replace('"scale": 0.5', '"scale": 1e999')
        assert ask(server, scale)[0] == 400


def test_errors_echo_no_more_than_a_few_words_of_a_request(server: ExplorerServer) -> None:
    for body in ({"run": 0, "text": "a", "x" * 100_000: 1}, {"run": "y" * 100_000, "text": "a"}):
        status, answer = ask(server, body)
        assert (status, len(answer["error"]) < 300) == (400, True)


# Many clients, slow ones, and those that leave


def test_100_questions_at_once_get_the_answers_that_each_gets_alone(
    runs: list[Explorable], server: ExplorerServer
) -> None:
    def question(i: int) -> dict[str, Any]:
        edits = [{"row": i % N, "source": i % (i % N + 1), "scale": i / 50 - 1}] if i % 3 else []
        return {"run": i % 2, "text": f"question {i} " * (1 + i % 4), "edits": edits, "renormalise": i % 4 == 1}

    questions = [question(i) for i in range(100)]
    alone = [without_time(answer_with(runs, body)) for body in questions]
    with ThreadPoolExecutor(100) as clients:
        together = list(clients.map(lambda body: ask(server, body), questions))
    assert [status for status, _ in together] == [200] * 100
    assert [without_time(answer) for _, answer in together] == json.loads(json.dumps(alone))
    assert len({json.dumps(answer["plain"]) for answer in alone}) == 100, "otherwise mixed answers would go unnoticed"


def test_nothing_is_computed_for_a_client_that_left_and_the_next_one_is_served(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked, busy, go_on = [], threading.Event(), threading.Event()

    def answer(body: Any) -> Any:
        asked.append(body)
        busy.set()
        go_on.wait(10)
        return {"asked": body}

    with serving(answer) as server, ThreadPoolExecutor(2) as clients:
        first = clients.submit(ask, server, "1")
        busy.wait(10)
        usual = (f"Host: 127.0.0.1:{server.port}", "Content-Type: application/json", "Content-Length: 1")
        with socket.create_connection(("127.0.0.1", server.port)) as leaving:
            leaving.sendall(post(server, *usual) + b"2")
            time.sleep(0.3)
        with socket.create_connection(("127.0.0.1", server.port)) as leaving:
            leaving.sendall(post(server, *usual)[:50])  # in the middle of its headers
        third = clients.submit(ask, server, "3")
        time.sleep(0.3)
        go_on.set()
        assert first.result(10) == (200, {"asked": 1})
        assert third.result(10) == (200, {"asked": 3})
    assert asked == [1, 3]
    assert capsys.readouterr().err == ""


def test_a_client_that_leaves_during_a_long_answer_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda body: "x" * 20_000_000) as server:
        usual = (f"Host: 127.0.0.1:{server.port}", "Content-Type: application/json", "Content-Length: 1")
        with socket.create_connection(("127.0.0.1", server.port)) as leaving:
            leaving.sendall(post(server, *usual) + b"2")
            leaving.recv(1000)
        assert ask(server, "1")[0] == 200
    assert capsys.readouterr().err == ""


def test_a_client_that_sends_byte_by_byte_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "RECEIVE", 0.3)
    with serving(lambda body: body) as server, socket.create_connection(("127.0.0.1", server.port)) as slow:
        begun = time.monotonic()
        with pytest.raises(OSError, match=r"pipe|reset"):  # noqa: PT012
            for byte in post(server, f"Host: 127.0.0.1:{server.port}") * 10:
                slow.send(bytes([byte]))
                time.sleep(0.02)
        assert time.monotonic() - begun < 3
        assert ask(server, "1") == (200, 1)


def test_more_clients_than_threads_wait_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_REQUESTS", 2)
    monkeypatch.setattr(server_module, "RECEIVE", 1.0)
    with serving(lambda body: body) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        assert ask(server, "1") == (200, 1), "as soon as those that say nothing are cut off"
        assert threading.active_count() < 12
        for connection in idle:
            connection.close()


def test_a_fault_while_answering_is_told_and_the_next_question_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(body: Any) -> Any:
        if body == 1:
            raise RuntimeError("no memory")
        return body

    with serving(answer) as server:
        assert ask(server, "1") == (500, {"error": "this question could not be answered (RuntimeError: no memory)"})
        assert ask(server, "2") == (200, 2)
    assert "RuntimeError: no memory" in capsys.readouterr().err


def test_bytes_that_are_no_request_are_refused_quietly(
    server: ExplorerServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for content in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET\r\n\r\n",
                    b"A" * 70_000 + b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
                    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n"):  # fmt: skip
        assert b'{"error": ' in raw(server, content)
    old = raw(server, f"GET {server.prefix}\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
    assert PAGE.encode() not in old, "HTTP/0.9 has no headers, and so no policy"
    assert send(server, "GET", server.prefix)[0] == 200
    assert capsys.readouterr().err == ""


def test_after_the_end_no_thread_and_no_port_is_left(runs: list[Explorable]) -> None:
    before = threading.active_count()
    with serving(lambda body: answer_with(runs, body)) as server:
        waiting = socket.create_connection(("127.0.0.1", server.port))
        assert ask(server, {"run": 0, "text": "a"})[0] == 200
        begun = time.monotonic()
    assert time.monotonic() - begun < 2, "a client that says nothing does not hold the end up"
    assert threading.active_count() == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    waiting.close()


# Whether the answers are right


def answer_to(run: Explorable, text: str, *edits: tuple[int, int, float], **more: Any) -> dict[str, Any]:
    given = [{"row": row, "source": source, "scale": scale} for row, source, scale in edits]
    return run.answer(read_question({"run": 0, "text": text, "edits": given, **more}))


def test_an_answer_holds_the_trace_and_the_loss_of_every_token(runs: list[Explorable]) -> None:
    run, text = runs[0], "what a layer reads"
    answer = answer_to(run, text, token=4)
    tokens = torch.tensor([list(text.encode())])
    traced = dm.trace(run.model, tokens)
    assert answer["table"]["tokens"] == list(text)
    np.testing.assert_allclose(unpack(answer["table"]["M"]), traced.M[0].unsqueeze(1).numpy(), atol=1e-3)
    np.testing.assert_allclose(unpack(answer["table"]["weights"])[:, 0], traced.weights[0].numpy(), atol=1e-3)
    assert answer["table"]["source_names"] == traced.source_names
    assert answer["table"]["reads"] == traced.reads
    assert answer["table"]["values"] is None
    logits = run.model(tokens).detach().log_softmax(-1)[0]
    losses = [-float(logits[t, tokens[0, t + 1]]) for t in range(len(text) - 1)]
    assert answer["plain"]["token_loss"] == answer["table"]["loss"] == [None, *map(pytest.approx, losses)]
    assert answer["plain"]["loss"] == pytest.approx(sum(losses) / len(losses))
    following = answer["plain"]["next"]
    assert [one["id"] for one in following] == logits[4].topk(12).indices.tolist()
    assert following[0]["probability"] == pytest.approx(float(logits[4].exp().max()))
    assert (answer["edited"], answer["how"], answer["truncated"]) == (None, None, 0)


@pytest.mark.parametrize("name", dm.list_mechanisms())
@pytest.mark.parametrize("renormalise", [False, True])
def test_an_edit_with_scale_1_changes_no_bit(name: str, renormalise: bool) -> None:
    answer = answer_to(explorable(name), "what a layer", (6, 0, 1), (3, 2, 1.0), renormalise=renormalise)
    assert answer["edited"] == answer["plain"]


@pytest.mark.parametrize("name", dm.list_mechanisms())
def test_an_edit_changes_the_probabilities_and_leaves_the_model_as_it_was(name: str) -> None:
    run = explorable(name)
    answer = answer_to(run, "what a layer", (6, 0, 0.0), (6, 6, -1.5))
    assert answer["edited"]["next"] != answer["plain"]["next"]
    assert answer["edited"]["loss"] != answer["plain"]["loss"]
    assert answer["how"]
    assert without_time(answer_to(run, "what a layer", (6, 0, 0.0), (6, 6, -1.5))) == without_time(answer)
    assert answer_to(run, "what a layer")["plain"] == answer["plain"]
    assert answer["table"]["M"]["shape"][1] <= 8


def planted() -> Explorable:
    """Only the fourth sublayer adds anything to the embedding."""
    run = explorable("residual")
    with torch.no_grad():
        for i, sublayer in enumerate(run.model.sublayers):
            if i != 3:
                (sublayer.o_proj if i % 2 == 0 else sublayer.down_proj).weight.zero_()
    return run


def test_cutting_a_planted_route_removes_its_sublayer_and_cutting_an_empty_one_does_nothing() -> None:
    run = planted()
    cut = answer_to(run, "what a layer reads", (6, 4, 0.0))
    empty = answer_to(run, "what a layer reads", (6, 2, 0.0))
    assert empty["edited"] == empty["plain"]
    assert cut["edited"]["next"][0]["probability"] != cut["plain"]["next"][0]["probability"]
    with torch.no_grad():
        run.model.sublayers[3].down_proj.weight.zero_()
    without = answer_to(run, "what a layer reads")["plain"]
    assert cut["edited"]["token_loss"][1:] == pytest.approx(without["token_loss"][1:], rel=1e-5)
    assert [one["id"] for one in cut["edited"]["next"]][:4] == [one["id"] for one in without["next"]][:4]


def test_two_runs_answer_differently(runs: list[Explorable]) -> None:
    first, second = (answer_with(runs, {"run": i, "text": "what a layer reads"}) for i in (0, 1))
    assert first["plain"] != second["plain"]
    assert first["table"]["tokens"] == second["table"]["tokens"]
    assert second["table"]["weights"] is None


def test_values_mixed_over_depth_are_shown_and_edited() -> None:
    run = explorable("residual", kv_mixer="depth_attention")
    cut = [{"row": 2, "source": 0, "scale": 0}]
    answer = answer_to(run, "what a layer", value_edits=cut)
    assert answer["table"]["values"]["shape"] == [12, 2, 3, 3]
    assert answer["edited"]["loss"] != answer["plain"]["loss"]
    same = answer_to(run, "what a layer", value_edits=[{**cut[0], "scale": 1}])
    assert same["edited"] == same["plain"]
    with pytest.raises(ValueError, match="value_edits: row 3; expected 0 to 2"):
        answer_to(run, "a", value_edits=[{**cut[0], "row": 3}])


def test_of_gates_for_each_channel_a_few_are_shown() -> None:
    run = explorable({"name": "highway", "gate": "channel"})  # type: ignore[arg-type]
    answer = answer_to(run, "what", (6, 2, 0))
    channels = sampled_channels(run.model.config.dim)
    traced = dm.trace(run.model, torch.tensor([list(b"what")]), channels=channels)
    np.testing.assert_allclose(unpack(answer["table"]["M"]), traced.M[0].numpy(), atol=1e-3)
    assert len(channels) == 8
    assert answer["edited"]["loss"] != answer["plain"]["loss"]


def test_heads_have_an_axis_of_their_own() -> None:
    table = answer_to(explorable({"name": "attnres", "heads": 4}), "what")["table"]  # type: ignore[arg-type]
    assert table["M"]["shape"] == [4, 4, N, N]
    assert table["weights"]["shape"] == [4, 4, N, N]


def test_a_text_beyond_the_limit_is_cut_and_the_answer_says_how_much(runs: list[Explorable]) -> None:
    answer = answer_to(runs[0], "x" * 70)
    assert (len(answer["table"]["tokens"]), answer["truncated"]) == (64, 6)
    assert answer_to(runs[0], "x" * 64)["plain"] == answer["plain"]
    with pytest.raises(ValueError, match="token is 64; expected 0 to 63"):
        answer_to(runs[0], "x" * 70, token=64)


def test_a_single_token_has_a_prediction_and_no_loss(runs: list[Explorable]) -> None:
    outcome = answer_to(runs[0], "a", (6, 0, 0.5))["edited"]
    assert (outcome["loss"], outcome["token_loss"], len(outcome["next"])) == (None, [None], 12)


HOSTILE = "</script><img src=x onerror=alert(1)>\u2028\u2029\x00\x1b[31m\"'\\ é漢🙂\u202e [/bold] {0} %s"


def test_hostile_texts_come_back_as_they_went_in(server: ExplorerServer) -> None:
    status, answer = ask(server, {"run": 0, "text": HOSTILE})
    assert status == 200
    kept = HOSTILE.encode()[:64]
    shown = answer["table"]["tokens"]
    assert len(shown) == len(kept)
    for byte, text in zip(kept, shown, strict=True):
        assert text == (chr(byte) if byte < 0x80 else f"\\x{byte:02x}")
    reply = send(server, "POST", f"{server.prefix}api/run", json.dumps({"run": 0, "text": HOSTILE}), **{
        "Content_Type": "application/json"})  # fmt: skip
    assert reply[1]["Content-Type"].startswith("application/json")
    assert reply[2].isascii(), "no line separator or escape reaches a reader raw"
    assert len(json.dumps({"run": 0, "text": "🙂" * 10_000})) < MOST_BYTES


def test_a_model_with_numbers_that_are_not_finite_gets_an_answer_of_valid_json() -> None:
    run = explorable("attnres")
    with torch.no_grad():
        run.model.norm.weight.fill_(float("inf"))
    with serving(lambda body: answer_with([run], body)) as server:
        status, answer = ask(server, {"run": 0, "text": "abc"})
    assert status == 200
    assert answer["plain"]["loss"] is None
    assert answer["plain"]["token_loss"] == [None] * 3
