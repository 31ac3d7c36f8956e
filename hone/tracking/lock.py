"""A lock that lets one process at a time use a folder, on local and shared file systems.

The lock file names the holder. A hard link creates the file, which is atomic also on NFS, where `flock` may
not work. A holder is alive while its process runs or, on another machine, while it touches the lock file.
filelock is not used: NFS `nolock` and Lustre `localflock` keep its locks on one machine, so that two
machines would write one run (DESIGN.md §6, State), and a run does not see that its lock file was deleted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import sys
import threading
import time
import uuid
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from hone.errors import UserError
from hone.tracking.atomic import make_folder

log = logging.getLogger(__name__)

LOCK_NAME = ".lock"
HEARTBEAT_S = 5.0
DEAD_AFTER_S = 60.0
"""A holder on another machine counts as dead if it has not touched the lock file for this long."""
_UNKNOWN_START_TIME = "unknown"
"""Stands for the start time of a process whose start time this process cannot read."""
_DRAFT_ATTEMPTS = 5
_HARD_LINKS_UNSUPPORTED = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class FolderLocked(UserError, RuntimeError):
    """Raised when another process holds the folder's lock."""

    skips_error_log = True
    """No error log is written to the folder, because another process owns it."""


class LockLost(FolderLocked):
    """Raised when the lock file was deleted, or another machine considered this process dead."""


@dataclass(frozen=True)
class Holder:
    """The process that a lock file names."""

    token: str
    host: str = ""
    boot: str = ""
    """The id of the machine's current boot."""
    process_space: str = ""
    """The PID namespace, because containers reuse PIDs."""
    pid: int = 0
    started: str = ""
    """The kernel's start time of the process, because PIDs are reused."""
    command: str = ""
    since: str = ""

    @staticmethod
    def of_this_process() -> Holder:
        words = [Path(sys.argv[0]).name, *sys.argv[1:2]] if sys.argv else ["python"]
        command = " ".join(word for word in words if "=" not in word)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        pid, start = os.getpid(), _start_time(os.getpid()) or ""
        return Holder(uuid.uuid4().hex, *_machine_identity(), pid, start, command, since)

    @property
    def is_on_this_machine(self) -> bool:
        return self.pid > 0 and (self.host, self.boot, self.process_space) == _machine_identity()

    @property
    def is_running(self) -> bool:
        """Whether the process exists; valid only for a holder on this machine."""
        return _start_time(self.pid) in (self.started, _UNKNOWN_START_TIME)

    def __str__(self) -> str:
        if not self.pid:
            return "an unknown process (the lock file is unreadable)"
        return f"{self.command} (process {self.pid} on {self.host}, since {self.since})"


class FolderLock:
    """A lock between processes; the threads of one process share the lock and may nest it."""

    def __init__(self, file: Path, locked_path: Path) -> None:
        self.file, self.locked_path = file, locked_path
        self.holder: Holder | None = None
        self.loss: str | None = None
        """Why this process no longer holds the lock that it acquired."""
        self._depth = 0  # number of `with` blocks inside this process
        self._created_folders: list[Path] = []
        self._released = threading.Event()

    def __enter__(self) -> FolderLock:
        with _threads_lock:
            lock = _locks.setdefault(self.file, self)
            if lock._depth == 0:
                try:
                    lock._acquire()
                except BaseException:
                    _locks.pop(self.file, None)
                    lock._remove_created_folders()
                    raise
            lock._depth += 1
            return lock

    def __exit__(self, *exc: object) -> None:
        with _threads_lock:
            lock = _locks.get(self.file)
            if lock is None:  # this forked child exits a context that its parent entered
                return
            lock._depth -= 1
            if lock._depth == 0:
                del _locks[self.file]
                lock._release()

    def _release(self) -> None:
        self._released.set()
        if self.holder is None or self.holder.pid != os.getpid():  # a forked child's copy
            return
        with contextlib.suppress(OSError):
            if _read(self.file)[0] == self.holder:
                self.file.unlink()
        self._remove_created_folders()

    def _acquire(self) -> None:
        self.holder = Holder.of_this_process()
        # The draft has the complete content before a hard link gives it the name of the lock file.
        draft = self.file.with_name(f"{self.file.name}-{self.holder.token}")
        try:
            for attempt in range(_DRAFT_ATTEMPTS):
                self._created_folders = make_folder(self.file.parent) or self._created_folders
                try:
                    draft.write_text(json.dumps(asdict(self.holder)), encoding="utf-8")
                    break
                except FileNotFoundError:  # another process removed the folder that it had created
                    if attempt == _DRAFT_ATTEMPTS - 1:
                        raise
            self._claim(draft, self.file)
        finally:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        for path in self.file.parent.glob(f"{self.file.name}-*"):  # drafts of killed processes
            other, _ = _read(path)
            if other is not None and other.is_on_this_machine and not other.is_running:
                path.unlink(missing_ok=True)
        threading.Thread(target=self._heartbeat, name="folder-lock", daemon=True).start()

    def _claim(self, draft: Path, target: Path) -> None:
        """Links `target` to the draft, and replaces the lock of a dead holder; raises FolderLocked if the
        holder is alive."""
        while not _link(draft, target):
            other, _ = _read(target)
            if other is None:
                continue
            if _is_alive(other, target, draft):
                raise FolderLocked(
                    f"{self.locked_path} is in use by {other}; nothing was changed. Wait until it "
                    "ends, stop it, or name another folder"
                )
            # Several processes may see that the holder is dead. Only the one that creates the file
            # `LOCK-TOKEN.next`, with the holder's token, replaces the lock; it may itself die and leave
            # the file, so the file is claimed as the lock is.
            next_file = self.file.with_name(f"{self.file.name}-{other.token}.next")
            self._claim(draft, next_file)
            current, _ = _read(target)
            if current is not None and current.token == other.token:
                log.warning("%s: the lock of %s is stale and was removed", self.locked_path, other)
                os.rename(next_file, target)
                return
            next_file.unlink(missing_ok=True)  # another process was faster

    def _heartbeat(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            try:
                current, _ = _read(self.file)
                if current != self.holder:
                    self.loss = self._loss_message(current)
                    log.error("%s", self.loss)
                    return
                os.utime(self.file)
            except OSError as error:  # the file server may be unreachable: try again
                log.warning("%s cannot be touched: %s", self.file, error)

    def _loss_message(self, current: Holder | None) -> str:
        reason = f"the lock file {self.file} was deleted"
        if current is not None:
            # On this machine, no process takes the lock of a process that exists.
            if not current.is_on_this_machine:
                reason = (
                    f"this process did not run for {DEAD_AFTER_S:.0f} s and was considered dead"
                )
            reason = f"{current} has taken over the lock, because {reason}"
        return f"{self.locked_path}: {reason}; this process writes nothing more to the folder"

    def _remove_created_folders(self) -> None:
        """Removes the folders that were created for the lock and are still empty."""
        for folder in self._created_folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


_locks: dict[Path, FolderLock] = {}
_threads_lock = threading.RLock()
"""Held by the thread that enters or exits a FolderLock."""


def _forget_locks() -> None:
    """Forgets the locks of the parent process in a forked child."""
    global _threads_lock
    _locks.clear()
    _threads_lock = threading.RLock()  # a thread of the parent may hold the inherited one


os.register_at_fork(after_in_child=_forget_locks)


def lock_folder(folder: str | os.PathLike[str]) -> FolderLock:
    """Returns the lock of a folder; the lock file is inside it."""
    return FolderLock(Path(folder).expanduser().resolve() / LOCK_NAME, Path(folder))


def lock_target(target: str | os.PathLike[str]) -> FolderLock:
    """Returns the lock of an output file or folder.

    The lock file lies beside `target`, because the finished output replaces `target` by a rename.
    """
    path = Path(target).expanduser().resolve()
    return FolderLock(path.with_name(f".{path.name}{LOCK_NAME}"), Path(target))


def live_holder(folder: str | os.PathLike[str]) -> Holder | None:
    """Returns the process that holds the folder's lock; None without a lock, or if its holder is dead.

    Does not wait: the clock of another machine must agree with this one's to DEAD_AFTER_S.
    """
    holder, mtime_ns = _read(Path(folder) / LOCK_NAME)
    if holder is None or not holder.pid:
        return None
    is_alive = time.time() - mtime_ns / 1e9 < DEAD_AFTER_S
    if holder.is_on_this_machine:
        is_alive = holder.is_running
    return holder if is_alive else None


def raise_if_lock_lost(folder: str | os.PathLike[str]) -> None:
    """Raises LockLost if this process held the folder's lock and lost it."""
    lock = _locks.get(Path(folder).expanduser().resolve() / LOCK_NAME)
    if lock is not None and lock.loss is not None:
        raise LockLost(lock.loss)


def _link(draft: Path, target: Path) -> bool:
    """Links `target` to the draft unless `target` exists; only one of many callers gets True."""
    try:
        try:
            os.link(draft, target)
        except OSError as error:
            if error.errno not in _HARD_LINKS_UNSUPPORTED:
                raise
            with target.open("xb") as file:
                file.write(draft.read_bytes())
    except FileExistsError:
        return draft.stat().st_nlink > 1  # NFS: the link was created but the reply was lost
    return True


def _read(path: Path) -> tuple[Holder | None, int]:
    """Returns the holder and the file's mtime in nanoseconds; (None, 0) without a file."""
    try:
        with path.open("rb") as file:  # opening revalidates the attributes that NFS caches
            content, mtime_ns = file.read(1 << 16), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None, 0
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        holder = Holder(**json.loads(content))
        if holder.token.isalnum() and isinstance(holder.pid, int):
            return holder, mtime_ns
    # A partly written or invalid file is identified by a checksum of its content.
    return Holder(token=f"unreadable{zlib.crc32(content):x}"), mtime_ns


def _is_alive(holder: Holder, path: Path, draft: Path) -> bool:
    """Whether the holder's process runs or, on another machine, touches the lock file `path`.

    The file server sets the draft's time when the draft is touched, so the clocks of machines may differ.
    """
    if holder.is_on_this_machine:
        return holder.is_running
    current, mtime_ns = _read(path)
    start = time.monotonic()
    has_warned = False
    while current == holder:
        os.utime(draft)
        age_s = (draft.stat().st_mtime_ns - mtime_ns) / 1e9  # by the file server's clock
        if age_s > DEAD_AFTER_S or time.monotonic() - start > DEAD_AFTER_S:
            return False
        if not has_warned:
            message = (
                "%s is held by %s, last seen %.0f s ago; waiting up to %.0f s for a sign of life"
            )
            log.warning(message, path.parent, holder, max(age_s, 0.0), DEAD_AFTER_S)
        has_warned = True
        time.sleep(HEARTBEAT_S / 5)
        previous_mtime_ns = mtime_ns
        current, mtime_ns = _read(path)
        if current == holder and mtime_ns != previous_mtime_ns:
            return True
    return False  # released, or taken by another process: the caller reads the file again


def _machine_identity() -> tuple[str, str, str]:
    """Returns the host name, boot ID and PID namespace of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = f"{uuid.getnode():x}"
    try:
        return platform.node(), boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return platform.node(), boot, ""


def _start_time(pid: int) -> str | None:
    """Returns the start time of a local process in kernel ticks; None if the process does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except OSError:  # no such process, no /proc, or a hidden process of another user
        with contextlib.suppress(PermissionError):
            try:
                os.kill(pid, 0)
            except (ProcessLookupError, OverflowError):
                return None
        return _UNKNOWN_START_TIME
