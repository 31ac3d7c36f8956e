"""The entry points of the package: run_python and run_many."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from hone.sandbox.client import run_job
from hone.sandbox.layers import DEFAULT_MINIMUM, plan_for
from hone.sandbox.result import Job, JobFields, SandboxResult

if TYPE_CHECKING:
    from typing_extensions import Unpack


def run_python(
    code: str,
    *,
    minimum: Collection[str] = DEFAULT_MINIMUM,
    interpreter: str | None = None,
    caller_socket: socket.socket | None = None,
    **job_fields: Unpack[JobFields],
) -> SandboxResult:
    """Runs untrusted Python and returns the result. Other keyword arguments are fields of Job.

    minimum: guarantees or layers (`layers.GUARANTEES`, `layers.LAYERS`) that must be active;
    otherwise SandboxUnavailable is raised and nothing runs.
    caller_socket: the run ends if this connection closes.
    """
    return run_job(Job(code, **job_fields), plan_for(minimum, interpreter), caller_socket)


def run_many(
    jobs: Iterable[Job],
    *,
    max_concurrent: int,
    minimum: Collection[str] = DEFAULT_MINIMUM,
    interpreter: str | None = None,
) -> list[SandboxResult]:
    """Runs at most max_concurrent jobs at a time; returns the results in the order of jobs."""
    if max_concurrent < 1:
        raise ValueError(f"sandbox: max_concurrent={max_concurrent} must be at least 1")
    plan = plan_for(minimum, interpreter)
    with ThreadPoolExecutor(max_concurrent, thread_name_prefix="sandbox") as pool:
        return list(pool.map(lambda job: run_job(job, plan), jobs))
