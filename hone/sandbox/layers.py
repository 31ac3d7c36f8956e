"""Which walls stand on this machine, proven by running a probe in a box; and the minimum they meet.

Fails closed: a missing wall that the minimum names stops the run before it starts.
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
# What one may ask for → the layers any of which gives it.
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
    """Whether a layer holds, and a sentence about it."""

    active: bool
    detail: str


@dataclass(frozen=True)
class _Machine:
    plan: Plan | None
    layers: dict[str, LayerState]


def layers(interpreter_path: str | None = None) -> dict[str, LayerState]:
    """Every layer's state on this machine. The first call runs a probe; later ones remember."""
    return dict(_examine(interpreter_path).layers)


def plan_for(minimum: Collection[str], interpreter_path: str | None = None) -> Plan:
    """The plan that meets the minimum, or SandboxUnavailable naming what is missing."""
    machine = _examine(interpreter_path)
    unknown = sorted(set(minimum) - set(GUARANTEES) - set(LAYERS))
    if unknown:
        known = ", ".join([*GUARANTEES, *LAYERS])
        raise ValueError(f"sandbox: minimum names {unknown[0]!r}, which is unknown; known: {known}")
    for name in sorted(minimum):
        givers = GUARANTEES.get(name, (name,))
        if not any(machine.layers[layer].active for layer in givers):
            reasons = "; ".join(f"{layer}: {machine.layers[layer].detail}" for layer in givers)
            raise SandboxUnavailable(
                f"sandbox: the configured minimum asks for {name!r}, which nothing here gives"
                f" ({reasons}). Install it: {bubblewrap.INSTALL}"
            )
    if machine.plan is None:
        reasons = "; ".join(f"{name}: {state.detail}" for name, state in machine.layers.items())
        raise SandboxUnavailable(
            f"sandbox: no box can be built here ({reasons}). Install: {bubblewrap.INSTALL}"
        )
    return machine.plan


def forget() -> None:
    """Examine the machine anew at the next use (something was installed)."""
    _examine.cache_clear()
    bubblewrap.find.cache_clear()


@functools.lru_cache(maxsize=8)
def _examine(interpreter_path: str | None) -> _Machine:
    parents, cgroup_detail = cgroups.find_parents()
    path, options = bubblewrap.find()
    drop_to = NOBODY if os.geteuid() == 0 else None
    landlock_abi = landlock.abi()
    refusals: list[str] = []
    for bwrap, proc, staged in _variants(path, drop_to is not None, landlock_abi):
        try:
            chosen = interpreter.choose(
                interpreter_path,
                uid=os.geteuid() if drop_to is None else drop_to,
                gid=os.getegid() if drop_to is None else drop_to,
                staged=staged,
            )
            plan = Plan(
                bwrap=bwrap,
                bwrap_options=options,
                proc=proc,
                drop_to=drop_to,
                seccomp=seccomp.supported(),
                interpreter=chosen,
                staged=staged and bool(chosen.reads),
                cgroup=parents,
            )
            facts = _probe(plan)
        except SandboxError as error:
            refusals.append(str(error))
            continue
        return _Machine(plan, _states(plan, facts, refusals, cgroup_detail, landlock_abi))
    return _Machine(None, _states(None, {}, refusals, cgroup_detail, landlock_abi))


def _variants(
    bwrap: str | None, root: bool, landlock_abi: int
) -> Iterator[tuple[str | None, bool, bool]]:
    """(bubblewrap, fresh /proc, staged interpreter): the strongest box first."""
    if bwrap is not None:
        for proc in (True, False):
            if root:
                yield bwrap, proc, True
            yield bwrap, proc, False
    if landlock_abi > 0 and seccomp.supported():
        yield None, False, False


def _probe(plan: Plan) -> dict[str, str | int]:
    result = run_job(Job(_PROBE, timeout_s=30.0), plan)
    if not result.ok:
        raise SandboxError(f"sandbox: the probe ended with {result.status.value}: {result.stderr}")
    return dict(json.loads(result.stdout))


def _states(
    plan: Plan | None,
    facts: dict[str, str | int],
    refusals: list[str],
    cgroup_detail: str,
    landlock_abi: int,
) -> dict[str, LayerState]:
    path, _ = bubblewrap.find()
    inactive = refusals[0] if refusals else f"not found; install it: {bubblewrap.INSTALL}"
    boxed = plan is not None and plan.bwrap is not None
    limited = facts.get("address_space") == Job("").memory_mb << 20
    filtered = plan is not None and plan.seccomp and facts.get("seccomp") in ("2", "")
    bare = plan is not None and plan.bwrap is None
    return {
        "bubblewrap": LayerState(
            boxed, f"{path}: own namespaces, uid {facts.get('uid')}" if boxed else inactive
        ),
        "rlimits": LayerState(limited, "address space, CPU, file size, open files, processes"),
        "seccomp": LayerState(
            filtered,
            f"{len(seccomp.DENIED)} system calls denied" if filtered else "no filter in force",
        ),
        "landlock": LayerState(bare, _landlock_detail(landlock_abi, bare)),
        "cgroup": LayerState(plan is not None and plan.cgroup is not None, cgroup_detail),
    }


def _landlock_detail(version: int, used: bool) -> str:
    if version == 0:
        return "this kernel has none"
    return f"ABI {version}" if used else f"ABI {version}, not needed: bubblewrap hides the files"
