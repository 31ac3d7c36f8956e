"""Serves the local sandbox over HTTP: SandboxFusion's `run_code`, and `judge_code` for assertions.

There is no authentication: bind the server to loopback or to a trusted network. Requests from web pages and
requests that are not JSON are refused before anything runs.
`python -m hone.sandbox.server --port 8080 --max-concurrent 8 --max-memory-mb 1024`
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import ipaddress
import json
import logging
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypedDict

from hone.sandbox.client import DISCONNECT_EVENTS, CallerDisconnected
from hone.sandbox.judging import judge
from hone.sandbox.layers import run_python
from hone.sandbox.result import RANGES, SandboxError, SandboxResult, Status, check_number
from hone.types import JsonObject, JsonValue

log = logging.getLogger(__name__)

RUN_PATH, JUDGE_PATH = "/run_code", "/judge_code"
MAX_BODY_BYTES = 64 << 20
_CHECK_INTERVAL_S = 0.2  # between two checks whether the client of a waiting request is connected
_LANGUAGES = ("python", "python3")
_SANDBOX_FUSION_STATUSES = {
    Status.OK: "Finished",
    Status.ERROR: "Finished",
    Status.TIMEOUT: "TimeLimitExceeded",
}


class SandboxServer(ThreadingHTTPServer):
    """Serves RUN_PATH and JUDGE_PATH; runs at most `max_concurrent` requests at a time."""

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
        host_names: Sequence[str] = (),
    ) -> None:
        check_number("max_concurrent", max_concurrent, 1, 1 << 15)
        check_number("max_memory_mb", max_memory_mb, *RANGES["memory_mb"])
        check_number("max_timeout_s", max_timeout_s, *RANGES["timeout_s"])
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.slots = threading.BoundedSemaphore(max_concurrent)
        self.max_memory_mb, self.max_timeout_s = max_memory_mb, max_timeout_s
        self.host_names = {"localhost", socket.gethostname().lower(), *map(str.lower, host_names)}

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if self.address_family == socket.AF_INET6 else host
        return f"http://{name!s}:{port}{RUN_PATH}"

    def is_own_host(self, host: str) -> bool:
        """Returns whether the host of a request is an IP address or a name of this server.

        In a DNS-rebinding attack, it is a name of the attacker.
        """
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            return True
        return host in self.host_names

    def handle_error(
        self,
        request: socket.socket | tuple[bytes, socket.socket],
        client_address: tuple[str, int] | str,
    ) -> None:
        log.warning("sandbox service: a request from %s failed", client_address, exc_info=True)


class HttpError(Exception):
    """A request is refused; nothing runs."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: SandboxServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self) -> None:
        try:
            run_request = self._parse_request()
        except HttpError as error:
            self.close_connection = True  # the body has not been read
            self._send_json(error.status, {"detail": str(error)})
            return
        try:
            with self._hold_slot():
                answer = run_request()
        except CallerDisconnected:
            self.close_connection = True
            return
        except (SandboxError, ValueError) as error:
            answer = {"status": "SandboxError", "message": str(error), "run_result": None}
        self._send_json(HTTPStatus.OK, answer)

    def _parse_request(self) -> Callable[[], JsonObject]:
        """Returns a function that runs the request; raises HttpError for an invalid request."""
        if self.path not in (RUN_PATH, JUDGE_PATH):
            raise HttpError(HTTPStatus.NOT_FOUND, f"only {RUN_PATH} and {JUDGE_PATH} are served")
        self._check_sender()
        request = self._read_body()
        try:
            if not isinstance(request, dict):
                raise ValueError(f"the body must be a JSON object, not {type(request).__name__}")
            limits = self._parse_limits(request)
            if self.path == JUDGE_PATH:
                program, tests = _text_field(request, "program"), _text_field(request, "tests")
                preamble = _text_field(request, "preamble", "")
                return lambda: _judge_response(program, tests, preamble, limits, self.connection)
            language = request.get("language", "python")
            if language not in _LANGUAGES:
                raise ValueError(f"language {language!r:.80} is not one of {_LANGUAGES}")
            code, stdin = _text_field(request, "code"), _text_field(request, "stdin", "")
            return lambda: _run_response(
                run_python(code=code, stdin=stdin, caller_socket=self.connection, **limits)
            )
        except ValueError as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, str(error)) from None

    def _parse_limits(self, request: JsonObject) -> _Limits:
        limits: _Limits = {"memory_mb": self.server.max_memory_mb}
        memory_mb = request.get("memory_limit_MB")
        if memory_mb not in (None, -1):  # -1 means no limit in SandboxFusion
            memory_mb = _check_limit("memory_limit_MB", memory_mb, RANGES["memory_mb"][1])
            # The maximum of the server replaces a larger limit.
            limits["memory_mb"] = min(max(1, int(memory_mb)), self.server.max_memory_mb)
        timeout_s = request.get("run_timeout")
        if timeout_s is not None:
            limits["timeout_s"] = _check_limit("run_timeout", timeout_s, self.server.max_timeout_s)
        return limits

    def _check_sender(self) -> None:
        """Raises HttpError for requests of web pages, which have another Host, Origin or Content-Type."""
        host_header = self.headers.get("Host", "")
        host = host_header.strip().lower()
        host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if not self.server.is_own_host(host):
            detail = (
                f"Host {host!r:.80} is not a name of this server; start it with --name {host:.80}"
            )
            raise HttpError(HTTPStatus.FORBIDDEN, detail)
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{host_header}":
            raise HttpError(HTTPStatus.FORBIDDEN, f"Origin {origin!r:.80} is not this server")
        content_type = (self.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            detail = f"Content-Type must be application/json, not {content_type!r:.80}"
            raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, detail)

    def _read_body(self) -> JsonValue:
        length_text = self.headers.get("Content-Length")
        if length_text is None or self.headers.get("Transfer-Encoding") is not None:
            raise HttpError(
                HTTPStatus.LENGTH_REQUIRED, "Content-Length is required; chunked bodies are refused"
            )
        is_single = len(self.headers.get_all("Content-Length", [])) == 1
        is_number = length_text.isascii() and length_text.isdigit() and len(length_text) <= 20
        if not (is_single and is_number):
            detail = f"Content-Length {length_text!r:.80} is not a length"
            raise HttpError(HTTPStatus.BAD_REQUEST, detail)
        length = int(length_text)
        if length > MAX_BODY_BYTES:
            detail = f"the body has {length} bytes; at most {MAX_BODY_BYTES} are allowed"
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail)
        data = self.rfile.read(length)
        if len(data) != length:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"the body ended after {len(data)} bytes")
        try:
            return json.loads(data)
        except RecursionError:
            raise HttpError(HTTPStatus.BAD_REQUEST, "the JSON is nested too deeply") from None
        except ValueError as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from None

    @contextlib.contextmanager
    def _hold_slot(self) -> Iterator[None]:
        """Holds a slot in the `with` block; raises CallerDisconnected if the client disconnects before."""
        poll = select.poll()
        poll.register(self.connection, DISCONNECT_EVENTS)
        while not self.server.slots.acquire(timeout=_CHECK_INTERVAL_S):
            if poll.poll(0):
                raise CallerDisconnected("the client disconnected while its request waited")
        try:
            yield
        finally:
            self.server.slots.release()

    def _send_json(self, status: HTTPStatus, content: JsonObject) -> None:
        body = json.dumps(content).encode()
        with contextlib.suppress(ConnectionError):  # the client has disconnected
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: str | int) -> None:
        log.debug(format, *args)


class _Limits(TypedDict, total=False):
    timeout_s: float
    memory_mb: int


def _text_field(request: JsonObject, name: str, default: str | None = None) -> str:
    value = request.get(name)
    value = default if value is None else value
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, not {type(value).__name__}")
    return value


def _check_limit(name: str, value: JsonValue, highest: float) -> float:
    """Returns the value as a number; raises ValueError unless it is above 0 and at most `highest`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r:.80} must be a number")
    if not 0 < value <= highest:  # also false for NaN
        raise ValueError(f"{name}={value!r:.80} must be above 0 and at most {highest:g}")
    return float(value)


def _judge_response(
    program: str, tests: str, preamble: str, limits: _Limits, caller_socket: socket.socket
) -> JsonObject:
    judgement = judge(program, tests, preamble=preamble, caller_socket=caller_socket, **limits)
    return {"status": "Success", "judgement": dataclasses.asdict(judgement)}


def _run_response(result: SandboxResult) -> JsonObject:
    """Returns the result in SandboxFusion's response format."""
    return {
        "status": "Success" if result.ok else "Failed",
        "message": "" if result.ok else f"the program ended with {result.status.value}",
        "compile_result": None,
        "run_result": {
            "status": _SANDBOX_FUSION_STATUSES.get(result.status, "Error"),
            "execution_time": result.wall_s,
            "return_code": result.exit_code,
            "stdout": result.stdout,
            "stderr": result.stderr,
        },
        "executor_pod_name": None,
        "files": {},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until interrupted."""
    parser = argparse.ArgumentParser(description="Run untrusted Python for other machines.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-concurrent", type=int, required=True)
    parser.add_argument("--max-memory-mb", type=int, required=True)
    parser.add_argument("--max-timeout-s", type=float, default=300.0)
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        dest="host_names",
        help="a host name that clients use for this server; can be repeated",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    with SandboxServer(**vars(options)) as server:
        log.info("sandbox service on %s", server.url)
        server.serve_forever()


if __name__ == "__main__":
    main()
