"""The plan for the boxes of this machine, and the request for one run."""

from __future__ import annotations

from dataclasses import dataclass

from hone.sandbox.cgroups import ParentCgroups
from hone.sandbox.interpreter import Interpreter
from hone.sandbox.result import RANGES, Job
from hone.types import Fields

NOBODY = 65534  # the user and group id of untrusted code
BOX_HOME = "/box"
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


@dataclass(frozen=True)
class BoxPlan:
    """The way in which this machine builds boxes; all runs have the same plan."""

    bwrap_path: str | None
    """The path of bubblewrap; None for boxes of Landlock and seccomp only."""
    bwrap_options: tuple[str, ...]
    """Options that only recent versions of bubblewrap have, if the installed version has them."""
    mount_proc: bool
    """Whether a box has its own /proc, which some containers forbid."""
    box_uid: int | None
    """The user id of the warden and the boxes; None if this process is not root: they use its id."""
    use_seccomp: bool
    interpreter: Interpreter
    bind_interpreter: bool
    """Whether the warden bind-mounts the interpreter, so that `box_uid` needs no access to its path."""
    parent_cgroups: ParentCgroups | None


@dataclass(frozen=True)
class RunRequest:
    """The message to the warden for one run; code, stdin and files follow as descriptors."""

    plan: BoxPlan
    job: Job
    has_channel: bool
    """Whether standard input is a socket whose other end the caller receives."""

    @classmethod
    def from_job(cls, job: Job, plan: BoxPlan, *, has_channel: bool = False) -> RunRequest:
        # The warden cannot unpickle values of NumPy, so they are converted to Python.
        limits: Fields = {
            name: type(highest)(getattr(job, name)) for name, (_, highest) in RANGES.items()
        }
        cpu_s = None if job.cpu_s is None else float(job.cpu_s)
        files, argv = dict.fromkeys(map(str, job.files), ""), tuple(map(str, job.argv))
        return cls(plan, Job("", cpu_s=cpu_s, files=files, argv=argv, **limits), has_channel)

    @property
    def file_names(self) -> tuple[str, ...]:
        """The names of the files in the box, in the order of their descriptors."""
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
