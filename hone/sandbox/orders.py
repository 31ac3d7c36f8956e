"""What a client of the sandbox service asks for, read and checked; ValueError says what is wrong.

And the shape of the answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypedDict

from hone.sandbox.result import RANGES
from hone.types import JsonObject, JsonValue, Settings

_LANGUAGES = ("python", "python3")


@dataclass(frozen=True)
class Limits:
    """The most that one request may use."""

    timeout_s: float
    memory_mb: int


class _RunLimits(TypedDict, total=False):
    timeout_s: float
    memory_mb: int


class RunOrder(_RunLimits):
    """Arguments of run_python."""

    code: str
    stdin: str


class JudgeOrder(_RunLimits):
    """Arguments of judge."""

    program: str
    tests: str
    preamble: str


class RunReport(TypedDict):
    """How a program ended, in SandboxFusion's words."""

    status: str
    execution_time: float | None
    return_code: int | None
    stdout: str | None
    stderr: str | None


class Answer(TypedDict, total=False):
    """What the service answers: one of the reports, or a judgement."""

    status: str
    message: str | None
    compile_result: RunReport | None
    run_result: RunReport | None
    judgement: Settings
    executor_pod_name: str | None
    files: dict[str, str]
    detail: str


def read_run(request: JsonValue, most: Limits) -> RunOrder:
    """Arguments of run_python from a `run_code` request."""
    request = _object(request)
    language = request.get("language", "python")
    if language not in _LANGUAGES:
        raise ValueError(f"language {language!r:.80} is not served; only {_LANGUAGES}")
    return {
        "code": _text(request, "code"),
        "stdin": _text(request, "stdin", ""),
        **_limits(request, most),
    }


def read_judgement(request: JsonValue, most: Limits) -> JudgeOrder:
    """Arguments of judge from a `judge_code` request."""
    request = _object(request)
    return {
        "program": _text(request, "program"),
        "tests": _text(request, "tests"),
        "preamble": _text(request, "preamble", ""),
        **_limits(request, most),
    }


def _limits(request: JsonObject, most: Limits) -> _RunLimits:
    limits: _RunLimits = {"memory_mb": most.memory_mb}
    if request.get("memory_limit_MB") == -1:  # SandboxFusion's word for no limit
        request = {**request, "memory_limit_MB": None}
    memory_mb = _number(request, "memory_limit_MB", RANGES["memory_mb"][1])
    if memory_mb is not None:  # a service gives what it has; the caller's own limit is below it
        limits["memory_mb"] = min(max(1, int(memory_mb)), most.memory_mb)
    timeout_s = _number(request, "run_timeout", most.timeout_s)
    if timeout_s is not None:
        limits["timeout_s"] = float(timeout_s)
    return limits


def _object(request: JsonValue) -> JsonObject:
    if not isinstance(request, dict):
        raise ValueError(f"the body must be a JSON object, not {type(request).__name__}")
    return request


def _text(request: JsonObject, name: str, absent: str | None = None) -> str:
    value = request.get(name)
    if value is None and absent is not None:
        return absent
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, not {type(value).__name__}")
    return value


def _number(request: JsonObject, name: str, most: float) -> float | None:
    """A positive finite number; None when the request leaves it open."""
    value = request.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r:.80} must be a number")
    if (isinstance(value, float) and not math.isfinite(value)) or not 0 < value <= most:
        raise ValueError(f"{name}={value!r:.80} must be above 0 and at most {most:g}")
    return value
