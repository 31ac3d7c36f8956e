"""The cgroup of a run, which limits the total memory and the number of processes.

The cgroup of a run is a child of the cgroup of this process, whose limits also apply to the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hone.sandbox.processes import as_root

_PREFIX = "hone-"


@dataclass(frozen=True)
class ParentCgroups:
    """The directory in which a new cgroup is created, for each controller ("memory", "pids")."""

    version: int
    directories: Mapping[str, str]

    @property
    def unique_directories(self) -> list[str]:
        return sorted(set(self.directories.values()))


def find_parents(proc: Path = Path("/proc/self")) -> tuple[ParentCgroups | None, str]:
    """Returns the parents of new cgroups and their controllers as text, or None and the reason."""
    try:
        memberships = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError as error:
        return None, f"cgroups cannot be read: {error}"
    reasons = []
    for version, find in ((1, _find_v1), (2, _find_v2)):
        try:
            parents = find(memberships, mounts)
            if parents.directories:
                Cgroup.create(parents, f"{_PREFIX}{os.getpid()}-try", 64 << 20, 8).remove()
                return parents, f"v{version}: " + ", ".join(sorted(parents.directories))
        except OSError as error:
            path = f" ({error.filename})" if error.filename else ""
            reasons.append(f"v{version} cgroups cannot be created: {error.strerror}{path}")
    return None, "; ".join(reasons) or "no memory or pids controller is mounted"


def _find_v1(memberships: list[str], mounts: list[str]) -> ParentCgroups:
    own_paths = {}
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        own_paths.update(dict.fromkeys(controllers.split(","), path))
    directories = {}
    for mount_point, filesystem, options in map(_parse_mount, mounts):
        if filesystem == "cgroup":
            for controller in {"memory", "pids"}.intersection(options):
                own_path = own_paths.get(controller, "/")
                directories[controller] = _own_directory(mount_point, own_path)
    return ParentCgroups(1, directories)


def _find_v2(memberships: list[str], mounts: list[str]) -> ParentCgroups:
    """Enables the memory and pids controllers for children of our own cgroup, and returns our own cgroup.

    Raises OSError without permission, or if our own cgroup has processes, which version 2 does not allow.
    """
    own_path = next((line.split(":", 2)[2] for line in memberships if line.startswith("0::")), "/")
    for mount_point, filesystem, _ in map(_parse_mount, mounts):
        if filesystem == "cgroup2":
            directory = _own_directory(mount_point, own_path)
            control = Path(directory, "cgroup.subtree_control")
            available_names = Path(directory, "cgroup.controllers").read_text().split()
            names = [name for name in ("memory", "pids") if name in available_names]
            enabled_names = control.read_text().split()
            missing = [f"+{name}" for name in names if name not in enabled_names]
            if missing:
                control.write_text(" ".join(missing))
            return ParentCgroups(2, dict.fromkeys(names, directory))
    return ParentCgroups(2, {})


def _parse_mount(line: str) -> tuple[str, str, list[str]]:
    """Returns the mount point, filesystem type and options in a line of /proc/self/mountinfo."""
    mount_fields, _, filesystem_fields = line.partition(" - ")
    filesystem, _, options = filesystem_fields.split(" ", 2)
    return mount_fields.split(" ")[4], filesystem, options.split(",")


def _own_directory(mount_point: str, own_path: str) -> str:
    """Returns the directory of our own cgroup; in a container, this may be the mount point."""
    directory = os.path.join(mount_point, own_path.lstrip("/"))
    return directory if os.path.isdir(directory) else mount_point


class Cgroup:
    """The cgroup of one run; in version 1, each controller can have a directory of its own."""

    def __init__(self, version: int, directories: Mapping[str, Path]) -> None:
        self.version = version
        self.directories = dict(directories)
        self._unique_directories = sorted(set(directories.values()))
        self._limits: tuple[int, int] | None = None
        self._members_start_inside = False

    @classmethod
    def create(
        cls, parents: ParentCgroups, name: str, memory_bytes: int, max_processes: int
    ) -> Cgroup:
        directories = {
            controller: Path(parent) / name for controller, parent in parents.directories.items()
        }
        cgroup = cls(parents.version, directories)
        try:
            for directory in cgroup._unique_directories:
                directory.mkdir()
            cgroup.set_limits(memory_bytes, max_processes)
        except OSError:
            cgroup.remove()
            raise
        return cgroup

    def set_limits(self, memory_bytes: int, max_processes: int) -> None:
        if self._limits == (memory_bytes, max_processes):
            return
        if "memory" in self.directories:
            self._set_memory_limit(str(memory_bytes))
        if "pids" in self.directories:
            (self.directories["pids"] / "pids.max").write_text(str(max_processes))
        self._limits = (memory_bytes, max_processes)

    def _set_memory_limit(self, limit_bytes: str) -> None:
        if self.version == 2:
            required_file = "memory.max"
            files = [
                (required_file, limit_bytes),
                ("memory.swap.max", "0"),
                ("memory.oom.group", "1"),
            ]
        else:
            required_file = "memory.limit_in_bytes"
            with_swap = ("memory.memsw.limit_in_bytes", limit_bytes)
            # The limit with swap may not be below the limit without: write it before and after.
            files = [with_swap, (required_file, limit_bytes), with_swap, ("memory.swappiness", "0")]
        for name, value in files:
            try:
                (self.directories["memory"] / name).write_text(value)
            except OSError:
                if name == required_file:
                    raise  # other files do not exist without swap accounting

    @contextlib.contextmanager
    def thread_inside(self) -> Iterator[None]:
        """In version 1, moves this thread into the cgroup, so that processes of the block start as members.

        A thread moves itself at no cost. Moving another process blocks forks on the whole machine
        for an RCU grace period, which takes many milliseconds under load.
        """
        parent_fds = self._open_parent_tasks() if self.version == 1 else []
        if not parent_fds:
            yield
            return
        try:
            with as_root():
                for directory in self._unique_directories:
                    (directory / "tasks").write_text("0")
            yield
            self._members_start_inside = True
        finally:
            with as_root():
                for descriptor in parent_fds:
                    os.write(descriptor, b"0")
                    os.close(descriptor)

    def _open_parent_tasks(self) -> list[int]:
        """Opens the `tasks` files of the parent cgroups; returns [] if a file cannot be opened."""
        parent_fds: list[int] = []
        try:
            with as_root():
                for directory in self._unique_directories:
                    path = directory.parent / "tasks"
                    parent_fds.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            while parent_fds:
                os.close(parent_fds.pop())
        return parent_fds

    def add_process(self, pid: int) -> None:
        """Moves a process into the cgroup, unless the process started as a member."""
        if not self._members_start_inside:
            for directory in self._unique_directories:
                (directory / "cgroup.procs").write_text(str(pid))

    def out_of_memory(self) -> bool:
        """Returns whether the kernel killed a member for memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError, KeyError):
            for line in (self.directories["memory"] / name).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value) > 0
        return False

    def kill(self) -> None:
        """Sends SIGKILL to every member."""
        for directory in self._unique_directories:
            with contextlib.suppress(OSError):
                if self.version == 2:
                    (directory / "cgroup.kill").write_text("1")
                    continue
                for pid in (directory / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> bool:
        """Removes the directories; returns False while a member still exits."""
        is_removed = True
        for directory in self._unique_directories:
            try:
                directory.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                is_removed = False
        return is_removed


def cgroup_name(box_id: int) -> str:
    return f"{_PREFIX}{os.getpid()}-{box_id}"


def remove_stale_cgroups(parents: ParentCgroups) -> None:
    """Removes the empty cgroups of wardens that were killed."""
    for parent in parents.unique_directories:
        for directory in Path(parent).glob(f"{_PREFIX}[0-9]*-*"):
            creator_pid = directory.name[len(_PREFIX) :].split("-")[0]
            if not os.path.exists(f"/proc/{creator_pid}"):
                with contextlib.suppress(OSError):
                    directory.rmdir()


def private_memory_bytes(root_pid: int) -> int:
    """Returns the private memory of a process and its descendants.

    This replaces a memory cgroup; between two calls, the memory can exceed the limit.
    """
    pages, queue = 0, [root_pid]
    while queue:
        pid = queue.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/statm") as statm:
                _, resident, shared, *_ = map(int, statm.read().split())
            pages += resident - shared
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as children:
                    queue.extend(map(int, children.read().split()))
    return pages * os.sysconf("SC_PAGE_SIZE")
