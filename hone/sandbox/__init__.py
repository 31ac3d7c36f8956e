"""Runs untrusted code in a box without network or host files, under hard limits."""

from __future__ import annotations

from hone.sandbox.client import close
from hone.sandbox.layers import DEFAULT_MINIMUM, LayerState, layers, run_many, run_python
from hone.sandbox.result import Job, SandboxError, SandboxResult, SandboxUnavailable, Status
from hone.sandbox.selftest import Check, self_test

__all__ = [
    "DEFAULT_MINIMUM",
    "Check",
    "Job",
    "LayerState",
    "SandboxError",
    "SandboxResult",
    "SandboxUnavailable",
    "Status",
    "close",
    "layers",
    "run_many",
    "run_python",
    "self_test",
]
