"""Untrusted code in a box: no network, no files of ours, hard limits, killed whole.

`run_python(code)` for one program, `run_many(jobs)` for many, `layers()` for which walls stand.
"""

from __future__ import annotations

from hone.sandbox.api import run_many, run_python
from hone.sandbox.client import close
from hone.sandbox.layers import DEFAULT_MINIMUM, LayerState, layers
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
