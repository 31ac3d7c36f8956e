"""Our own sandbox behind SandboxFusion's `run_code`: one machine runs untrusted code for others.

Plain HTTP without authentication: bind it to loopback or to a network you trust.
`python -m hone.sandbox.server --port 8080 --max-concurrent 8 --max-memory-mb 1024`
"""

from __future__ import annotations

import argparse
import json
import logging
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hone.sandbox.api import run_python
from hone.sandbox.result import SandboxError, SandboxResult, Status

log = logging.getLogger(__name__)

PATH = "/run_code"
_MAX_BODY = 64 << 20
_LANGUAGES = ("python", "python3")


class SandboxServer(ThreadingHTTPServer):
    """Answers POST /run_code; at most max_concurrent programs at a time, the rest wait."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, *, max_concurrent: int, max_memory_mb: int) -> None:
        super().__init__((host, port), _Handler)
        self.slots = threading.BoundedSemaphore(max_concurrent)
        self.max_memory_mb = max_memory_mb

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}{PATH}"


class _Handler(BaseHTTPRequestHandler):
    server: SandboxServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self) -> None:
        if self.path != PATH:
            self._answer(HTTPStatus.NOT_FOUND, {"detail": f"only {PATH} is served"})
            return
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 < length <= _MAX_BODY:
            self.close_connection = True
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"detail": f"body of {length} bytes"})
            return
        try:
            limits = _read(json.loads(self.rfile.read(length)), self.server.max_memory_mb)
        except (ValueError, TypeError, KeyError) as error:
            detail = f"{type(error).__name__}: {error}"
            self._answer(HTTPStatus.UNPROCESSABLE_ENTITY, {"detail": detail})
            return
        try:
            with self.server.slots:
                answer = _write(run_python(**limits))
        except (SandboxError, ValueError) as error:
            answer = {"status": "SandboxError", "message": str(error), "run_result": None}
        self._answer(HTTPStatus.OK, answer)

    def _answer(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _read(request: Any, max_memory_mb: int) -> dict[str, Any]:
    if not isinstance(request, dict):
        raise TypeError(f"an object was expected, not {type(request).__name__}")
    language = request.get("language", "python")
    if language not in _LANGUAGES:
        raise ValueError(f"language {language!r} is not served; only {_LANGUAGES}")
    asked = int(request.get("memory_limit_MB") or -1)
    limits = {
        "code": str(request["code"]),
        "stdin": str(request.get("stdin") or ""),
        "memory_mb": min(asked, max_memory_mb) if asked > 0 else max_memory_mb,
    }
    if request.get("run_timeout") is not None:
        limits["timeout_s"] = float(request["run_timeout"])
    return limits


def _write(result: SandboxResult) -> dict[str, Any]:
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
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    with SandboxServer(
        options.host,
        options.port,
        max_concurrent=options.max_concurrent,
        max_memory_mb=options.max_memory_mb,
    ) as server:
        log.info("sandbox service on %s", server.url)
        server.serve_forever()


if __name__ == "__main__":
    main()
