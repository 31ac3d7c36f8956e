"""A client of services that run code with SandboxFusion's `run_code` API; the service isolates the program.

A failure of the service raises an error, and is never the result of a program.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hone.sandbox.judging import Judgement
from hone.sandbox.result import (
    Job,
    JobFields,
    SandboxError,
    SandboxResult,
    SandboxUnavailable,
    Status,
)
from hone.services.json_client import AnswerTooLarge, ServiceError, post_json
from hone.types import Fields, JsonObject

if TYPE_CHECKING:
    from typing_extensions import Unpack

_RETRY_CODES = frozenset({429, 502, 503, 504})  # HTTP status: the service is busy or restarts
_NOT_SERVED_CODES = frozenset({404, 405, 501})  # HTTP status: the service has no such path
_ATTEMPTS = 4
_FIRST_PAUSE_S = 0.25  # doubles after each attempt
_QUEUE_TIMEOUT_S = (
    30.0  # for the queue of the service, in addition to the time limits of the program
)


class SandboxServiceError(SandboxError):
    """The service could not be reached, or sent an invalid answer."""

    def __init__(self, message: str, http_status: int | None = None) -> None:
        super().__init__(message)
        self.http_status = http_status


class SandboxService:
    """The client of one service, which limits the number of concurrent requests."""

    def __init__(self, url: str, *, max_concurrent: int, memory_limit_mb: int) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"sandbox service: url={url!r} must begin with http:// or https://")
        if max_concurrent < 1:
            raise ValueError(f"sandbox service: max_concurrent={max_concurrent} must be at least 1")
        # As in the other servers' settings, a URL without a path gets the usual one.
        self._url = url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/run_code"
        self._slots = threading.BoundedSemaphore(max_concurrent)
        self._memory_limit_mb = memory_limit_mb

    def run_python(self, code: str, **job_fields: Unpack[JobFields]) -> SandboxResult:
        """Runs a program on the service; the smaller memory limit of job and service applies."""
        job = Job(code, **job_fields)
        if job.files or job.argv:
            raise ValueError("sandbox service: files and argv are not part of its API")
        request: JsonObject = {
            "code": job.code,
            "stdin": job.stdin,
            "language": "python",
            "compile_timeout": job.timeout_s,
        }
        answer = self._post(self._url, request, job.timeout_s, job.memory_mb)
        try:
            return _to_result(answer, job.output_bytes)
        except (TypeError, ValueError) as error:
            raise SandboxServiceError(f"sandbox service {self._url}: {error}") from error

    def judge(
        self, program: str, tests: str, *, preamble: str, timeout_s: float, memory_mb: int
    ) -> Judgement:
        """Runs `hone.sandbox.judging.judge` on the service, which must be a `hone.sandbox.server`."""
        url = self._url.rpartition("/")[0] + "/judge_code"
        request: JsonObject = {"program": program, "tests": tests, "preamble": preamble}
        try:
            return Judgement(**self._post(url, request, timeout_s, memory_mb)["judgement"])
        except (KeyError, TypeError) as error:
            raise SandboxServiceError(f"sandbox service {url} sent no judgement") from error
        except SandboxServiceError as error:
            if error.http_status not in _NOT_SERVED_CODES:
                raise
            raise SandboxUnavailable(
                f"the service {self._url} cannot run the tests in a box of their own (it has no"
                " judge_code). Run `python -m hone.sandbox.server` as the service, or leave"
                " reward_model.sandbox_fusion.url empty to judge assertions on this machine"
            ) from error

    def _post(self, url: str, fields: JsonObject, timeout_s: float, memory_mb: int) -> Fields:
        """Sends a request and returns the answer; retries if the service is busy or unreachable."""
        memory_mb = min(memory_mb, self._memory_limit_mb)
        limits = {"run_timeout": timeout_s, "memory_limit_MB": memory_mb}
        body = json.dumps({**fields, **limits}).encode()
        with self._slots:
            for attempt in range(_ATTEMPTS):
                if attempt > 0:
                    time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
                try:
                    data = post_json(url, body, timeout_s=2 * timeout_s + _QUEUE_TIMEOUT_S)
                    break
                except ServiceError as error:
                    reason = str(error)
                    is_refusal = error.status is not None and error.status not in _RETRY_CODES
                    if is_refusal or isinstance(error, AnswerTooLarge):
                        raise SandboxServiceError(
                            f"sandbox service {url} refused the request: {reason}", error.status
                        ) from error
            else:
                raise SandboxServiceError(
                    f"sandbox service {url} gave no answer in {_ATTEMPTS} attempts ({reason});"
                    " is it running, and is reward_model.sandbox_fusion.url right?"
                )
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise SandboxServiceError(
                f"sandbox service {url} sent no JSON: {data[:200]!r}"
            ) from error
        if not isinstance(answer, dict) or "status" not in answer:
            raise SandboxServiceError(f"sandbox service {url}: no 'status' in {data[:200]!r}")
        if answer["status"] == "SandboxError":
            raise SandboxServiceError(f"sandbox service failed: {answer.get('message') or answer}")
        return answer


def _to_result(answer: Fields, output_bytes: int) -> SandboxResult:
    result = answer.get("run_result") or answer.get("compile_result")
    if not isinstance(result, dict):
        raise SandboxServiceError(
            f"sandbox service: the answer has neither run_result nor compile_result: {answer}"
        )
    texts = (str(result.get(name) or "") for name in ("stdout", "stderr"))
    stdout, stderr = (text.encode(errors="replace") for text in texts)
    return_code = result.get("return_code")
    if result.get("status") == "TimeLimitExceeded":
        status = Status.TIMEOUT
    elif len(stdout) + len(stderr) > output_bytes:
        status = Status.OUTPUT
    elif result.get("status") == "Finished" and return_code == 0:
        status = Status.OK
    else:
        status = Status.of_failed_program(stderr)
    return SandboxResult(
        status=status,
        exit_code=None if status is Status.TIMEOUT else return_code,
        stdout=stdout[:output_bytes].decode(errors="replace"),
        stderr=stderr[: max(0, output_bytes - len(stdout))].decode(errors="replace"),
        wall_s=float(result.get("execution_time") or 0.0),
    )
