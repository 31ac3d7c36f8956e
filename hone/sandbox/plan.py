"""How boxes are built on this machine: the choice of layers, small enough to travel as JSON.

Decided once by layers.py, carried out by the warden. Holds no state and starts nothing.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from hone.sandbox.cgroups import Parents
from hone.sandbox.interpreter import Interpreter
from hone.sandbox.result import Job

NOBODY = 65534
BOX = "/box"


@dataclass(frozen=True)
class Plan:
    """Everything that is the same for all runs."""

    bwrap: str | None
    """Path of bubblewrap; None builds the box from Landlock and seccomp alone."""
    bwrap_options: tuple[str, ...]
    """Options this bubblewrap has beyond the oldest supported: 'disable-userns'."""
    proc: bool
    """Whether a fresh /proc can be mounted (some containers forbid it)."""
    drop_to: int | None
    """User to become before anything untrusted runs; None when already unprivileged."""
    seccomp: bool
    interpreter: Interpreter
    staged: bool
    """The interpreter lies where drop_to cannot go: the warden binds it to where it can."""
    cgroup: Parents | None


@dataclass(frozen=True)
class Order:
    """One run as the warden gets it. Texts travel beside it as descriptors, in order of files."""

    plan: Plan
    files: tuple[str, ...]
    argv: tuple[str, ...]
    timeout_s: float
    cpu_s: int
    memory_mb: int
    output_bytes: int
    processes: int
    disk_mb: int
    open_files: int
    channel: bool = False
    """Standard input is one end of a socket; the caller is lent the other."""

    @classmethod
    def of(cls, job: Job, plan: Plan, *, channel: bool = False) -> Order:
        return cls(
            plan=plan,
            files=("main.py", *job.files),
            argv=tuple(job.argv),
            timeout_s=job.timeout_s,
            cpu_s=job.cpu_limit_s,
            memory_mb=job.memory_mb,
            output_bytes=job.output_bytes,
            processes=job.processes,
            disk_mb=job.disk_mb,
            open_files=job.open_files,
            channel=channel,
        )

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Order:
        raw = json.loads(text)
        plan = raw["plan"]
        interpreter, cgroup = plan["interpreter"], plan["cgroup"]
        plan["interpreter"] = Interpreter(
            interpreter["executable"], tuple(interpreter["reads"]), tuple(interpreter["masks"])
        )
        plan["cgroup"] = Parents(**cgroup) if cgroup else None
        plan["bwrap_options"] = tuple(plan["bwrap_options"])
        raw.update(plan=Plan(**plan), files=tuple(raw["files"]), argv=tuple(raw["argv"]))
        return cls(**raw)


def box_environment(home: str) -> dict[str, str]:
    """All that a program in the box sees of an environment. The hash seed is fixed: replays."""
    return {
        "HOME": home,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONNOUSERSITE": "1",
        "TMPDIR": home,
    }
