"""How boxes are built on this machine, and the order for one run.

Decided once by layers.py, carried out by the warden. Holds no state and starts nothing.
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
    """One run as the warden gets it; the job's texts travel beside it as descriptors."""

    plan: Plan
    job: Job
    channel: bool
    """Standard input is one end of a socket; the caller is lent the other."""

    @classmethod
    def of(cls, job: Job, plan: Plan, *, channel: bool = False) -> Order:
        # Exact types: the warden cannot import NumPy, whose floats and texts a job may hold.
        exact: Row = {name: type(most)(getattr(job, name)) for name, (_, most) in RANGES.items()}
        exact |= {"cpu_s": None if job.cpu_s is None else float(job.cpu_s), "code": "", "stdin": ""}
        exact |= {
            "files": dict.fromkeys(map(str, job.files), ""),
            "argv": tuple(map(str, job.argv)),
        }
        return cls(plan, Job(**exact), channel)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files whose texts travel beside it, in their order."""
        return ("main.py", *self.job.files)


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
