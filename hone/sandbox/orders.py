"""What a client of the sandbox service asks for, read and checked. ValueError says what is wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hone.sandbox.result import RANGES

_LANGUAGES = ("python", "python3")


@dataclass(frozen=True)
class Limits:
    """The most that one request may use."""

    timeout_s: float
    memory_mb: int


def read_run(request: Any, most: Limits) -> dict[str, Any]:
    """Arguments of run_python from a `run_code` request."""
    language = _object(request).get("language", "python")
    if language not in _LANGUAGES:
        raise ValueError(f"language {language!r:.80} is not served; only {_LANGUAGES}")
    return {
        "code": _text(request, "code"),
        "stdin": _text(request, "stdin", ""),
        **_limits(request, most),
    }


def read_judgement(request: Any, most: Limits) -> dict[str, Any]:
    """Arguments of judge from a `judge_code` request."""
    return {
        "program": _text(_object(request), "program"),
        "tests": _text(request, "tests"),
        "preamble": _text(request, "preamble", ""),
        **_limits(request, most),
    }


def _limits(request: dict[str, Any], most: Limits) -> dict[str, Any]:
    limits: dict[str, Any] = {"memory_mb": most.memory_mb}
    if request.get("memory_limit_MB") == -1:  # SandboxFusion's word for no limit
        request = {**request, "memory_limit_MB": None}
    memory_mb = _number(request, "memory_limit_MB", RANGES["memory_mb"][1])
    if memory_mb is not None:  # a service gives what it has; the caller's own limit is below it
        limits["memory_mb"] = min(max(1, int(memory_mb)), most.memory_mb)
    timeout_s = _number(request, "run_timeout", most.timeout_s)
    if timeout_s is not None:
        limits["timeout_s"] = float(timeout_s)
    return limits


def _object(request: Any) -> dict[str, Any]:
    if not isinstance(request, dict):
        raise ValueError(f"the body must be a JSON object, not {type(request).__name__}")
    return request


def _text(request: dict[str, Any], name: str, absent: str | None = None) -> str:
    value = request.get(name)
    if value is None and absent is not None:
        return absent
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, not {type(value).__name__}")
    return value


def _number(request: dict[str, Any], name: str, most: float) -> float | None:
    """A positive finite number; None when the request leaves it open."""
    value = request.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r:.80} must be a number")
    if (isinstance(value, float) and not math.isfinite(value)) or not 0 < value <= most:
        raise ValueError(f"{name}={value!r:.80} must be above 0 and at most {most:g}")
    return value
