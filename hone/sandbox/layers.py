"""Runs programs in the strongest box that this machine can build; the first run tries which boxes work.

A run does not start if the `minimum` of the run has a guarantee that no isolation layer provides.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import threading
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hone.sandbox import bubblewrap, cgroups, interpreter, landlock, seccomp
from hone.sandbox.client import run_job
from hone.sandbox.plan import NOBODY, BoxPlan
from hone.sandbox.result import Job, JobFields, SandboxError, SandboxResult, SandboxUnavailable

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_MINIMUM = frozenset({"filesystem", "network", "processes"})
# The layers that provide a guarantee; one active layer is enough.
GUARANTEES: dict[str, tuple[str, ...]] = {
    "filesystem": ("bubblewrap", "landlock"),
    "network": ("bubblewrap", "seccomp"),
    "processes": ("bubblewrap",),
    "syscalls": ("seccomp",),
    "total_memory": ("cgroup",),
}
LAYERS = ("bubblewrap", "rlimits", "seccomp", "landlock", "cgroup")
_probe_lock = threading.Lock()

_PROBE = """
import json, os, resource
try:
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
except OSError:
    status = {}
print(json.dumps({
    "uid": os.getuid(),
    "seccomp": status.get("Seccomp", "").strip(),
    "address_space": resource.getrlimit(resource.RLIMIT_AS)[0],
}))
"""


@dataclass(frozen=True)
class LayerState:
    """Whether a layer is active, and the reason as text."""

    active: bool
    detail: str


@dataclass(frozen=True)
class _ProbeResult:
    plan: BoxPlan | None
    layers: dict[str, LayerState]


def layers() -> dict[str, LayerState]:
    """Returns the state of every layer on this machine; the first call runs a program to test the layers."""
    return dict(_probe(None).layers)


def box_plan_for(minimum: Collection[str], interpreter_path: str | None = None) -> BoxPlan:
    """Returns how this machine builds boxes; raises SandboxUnavailable if that does not meet the minimum."""
    probe = _probe(interpreter_path)
    unknown = sorted(set(minimum) - set(GUARANTEES) - set(LAYERS))
    if unknown:
        names = ", ".join([*GUARANTEES, *LAYERS])
        raise ValueError(f"sandbox: minimum names {unknown[0]!r}, which is unknown; known: {names}")
    for name in sorted(minimum):
        providers = GUARANTEES.get(name, (name,))
        if not any(probe.layers[layer].active for layer in providers):
            problem = f"the configured minimum asks for {name!r}, which no layer provides"
            raise _unavailable_error(problem, probe, providers)
    if probe.plan is None:
        raise _unavailable_error("no box can be built on this machine", probe, LAYERS)
    return probe.plan


def _unavailable_error(
    problem: str, probe: _ProbeResult, names: Collection[str]
) -> SandboxUnavailable:
    reasons = "; ".join(f"{name}: {probe.layers[name].detail}" for name in names)
    return SandboxUnavailable(f"sandbox: {problem} ({reasons}). Install: {bubblewrap.INSTALL}")


def _probe(interpreter_path: str | None) -> _ProbeResult:
    with _probe_lock:  # two concurrent probes would use the same cgroup
        return _probe_machine(interpreter_path)


@functools.lru_cache(maxsize=8)
def _probe_machine(interpreter_path: str | None) -> _ProbeResult:
    """Runs the probe in boxes, the strongest first, until the probe succeeds."""
    parents, cgroup_detail = cgroups.find_parents()
    box_uid = NOBODY if os.geteuid() == 0 else None
    errors: list[str] = []
    plan: BoxPlan | None = None
    probe_output: dict[str, str | int] = {}
    for bwrap_path, mount_proc, bind_interpreter in _box_variants(is_root=box_uid is not None):
        try:
            python = interpreter.choose(
                interpreter_path,
                uid=os.geteuid() if box_uid is None else box_uid,
                gid=os.getegid() if box_uid is None else box_uid,
                bind_interpreter=bind_interpreter,
            )
            plan = BoxPlan(
                bwrap_path=bwrap_path,
                bwrap_options=bubblewrap.find_bubblewrap()[1],
                mount_proc=mount_proc,
                box_uid=box_uid,
                use_seccomp=seccomp.is_supported(),
                interpreter=python,
                bind_interpreter=bind_interpreter and bool(python.read_paths),
                parent_cgroups=parents,
            )
            result = run_job(Job(_PROBE, timeout_s=30.0), plan)
            if result.ok:
                probe_output = json.loads(result.stdout)
                break
            errors.append(f"the probe ended with {result.status.value}: {result.stderr}")
        except SandboxError as error:
            errors.append(str(error))
        plan = None
    states = _layer_states(plan, probe_output, errors)
    states["cgroup"] = LayerState(
        plan is not None and plan.parent_cgroups is not None, cgroup_detail
    )
    return _ProbeResult(plan, states)


def _box_variants(is_root: bool) -> Iterator[tuple[str | None, bool, bool]]:
    """Yields (bwrap_path, mount_proc, bind_interpreter), the strongest box first."""
    bwrap_path, _ = bubblewrap.find_bubblewrap()
    if bwrap_path is not None:
        for mount_proc in (True, False):
            if is_root:
                yield bwrap_path, mount_proc, True
            yield bwrap_path, mount_proc, False
    if landlock.abi_version() > 0 and seccomp.is_supported():
        yield None, False, False


def _layer_states(
    plan: BoxPlan | None, probe_output: dict[str, str | int], errors: list[str]
) -> dict[str, LayerState]:
    has_bwrap = plan is not None and plan.bwrap_path is not None
    has_landlock = plan is not None and plan.bwrap_path is None
    seccomp_mode = probe_output.get("seccomp")
    has_seccomp = plan is not None and plan.use_seccomp and seccomp_mode in ("2", "")
    bwrap_problem = errors[0] if errors else f"not found; install it: {bubblewrap.INSTALL}"
    bwrap_detail = (
        f"{bubblewrap.find_bubblewrap()[0]}: own namespaces, uid {probe_output.get('uid')}"
    )
    seccomp_detail = f"{len(seccomp.DENIED_CALLS['x86_64'])} system calls denied"
    abi = landlock.abi_version()
    unused_note = "" if has_landlock else ", not needed: bubblewrap hides the files"
    landlock_detail = f"ABI {abi}{unused_note}" if abi else "this kernel does not support it"
    return {
        "bubblewrap": LayerState(has_bwrap, bwrap_detail if has_bwrap else bwrap_problem),
        "rlimits": LayerState(
            probe_output.get("address_space") == Job("").memory_mb << 20,
            "address space, CPU, file size, open files, processes",
        ),
        "seccomp": LayerState(
            has_seccomp, seccomp_detail if has_seccomp else "no filter is active"
        ),
        "landlock": LayerState(has_landlock, landlock_detail),
    }


def run_python(
    code: str,
    *,
    minimum: Collection[str] = DEFAULT_MINIMUM,
    interpreter: str | None = None,
    caller_socket: socket.socket | None = None,
    **job_fields: Unpack[JobFields],
) -> SandboxResult:
    """Runs untrusted Python and returns the result. Other keyword arguments are fields of Job.

    `minimum` are the required guarantees or layers (`GUARANTEES`, `LAYERS`); if one is missing,
    SandboxUnavailable is raised and nothing runs. The run ends if `caller_socket` closes.
    """
    return run_job(Job(code, **job_fields), box_plan_for(minimum, interpreter), caller_socket)


def run_many(
    jobs: Iterable[Job],
    *,
    max_concurrent: int,
    minimum: Collection[str] = DEFAULT_MINIMUM,
    interpreter: str | None = None,
) -> list[SandboxResult]:
    """Runs at most `max_concurrent` jobs at a time; returns the results in the order of the jobs."""
    if max_concurrent < 1:
        raise ValueError(f"sandbox: max_concurrent={max_concurrent} must be at least 1")
    plan = box_plan_for(minimum, interpreter)
    with ThreadPoolExecutor(max_concurrent, thread_name_prefix="sandbox") as pool:
        return list(pool.map(lambda job: run_job(job, plan), jobs))
