"""The mounts and command-line options of a box that bubblewrap builds.

A box has new namespaces, no capabilities, uid 65534, an empty working directory in memory, and
read-only mounts of /usr and the interpreter. spawn.py and the warden set the limits.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

from hone.sandbox.interpreter import SYSTEM_PATHS
from hone.sandbox.plan import BOX, DEVICES, NOBODY, RunRequest, box_environment

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


def options(request: RunRequest, mount_points: dict[str, str], files: list[int]) -> list[str]:
    """Returns bubblewrap's options for one run. mount_points: see BindMounts.bind."""
    plan, read_paths = request.plan, request.plan.interpreter.read_paths
    arguments = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    arguments += ["--cap-drop", "ALL", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    arguments += ["--hostname", "box", "--clearenv"]
    for name, value in box_environment(BOX).items():
        arguments += ["--setenv", name, value]
    arguments += _system_mounts()
    for path in read_paths:
        arguments += ["--ro-bind", mount_points.get(path, path), path]
    for path in plan.interpreter.masked_paths:
        arguments += ["--tmpfs", path, "--remount-ro", path]
    arguments += ["--proc", "/proc"] if plan.proc else []
    arguments += ["--dir", "/dev"]
    for path in DEVICES:
        arguments += ["--dev-bind", path, path]
    for target, path in _LINKS.items():
        if not any(read.startswith(path + "/") for read in read_paths):
            arguments += ["--symlink", target, path]
    arguments += ["--perms", "0700", "--size", str(request.job.disk_mb << 20), "--tmpfs", BOX]
    arguments += ["--symlink", BOX, "/dev/shm", "--remount-ro", "/", "--chdir", BOX]
    # Files come last: a spare makes all mounts, then blocks here until its program arrives.
    for name, descriptor in zip(request.files, files, strict=True):
        arguments += ["--perms", "0600", "--file", str(descriptor), f"{BOX}/{name}"]
    return arguments + (["--disable-userns"] if "disable-userns" in plan.bwrap_options else [])


def command(request: RunRequest, options_fd: int) -> list[str]:
    """Returns the command line; bubblewrap reads its options from a descriptor."""
    assert request.plan.bwrap is not None
    program = [request.plan.interpreter.executable, f"{BOX}/main.py", *request.job.argv]
    return [request.plan.bwrap, "--args", str(options_fd), "--", *program]


@functools.lru_cache(maxsize=1)
def _system_mounts() -> list[str]:
    arguments = []
    for path in SYSTEM_PATHS:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    return arguments
