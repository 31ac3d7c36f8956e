"""Serves the local sandbox over HTTP: SandboxFusion's `run_code`, and `judge_code` for assertions.

There is no authentication: bind the server to loopback or to a trusted network. Requests from web pages and
requests that are not JSON are refused before anything runs.
`python -m hone.sandbox.server --port 8080 --max-concurrent 8 --max-memory-mb 1024`
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import socket
from collections.abc import Callable, Sequence
from typing import TypedDict

from hone.sandbox.client import CallerDisconnected
from hone.sandbox.judging import judge
from hone.sandbox.layers import run_python
from hone.sandbox.result import RANGES, SandboxError, SandboxResult, Status, check_number
from hone.services.json_server import (
    HOST_NAME_HELP,
    MAX_CONNECTIONS,
    Caller,
    ClientDisconnected,
    JsonServer,
    Slots,
)
from hone.types import JsonObject, JsonValue

log = logging.getLogger(__name__)

RUN_PATH, JUDGE_PATH = "/run_code", "/judge_code"
MAX_BODY_BYTES = 64 << 20
_LANGUAGES = ("python", "python3")
_SANDBOX_FUSION_STATUSES = {
    Status.OK: "Finished",
    Status.ERROR: "Finished",
    Status.TIMEOUT: "TimeLimitExceeded",
}


class SandboxServer(JsonServer):
    """Serves RUN_PATH and JUDGE_PATH; runs at most `max_concurrent` requests at a time."""

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
        super().__init__(
            host,
            port,
            posts={RUN_PATH: self._run_code, JUDGE_PATH: self._judge_code},
            max_body_bytes=MAX_BODY_BYTES,
            max_connections=max(MAX_CONNECTIONS, 2 * max_concurrent),
            host_names=host_names,
        )
        self._slots = Slots(max_concurrent)
        self._max_memory_mb, self._max_timeout_s = max_memory_mb, max_timeout_s

    @property
    def url(self) -> str:
        return self.address + RUN_PATH

    def _run_code(self, request: JsonObject, caller: Caller) -> JsonObject:
        limits = self._parse_limits(request)
        language = request.get("language", "python")
        if language not in _LANGUAGES:
            raise ValueError(f"language {language!r:.80} is not one of {_LANGUAGES}")
        code, stdin = _text_field(request, "code"), _text_field(request, "stdin", "")
        connection = caller.connection
        with caller.hold(self._slots):
            return _catch_failures(
                lambda: _run_response(
                    run_python(code=code, stdin=stdin, caller_socket=connection, **limits)
                )
            )

    def _judge_code(self, request: JsonObject, caller: Caller) -> JsonObject:
        limits = self._parse_limits(request)
        program, tests = _text_field(request, "program"), _text_field(request, "tests")
        preamble = _text_field(request, "preamble", "")
        with caller.hold(self._slots):
            return _catch_failures(
                lambda: _judge_response(program, tests, preamble, limits, caller.connection)
            )

    def _parse_limits(self, request: JsonObject) -> _Limits:
        limits: _Limits = {"memory_mb": self._max_memory_mb}
        memory_mb = request.get("memory_limit_MB")
        if memory_mb not in (None, -1):  # -1 means no limit in SandboxFusion
            memory_mb = _check_limit("memory_limit_MB", memory_mb, RANGES["memory_mb"][1])
            # The maximum of the server replaces a larger limit.
            limits["memory_mb"] = min(max(1, int(memory_mb)), self._max_memory_mb)
        timeout_s = request.get("run_timeout")
        if timeout_s is not None:
            limits["timeout_s"] = _check_limit("run_timeout", timeout_s, self._max_timeout_s)
        return limits


def _catch_failures(run: Callable[[], JsonObject]) -> JsonObject:
    """Returns the answer of a run; a failure of the sandbox is an answer too."""
    try:
        return run()
    except CallerDisconnected:
        raise ClientDisconnected from None
    except (SandboxError, ValueError) as error:
        return {"status": "SandboxError", "message": str(error), "run_result": None}


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
        "--name", action="append", default=[], dest="host_names", help=HOST_NAME_HELP
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    server = SandboxServer(**vars(options))
    log.info("sandbox service on %s", server.url)
    server.serve_until_interrupted()


if __name__ == "__main__":
    main()
