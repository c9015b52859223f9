"""The explorer's server: one page and one address for questions, for this machine only, from the standard library.

Whoever knows the address may ask, so it holds a secret. What a foreign page in the same browser could send (another
Host, Origin or Content-Type) is refused. No file is ever read by path. Every request has a thread that receives, waits
and sends; answers are computed one after the other by a single further thread.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import select
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from depthmix.support.checks import check_range
from depthmix.support.terminal import say

HOST = "127.0.0.1"
MOST_BYTES = 200_000  # of the body of a request
MOST_REQUESTS = 64  # at a time; others wait in the queue of the system
RECEIVE = 10.0  # seconds within which a request must be complete, or an answer be taken
LINGER = 1.0  # seconds in which the rest of a refused request is discarded, so that its client reads the refusal
POLL = 0.1  # seconds between two checks of whether the client still waits, whether a request is overdue
METHODS = "GET, HEAD, POST"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Connection": "close",
}
SCRIPT = re.compile(r"<script\b([^>]*)>(.*?)</script>", re.DOTALL | re.IGNORECASE)


class Refusal(Exception):
    """A request without an answer: the status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Unused(Exception):
    """No request came for as long as the server should wait."""


class ExplorerServer(ThreadingHTTPServer):
    """Serves `page`, and what `answer` makes of the JSON of a question; it raises a ValueError for a wrong one.

    Attributes:
        address: of the page, with the secret.
    """

    daemon_threads = False  # `close` waits for them
    request_queue_size = 256
    allow_reuse_address = os.name != "nt"  # there it would let another program share the port

    def __init__(self, page: str, answer: Callable[[Any], Any], *, port: int = 0) -> None:
        check_range("port", port, 0, 65535)
        self.page, self.policy, self.answer = page.encode(), security_policy(page), answer
        self.free = threading.BoundedSemaphore(MOST_REQUESTS)
        self.deadlines: dict[socket.socket, float | None] = {}  # of open connections; None: the request is complete
        self.closing, self.idle, self.last_used = False, float("inf"), time.monotonic()
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="answers")
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise OSError(f"port {port} cannot be used ({error}); choose another, or 0 for any free port") from error
        self.port = int(self.socket.getsockname()[1])
        self.names = (f"{HOST}:{self.port}", f"localhost:{self.port}")
        self.prefix = f"/{secrets.token_urlsafe(24)}/"
        self.address = f"http://{self.names[0]}{self.prefix}"

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # that of HTTPServer looks the host up by DNS
        self.server_name, self.server_port = HOST, int(self.socket.getsockname()[1])

    def serve(self, idle: float | None = None) -> None:
        """Serve until an exception (Ctrl-C), or until nobody has asked for `idle` seconds. Nothing is left running."""
        self.idle, self.last_used = float("inf") if idle is None else idle, time.monotonic()
        try:
            with contextlib.suppress(Unused):
                self.serve_forever(poll_interval=POLL)
        finally:
            self.close()

    def close(self) -> None:
        """Close all connections, wait for the answer that is being computed, and for all threads."""
        self.closing = True
        self.socket.close()
        for connection in [*self.deadlines]:
            hang_up(connection)
        self.worker.shutdown(wait=True, cancel_futures=True)
        self.server_close()

    def service_actions(self) -> None:
        """Between requests: hang up on clients that are too slow; end if nobody asks."""
        now = time.monotonic()
        for connection, deadline in [*self.deadlines.items()]:
            if deadline is not None and now > deadline:
                hang_up(connection)
        if self.deadlines:
            self.last_used = now
        elif now - self.last_used >= self.idle:
            raise Unused

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self.free.acquire(timeout=POLL):
            self.service_actions()
        self.deadlines[request] = time.monotonic() + RECEIVE
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was started
            self.end(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.end(request)

    def end(self, request: socket.socket) -> None:
        if request in self.deadlines:  # Ctrl-C may end a request in two ways
            del self.deadlines[request]
            self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error; anything else is a fault of this program, told in one line."""
        import sys

        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            say(f"a request failed: {type(error).__name__}: {error}")


class Handler(BaseHTTPRequestHandler):
    """One request: it is checked, answered and the connection closed."""

    server: ExplorerServer
    timeout = RECEIVE  # of a single read or write
    unread = False  # whether the client may still send

    def answer_request(self) -> None:
        try:
            self.send(HTTPStatus.OK, *self.content())
        except Refusal as refusal:
            self.refuse(refusal.status, refusal.reason)

    do_GET = do_HEAD = do_POST = answer_request

    def content(self) -> tuple[str, bytes]:
        """The content type and the body of the answer."""
        self.unread = self.command == "POST"
        if self.request_version == "HTTP/0.9":  # its answers have no headers, and so no policy
            raise Refusal(400, "expected HTTP/1.0 or 1.1")
        self.check_client()
        path, page = self.path.encode("latin-1", "replace"), self.server.prefix.encode()
        is_page, is_api = (hmac.compare_digest(path, known) for known in (page, page + b"api/run"))
        if is_page and self.command != "POST":
            self.server.deadlines[self.connection] = None
            return "text/html; charset=utf-8", self.server.page
        if is_api and self.command == "POST":
            return "application/json; charset=utf-8", self.compute(self.question())
        raise Refusal(405, "this address takes another method") if is_page or is_api else Refusal(404, "not found")

    def check_client(self) -> None:
        """Only this machine's own pages and programs: other sites reach a browser, and so this port."""
        if self.header("Host") not in self.server.names:
            raise Refusal(403, f"the request is not for {self.server.names[0]}; open the address that was printed")
        origin, site = self.header("Origin"), self.header("Sec-Fetch-Site")
        if origin not in (None, f"http://{self.header('Host')}") or site not in (None, "same-origin", "none"):
            raise Refusal(403, "the request comes from another site; paste the address into the browser's address bar")

    def header(self, name: str) -> str | None:
        values = self.headers.get_all(name, [])
        if len(values) > 1:
            raise Refusal(400, f"{len(values)} headers {name}; expected one")
        return values[0].strip() if values else None

    def question(self) -> Any:
        """The body of the request, read only if its length is known and small."""
        kind, length = self.header("Content-Type") or "", self.header("Content-Length") or ""
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise Refusal(400, "expected Content-Type: application/json")
        if self.header("Transfer-Encoding") is not None or not re.fullmatch("[0-9]+", length):
            raise Refusal(400, "expected a body with its Content-Length, not in chunks")
        if len(length.lstrip("0")) > 9 or int(length) > MOST_BYTES:
            raise Refusal(413, f"the body is too long; expected at most {MOST_BYTES:,} bytes")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionError("the client left")
        self.unread, self.server.deadlines[self.connection] = False, None
        try:
            return json.loads(body.decode("utf-8"), parse_constant=refuse_constant)
        except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise Refusal(400, f"the body is not valid JSON ({reason})") from None

    def compute(self, question: Any) -> bytes:
        """The answer, in turn. Nothing is computed for a client that left: a page asks again while its user drags."""
        try:
            future = self.server.worker.submit(self.server.answer, question)
        except RuntimeError:  # the server is closing
            raise ConnectionError("the server is closing") from None
        while not wait([future], timeout=POLL).done:
            if self.server.closing or client_left(self.connection):
                future.cancel()
                raise ConnectionError("the client left")
        try:
            return json.dumps(future.result(), allow_nan=False).encode("ascii")
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        except Exception as error:  # the next question may have an answer
            say(f"a question could not be answered: {type(error).__name__}: {error}")
            raise Refusal(500, f"this question could not be answered ({type(error).__name__}: {error})") from None

    def send(self, status: int, kind: str, body: bytes) -> None:
        self.close_connection = True
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Security-Policy": self.server.policy}.items():
            self.send_header(name, value)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", METHODS)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def refuse(self, status: int, reason: str) -> None:
        self.send(status, "application/json; charset=utf-8", json.dumps({"error": reason}).encode("ascii"))
        if self.unread:
            discard(self.connection)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses: requests that it cannot parse, and other methods."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            code, message = 405, f"expected one of {METHODS}"
        self.unread = True
        self.refuse(code, message or HTTPStatus(code).phrase)

    def version_string(self) -> str:
        return "depthmix"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged: requests hold the user's texts."""


def security_policy(page: str) -> str:
    """Scripts run only if they are those of the page itself, by their hashes; nothing is loaded from anywhere."""
    inline = [text for attributes, text in SCRIPT.findall(page) if "application/json" not in attributes]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline]
    scripts = " ".join(f"'sha256-{value}'" for value in hashes) or "'none'"
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
        "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def client_left(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection: it is readable, and there is nothing to read."""
    try:
        return bool(select.select([connection], [], [], 0)[0]) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True


def hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def discard(connection: socket.socket) -> None:
    """Read and forget for a moment: closing with unread data would reset the connection, and the answer be lost."""
    until = time.monotonic() + LINGER
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while (left := until - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(1 << 16):
                return
