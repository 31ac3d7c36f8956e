"""The plan of how boxes are built on this machine, and the request for one run."""

from __future__ import annotations

from dataclasses import dataclass

from hone.sandbox.cgroups import ParentCgroups
from hone.sandbox.interpreter import Interpreter
from hone.sandbox.result import RANGES, Job
from hone.types import Fields

NOBODY = 65534
BOX = "/box"
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


@dataclass(frozen=True)
class Plan:
    """The settings that all runs share."""

    bwrap: str | None
    """Path of bubblewrap; None builds the box from Landlock and seccomp alone."""
    bwrap_options: tuple[str, ...]
    """Newer options that this bubblewrap supports: 'disable-userns'."""
    proc: bool
    """Whether a fresh /proc can be mounted (some containers forbid it)."""
    box_uid: int | None
    """The user id of untrusted code; None if this process is already unprivileged."""
    seccomp: bool
    interpreter: Interpreter
    bind_interpreter: bool
    """Whether the warden bind-mounts the interpreter because box_uid cannot reach it."""
    cgroup: ParentCgroups | None


@dataclass(frozen=True)
class RunRequest:
    """The warden's message for one run; the job's texts are sent as descriptors."""

    plan: Plan
    job: Job
    channel: bool
    """Whether standard input is a socket whose other end the caller receives."""

    @classmethod
    def from_job(cls, job: Job, plan: Plan, *, channel: bool = False) -> RunRequest:
        # The warden cannot import NumPy, whose floats and strings a job may contain.
        exact: Fields = {name: type(most)(getattr(job, name)) for name, (_, most) in RANGES.items()}
        exact |= {"cpu_s": None if job.cpu_s is None else float(job.cpu_s), "code": "", "stdin": ""}
        exact |= {
            "files": dict.fromkeys(map(str, job.files), ""),
            "argv": tuple(map(str, job.argv)),
        }
        return cls(plan, Job(**exact), channel)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files whose descriptors are sent, in this order."""
        return ("main.py", *self.job.files)


def box_environment(home: str) -> dict[str, str]:
    """Returns the environment of the program; the fixed hash seed makes runs reproducible."""
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
