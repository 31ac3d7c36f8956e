"""Our own sandbox behind SandboxFusion's `run_code`, and `judge_code` for assertions in two boxes.

Plain HTTP without authentication: bind it to loopback or to a network you trust. A web page's request,
or one that is no plain JSON order, is refused before anything runs.
`python -m hone.sandbox.server --port 8080 --max-concurrent 8 --max-memory-mb 1024`
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import ipaddress
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hone.sandbox.api import run_python
from hone.sandbox.hang_up import HungUp, has_gone
from hone.sandbox.judging import judge
from hone.sandbox.orders import Answer, Limits, read_judgement, read_run
from hone.sandbox.result import RANGES, SandboxError, SandboxResult, Status, check_number
from hone.types import JsonValue

log = logging.getLogger(__name__)

RUN_PATH, JUDGE_PATH = "/run_code", "/judge_code"
MAX_BODY = 64 << 20
_LOOK_S = 0.2  # how often a request that waits for its turn looks whether its client is still there
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class SandboxServer(ThreadingHTTPServer):
    """Answers both paths; at most max_concurrent programs at a time, the rest wait."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        host: str,
        port: int,
        *,
        max_concurrent: int,
        max_memory_mb: int,
        max_timeout_s: float = 300.0,
        names: Sequence[str] = (),
    ) -> None:
        check_number("max_concurrent", max_concurrent, 1, 1 << 15)
        check_number("max_memory_mb", max_memory_mb, *RANGES["memory_mb"])
        check_number("max_timeout_s", max_timeout_s, *RANGES["timeout_s"])
        super().__init__((host, port), _Handler)
        self.slots = threading.BoundedSemaphore(max_concurrent)
        self.limits = Limits(max_timeout_s, max_memory_mb)
        self.names = frozenset(name.lower() for name in names)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}{RUN_PATH}"

    def is_own_name(self, host: str) -> bool:
        """A name that a foreign page cannot make its own by DNS: an address, ours, or a given one."""
        if host in _LOOPBACK or host in self.names or host == socket.gethostname().lower():
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True

    def handle_error(
        self,
        request: socket.socket | tuple[bytes, socket.socket],
        client_address: tuple[str, int] | str,
    ) -> None:
        log.warning("sandbox service: a request of %s failed", client_address, exc_info=True)


class Refused(Exception):
    """A request that is not answered by a run."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: SandboxServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self) -> None:
        try:
            order = self._order()
        except Refused as refusal:
            self.close_connection = True  # its body has not been read
            self._answer(refusal.status, {"detail": str(refusal)})
            return
        try:
            with self._slot():
                answer = order()
        except HungUp:
            self.close_connection = True
            return
        except (SandboxError, ValueError) as error:
            answer = {"status": "SandboxError", "message": str(error), "run_result": None}
        self._answer(HTTPStatus.OK, answer)

    def _order(self) -> Callable[[], Answer]:
        """What is to be run; Refused for anything that is no order of ours."""
        if self.path not in (RUN_PATH, JUDGE_PATH):
            raise Refused(HTTPStatus.NOT_FOUND, f"only {RUN_PATH} and {JUDGE_PATH} are served")
        self._check_sender()
        request = self._body()
        try:
            if self.path == RUN_PATH:
                limits = read_run(request, self.server.limits)
                return lambda: _write(run_python(**limits, caller=self.connection))
            judgement = read_judgement(request, self.server.limits)
            return lambda: {
                "status": "Success",
                "judgement": dataclasses.asdict(judge(**judgement, caller=self.connection)),
            }
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from None

    def _check_sender(self) -> None:
        """No web page sends JSON to a foreign host unasked, and none can hide its Origin."""
        host = _host(self.headers.get("Host", ""))
        if not self.server.is_own_name(host):
            detail = f"Host {host!r:.80} is not this server's; start it with --name {host:.80}"
            raise Refused(HTTPStatus.FORBIDDEN, detail)
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{self.headers.get('Host')}":
            raise Refused(HTTPStatus.FORBIDDEN, f"Origin {origin!r:.80} is foreign")
        kind = (self.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
        if kind != "application/json":
            detail = f"Content-Type must be application/json, not {kind!r:.80}"
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, detail)

    def _body(self) -> JsonValue:
        text = self.headers.get("Content-Length")
        if text is None or self.headers.get("Transfer-Encoding") is not None:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "a Content-Length is required, not chunks")
        single = len(self.headers.get_all("Content-Length", [])) == 1
        if not (single and text.isascii() and text.isdigit()) or len(text) > 20:
            detail = f"Content-Length {text!r:.80} is no length"
            raise Refused(HTTPStatus.BAD_REQUEST, detail)
        length = int(text)
        if length > MAX_BODY:
            detail = f"a body of {length} bytes; at most {MAX_BODY} are read"
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail)
        data = self.rfile.read(length)
        if len(data) != length:
            raise Refused(HTTPStatus.BAD_REQUEST, f"the body ended after {len(data)} bytes")
        try:
            return json.loads(data)
        except RecursionError:
            raise Refused(HTTPStatus.BAD_REQUEST, "the JSON is nested too deeply") from None
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from None

    @contextlib.contextmanager
    def _slot(self) -> Iterator[None]:
        while not self.server.slots.acquire(timeout=_LOOK_S):
            if has_gone(self.connection):
                raise HungUp("the client hung up while its request waited")
        try:
            yield
        finally:
            self.server.slots.release()

    def _answer(self, status: HTTPStatus, content: Answer) -> None:
        body = json.dumps(content).encode()
        with contextlib.suppress(ConnectionError):  # the client has gone
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: str | int) -> None:
        log.debug(format, *args)


def _host(header: str) -> str:
    """The name or address of a Host header, without its port."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _write(result: SandboxResult) -> Answer:
    words = {Status.OK: "Finished", Status.ERROR: "Finished", Status.TIMEOUT: "TimeLimitExceeded"}
    return {
        "status": "Success" if result.ok else "Failed",
        "message": "" if result.ok else f"the program ended with {result.status.value}",
        "compile_result": None,
        "run_result": {
            "status": words.get(result.status, "Error"),
            "execution_time": result.wall_s,
            "return_code": result.exit_code,
            "stdout": result.stdout,
            "stderr": result.stderr,
        },
        "executor_pod_name": None,
        "files": {},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="Run untrusted Python for other machines.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-concurrent", type=int, required=True)
    parser.add_argument("--max-memory-mb", type=int, required=True)
    parser.add_argument("--max-timeout-s", type=float, default=300.0)
    parser.add_argument("--name", action="append", default=[], help="a name clients call it by")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    with SandboxServer(
        options.host,
        options.port,
        max_concurrent=options.max_concurrent,
        max_memory_mb=options.max_memory_mb,
        max_timeout_s=options.max_timeout_s,
        names=options.name,
    ) as server:
        log.info("sandbox service on %s", server.url)
        server.serve_forever()


if __name__ == "__main__":
    main()
