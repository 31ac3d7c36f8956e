"""The mounts and command-line options of a box that bubblewrap builds.

A box has new namespaces, no capabilities, uid 65534, an empty working directory in memory, and read-only
mounts of /usr and the interpreter. The limits are set by spawn.py and the warden.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

from hone.sandbox.interpreter import SYSTEM_PATHS
from hone.sandbox.plan import BOX, DEVICES, NOBODY, Order, box_environment

INSTALL = "apt-get install -y bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora)"
_LINKS = {
    "/proc/self/fd": "/dev/fd",
    "/proc/self/fd/0": "/dev/stdin",
    "/proc/self/fd/1": "/dev/stdout",
    "/proc/self/fd/2": "/dev/stderr",
    BOX: "/tmp",  # temporary files count against the box's disk
}


@functools.lru_cache(maxsize=1)
def find() -> tuple[str | None, tuple[str, ...]]:
    """Returns bubblewrap's path and the newer options that this version supports."""
    path = shutil.which("bwrap") or shutil.which("bwrap", path="/usr/bin:/bin:/usr/local/bin")
    if path is None:
        return None, ()
    try:
        text = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None, ()
    return path, tuple(n for n in ("disable-userns",) if f"--{n} " in text)


def options(order: Order, staged: dict[str, str], files: list[int]) -> list[str]:
    """Returns the options of one run. staged: path → where this process can reach it."""
    plan, reads = order.plan, order.plan.interpreter.reads
    words = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    words += ["--cap-drop", "ALL", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    words += ["--hostname", "box", "--clearenv"]
    for name, value in box_environment(BOX).items():
        words += ["--setenv", name, value]
    words += _system_mounts()
    for path in reads:
        words += ["--ro-bind", staged.get(path, path), path]
    for path in plan.interpreter.masks:
        words += ["--tmpfs", path, "--remount-ro", path]
    words += ["--proc", "/proc"] if plan.proc else []
    words += ["--dir", "/dev"]
    for path in DEVICES:
        words += ["--dev-bind", path, path]
    for target, path in _LINKS.items():
        if not any(read.startswith(path + "/") for read in reads):
            words += ["--symlink", target, path]
    words += ["--perms", "0700", "--size", str(order.job.disk_mb << 20), "--tmpfs", BOX]
    words += ["--symlink", BOX, "/dev/shm", "--remount-ro", "/", "--chdir", BOX]
    # Files come last: a spare blocks here until its program arrives, after all mounts are made.
    for name, descriptor in zip(order.files, files, strict=True):
        words += ["--perms", "0600", "--file", str(descriptor), f"{BOX}/{name}"]
    return words + (["--disable-userns"] if "disable-userns" in plan.bwrap_options else [])


def command(order: Order, options_fd: int) -> list[str]:
    """Returns the command line; bubblewrap reads its options from a descriptor."""
    assert order.plan.bwrap is not None
    program = [order.plan.interpreter.executable, f"{BOX}/main.py", *order.job.argv]
    return [order.plan.bwrap, "--args", str(options_fd), "--", *program]


@functools.lru_cache(maxsize=1)
def _system_mounts() -> list[str]:
    words = []
    for path in SYSTEM_PATHS:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    return words
