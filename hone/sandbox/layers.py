"""Probes which layers work on this machine, and checks them against the configured minimum.

It fails closed: if the minimum names a missing layer, the run does not start.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from hone.sandbox import bubblewrap, cgroups, interpreter, landlock, seccomp
from hone.sandbox.client import run_job
from hone.sandbox.plan import NOBODY, Plan
from hone.sandbox.result import Job, SandboxError, SandboxUnavailable

DEFAULT_MINIMUM = frozenset({"filesystem", "network", "processes"})
# Guarantee → layers; any one of them provides it.
GUARANTEES: dict[str, tuple[str, ...]] = {
    "filesystem": ("bubblewrap", "landlock"),
    "network": ("bubblewrap", "seccomp"),
    "processes": ("bubblewrap",),
    "syscalls": ("seccomp",),
    "total_memory": ("cgroup",),
}
LAYERS = ("bubblewrap", "rlimits", "seccomp", "landlock", "cgroup")

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
    """Whether a layer is active, with a sentence that explains it."""

    active: bool
    detail: str


@dataclass(frozen=True)
class _Machine:
    plan: Plan | None
    layers: dict[str, LayerState]


def layers() -> dict[str, LayerState]:
    """Returns the state of every layer on this machine; only the first call runs a probe."""
    return dict(_probe_machine(None).layers)


def plan_for(minimum: Collection[str], interpreter_path: str | None = None) -> Plan:
    """Returns a plan that meets the minimum; raises SandboxUnavailable if a layer is missing."""
    machine = _probe_machine(interpreter_path)
    unknown = sorted(set(minimum) - set(GUARANTEES) - set(LAYERS))
    if unknown:
        names = ", ".join([*GUARANTEES, *LAYERS])
        raise ValueError(f"sandbox: minimum names {unknown[0]!r}, which is unknown; known: {names}")
    for name in sorted(minimum):
        providers = GUARANTEES.get(name, (name,))
        if not any(machine.layers[layer].active for layer in providers):
            problem = f"the configured minimum asks for {name!r}, which no layer here provides"
            raise _unavailable(problem, machine, providers)
    if machine.plan is None:
        raise _unavailable("no box can be built here", machine, LAYERS)
    return machine.plan


def _unavailable(problem: str, machine: _Machine, names: Collection[str]) -> SandboxUnavailable:
    reasons = "; ".join(f"{name}: {machine.layers[name].detail}" for name in names)
    return SandboxUnavailable(f"sandbox: {problem} ({reasons}). Install: {bubblewrap.INSTALL}")


@functools.lru_cache(maxsize=8)
def _probe_machine(interpreter_path: str | None) -> _Machine:
    parents, cgroup_detail = cgroups.find_parents()
    box_uid = NOBODY if os.geteuid() == 0 else None
    errors: list[str] = []
    plan: Plan | None = None
    facts: dict[str, str | int] = {}
    for bwrap, proc, bind_interpreter in _variants(root=box_uid is not None):
        try:
            python = interpreter.choose(
                interpreter_path,
                uid=os.geteuid() if box_uid is None else box_uid,
                gid=os.getegid() if box_uid is None else box_uid,
                bind_interpreter=bind_interpreter,
            )
            plan = Plan(
                bwrap=bwrap,
                bwrap_options=bubblewrap.find()[1],
                proc=proc,
                box_uid=box_uid,
                seccomp=seccomp.supported(),
                interpreter=python,
                bind_interpreter=bind_interpreter and bool(python.read_paths),
                cgroup=parents,
            )
            result = run_job(Job(_PROBE, timeout_s=30.0), plan)
            if result.ok:
                facts = json.loads(result.stdout)
                break
            errors.append(f"the probe ended with {result.status.value}: {result.stderr}")
        except SandboxError as error:
            errors.append(str(error))
        plan = None
    states = _states(plan, facts, errors)
    states["cgroup"] = LayerState(plan is not None and plan.cgroup is not None, cgroup_detail)
    return _Machine(plan, states)


def _variants(root: bool) -> Iterator[tuple[str | None, bool, bool]]:
    """Yields (bubblewrap, fresh /proc, bind_interpreter), the strongest box first."""
    bwrap, _ = bubblewrap.find()
    if bwrap is not None:
        for proc in (True, False):
            if root:
                yield bwrap, proc, True
            yield bwrap, proc, False
    if landlock.abi_version() > 0 and seccomp.supported():
        yield None, False, False


def _states(
    plan: Plan | None, facts: dict[str, str | int], errors: list[str]
) -> dict[str, LayerState]:
    has_bwrap = plan is not None and plan.bwrap is not None
    has_landlock = plan is not None and plan.bwrap is None
    has_seccomp = plan is not None and plan.seccomp and facts.get("seccomp") in ("2", "")
    missing = errors[0] if errors else f"not found; install it: {bubblewrap.INSTALL}"
    namespaces = f"{bubblewrap.find()[0]}: own namespaces, uid {facts.get('uid')}"
    denied = f"{len(seccomp.DENIED['x86_64'])} system calls denied"
    abi = landlock.abi_version()
    detail = f"ABI {abi}" if has_landlock else f"ABI {abi}, not needed: bubblewrap hides the files"
    return {
        "bubblewrap": LayerState(has_bwrap, namespaces if has_bwrap else missing),
        "rlimits": LayerState(
            facts.get("address_space") == Job("").memory_mb << 20,
            "address space, CPU, file size, open files, processes",
        ),
        "seccomp": LayerState(has_seccomp, denied if has_seccomp else "no filter is active"),
        "landlock": LayerState(has_landlock, detail if abi else "this kernel has none"),
    }
