"""One cgroup a run: the sum of its memory and the number of its processes, and who is still in it.

Groups are made below the group this process is in, so a run never escapes limits set on us.
Leaves out CPU shares: the CPU limit is an rlimit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hone.sandbox.rights import raised

log = logging.getLogger(__name__)

_PREFIX = "hone-"
_MIB = 1 << 20


@dataclass(frozen=True)
class Parents:
    """Where groups can be made: controller ("memory", "pids") → directory; one for both in v2."""

    version: int
    directories: Mapping[str, str]

    @property
    def unique(self) -> list[str]:
        return sorted(set(self.directories.values()))


def find_parents(proc: Path = Path("/proc/self")) -> tuple[Parents | None, str]:
    """The place to make groups in, or None; and a sentence that says where, or why not."""
    try:
        memberships = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError as error:
        return None, f"no cgroups to be seen: {error}"
    reasons = []
    for candidate in (_find_v1(memberships, mounts), _find_v2(memberships, mounts)):
        if not candidate.directories:
            continue
        reason = _try(candidate)
        if reason is None:
            return candidate, f"v{candidate.version}: " + ", ".join(sorted(candidate.directories))
        reasons.append(reason)
    return None, "; ".join(reasons) or "no memory or pids controller is mounted"


def _find_v1(memberships: list[str], mounts: list[str]) -> Parents:
    own = {}
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    directories = {}
    for mount_point, kind, options in map(_parse_mount, mounts):
        for controller in {"memory", "pids"} & set(options) if kind == "cgroup" else ():
            directories[controller] = _inside(mount_point, own.get(controller, "/"))
    return Parents(1, directories)


def _find_v2(memberships: list[str], mounts: list[str]) -> Parents:
    own = next((line.split(":", 2)[2] for line in memberships if line.startswith("0::")), "/")
    for mount_point, kind, _ in map(_parse_mount, mounts):
        if kind == "cgroup2":
            directory = _inside(mount_point, own)
            enabled = _enable(Path(directory))
            return Parents(2, dict.fromkeys(enabled, directory))
    return Parents(2, {})


def _parse_mount(line: str) -> tuple[str, str, list[str]]:
    before, _, after = line.partition(" - ")
    kind, _, options = after.split(" ", 2)
    return before.split(" ")[4], kind, options.split(",")


def _inside(mount_point: str, own: str) -> str:
    """A container sees its own group as the mount's root, whatever the membership file says."""
    directory = os.path.join(mount_point, own.lstrip("/"))
    return directory if os.path.isdir(directory) else mount_point


def _enable(directory: Path) -> list[str]:
    """Hand the controllers to child groups; those that could be."""
    try:
        offered = (directory / "cgroup.controllers").read_text().split()
        wanted: list[str] = [name for name in ("memory", "pids") if name in offered]
        given = (directory / "cgroup.subtree_control").read_text().split()
        if missing := [name for name in wanted if name not in given]:
            text = " ".join(f"+{name}" for name in missing)
            (directory / "cgroup.subtree_control").write_text(text)
        return wanted
    except OSError:  # not ours to change, or processes live in this very group
        return []


def _try(parents: Parents) -> str | None:
    name = f"{_PREFIX}{os.getpid()}-try"
    try:
        group = Group.create(parents, name, memory_bytes=64 * _MIB, processes=8)
    except OSError as error:
        return f"v{parents.version} groups cannot be made here: {error.strerror}"
    group.remove()
    return None


class Group:
    """One run's groups, one directory a controller hierarchy."""

    def __init__(self, version: int, directories: Mapping[str, Path]) -> None:
        self.version = version
        self.directories = dict(directories)
        self._limits: tuple[int, int] | None = None
        self._members_start_inside = False

    @classmethod
    def create(cls, parents: Parents, name: str, *, memory_bytes: int, processes: int) -> Group:
        directories = {kind: Path(base) / name for kind, base in parents.directories.items()}
        group = cls(parents.version, directories)
        try:
            for directory in group._unique:
                directory.mkdir()
            group.limit(memory_bytes=memory_bytes, processes=processes)
        except OSError:
            group.remove()
            raise
        return group

    def limit(self, *, memory_bytes: int, processes: int) -> None:
        """Set both limits, or change them."""
        if self._limits == (memory_bytes, processes):
            return
        if "memory" in self.directories:
            self._limit_memory(str(memory_bytes))
        if "pids" in self.directories:
            (self.directories["pids"] / "pids.max").write_text(str(processes))
        self._limits = (memory_bytes, processes)

    def _limit_memory(self, size: str) -> None:
        directory = self.directories["memory"]
        if self.version == 2:
            limit = ("memory.max", size)
            before, after = {}, {"memory.swap.max": "0", "memory.oom.group": "1"}
        else:
            limit = ("memory.limit_in_bytes", size)
            # Never below the other limit: raised before it, lowered after it.
            before = {"memory.memsw.limit_in_bytes": size}
            after = {**before, "memory.swappiness": "0"}
        for name, value in [*before.items(), limit, *after.items()]:
            try:
                (directory / name).write_text(value)
            except OSError:
                if name == limit[0]:
                    raise  # the others are absent in kernels without swap accounting

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """What this thread starts meanwhile is a member from birth (version 1).

        Moving oneself costs nothing; moving another process stops forks on the whole machine for
        an RCU grace period, many milliseconds on a busy one.
        """
        homes = self._ways_home() if self.version == 1 else []
        if not homes:
            yield
            return
        try:
            with raised():
                for directory in self._unique:
                    (directory / "tasks").write_text("0")
            yield
            self._members_start_inside = True
        finally:
            with raised():
                for home in homes:
                    os.write(home, b"0")
                    os.close(home)

    def _ways_home(self) -> list[int]:
        """The parents' lists of tasks, open for writing before we leave them; none if one is not ours."""
        homes: list[int] = []
        try:
            with raised():
                for directory in self._unique:
                    homes.append(os.open(directory.parent / "tasks", os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            while homes:
                os.close(homes.pop())
        return homes

    def admit(self, pid: int) -> None:
        """Move a process into the group, if it was not born there; what it starts follows it."""
        if self._members_start_inside:
            return
        for directory in self._unique:
            (directory / "cgroup.procs").write_text(str(pid))

    def out_of_memory(self) -> bool:
        """Whether the kernel killed something in here for memory."""
        if "memory" not in self.directories:
            return False
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError):
            for line in (self.directories["memory"] / name).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value) > 0
        return False

    def kill(self) -> None:
        """SIGKILL to every member."""
        for directory in self._unique:
            with contextlib.suppress(OSError):
                if self.version == 2:
                    (directory / "cgroup.kill").write_text("1")
                    continue
                for pid in (directory / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> bool:
        """Remove the directories; False while a member is still on its way out."""
        gone = True
        for directory in self._unique:
            try:
                directory.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                gone = False
        return gone

    @property
    def _unique(self) -> list[Path]:
        return sorted(set(self.directories.values()))


def group_name(number: int) -> str:
    return f"{_PREFIX}{os.getpid()}-{number}"


def sweep(parents: Parents) -> None:
    """Remove empty groups whose maker was killed before it could."""
    for base in parents.unique:
        for directory in Path(base).glob(f"{_PREFIX}[0-9]*-*"):
            maker = directory.name[len(_PREFIX) :].split("-")[0]
            if not os.path.exists(f"/proc/{maker}"):
                with contextlib.suppress(OSError):
                    directory.rmdir()
