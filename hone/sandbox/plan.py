"""How boxes are built on this machine, and the order for one run.

layers.py makes the plan once; the warden carries it out. This file holds no state and starts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from hone.sandbox.cgroups import Parents
from hone.sandbox.interpreter import Interpreter
from hone.sandbox.result import RANGES, Job
from hone.types import Row

NOBODY = 65534
BOX = "/box"
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


@dataclass(frozen=True)
class Plan:
    """The settings that all runs share."""

    bwrap: str | None
    """Path of bubblewrap; None builds the box from Landlock and seccomp alone."""
    bwrap_options: tuple[str, ...]
    """Options that this bubblewrap supports beyond the oldest supported version: 'disable-userns'."""
    proc: bool
    """Whether a fresh /proc can be mounted (some containers forbid it)."""
    drop_to: int | None
    """The user that runs untrusted code; None when this process is already unprivileged."""
    seccomp: bool
    interpreter: Interpreter
    staged: bool
    """Whether drop_to cannot reach the interpreter, so that the warden must bind it elsewhere."""
    cgroup: Parents | None


@dataclass(frozen=True)
class Order:
    """One run as the warden receives it; the job's texts are sent as descriptors."""

    plan: Plan
    job: Job
    channel: bool
    """Whether standard input is a socket whose other end the caller receives."""

    @classmethod
    def of(cls, job: Job, plan: Plan, *, channel: bool = False) -> Order:
        # Exact types are needed: the warden cannot import NumPy, whose floats and strings a job may hold.
        exact: Row = {name: type(most)(getattr(job, name)) for name, (_, most) in RANGES.items()}
        exact |= {"cpu_s": None if job.cpu_s is None else float(job.cpu_s), "code": "", "stdin": ""}
        exact |= {
            "files": dict.fromkeys(map(str, job.files), ""),
            "argv": tuple(map(str, job.argv)),
        }
        return cls(plan, Job(**exact), channel)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that are sent as descriptors, in that order."""
        return ("main.py", *self.job.files)


def box_environment(home: str) -> dict[str, str]:
    """Returns the program's whole environment. The hash seed is fixed for reproducible runs."""
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
