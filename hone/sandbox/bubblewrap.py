"""The command line of bubblewrap: the namespaces, mounts and files of a box."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

from hone.sandbox.interpreter import SYSTEM_PATHS
from hone.sandbox.plan import BOX_HOME, DEVICES, NOBODY, RunRequest, box_environment

INSTALL = "apt-get install -y bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora)"
_RECENT_OPTIONS = ("disable-userns",)  # options that only recent versions of bubblewrap have
_SYMLINKS = {  # target → link
    "/proc/self/fd": "/dev/fd",
    "/proc/self/fd/0": "/dev/stdin",
    "/proc/self/fd/1": "/dev/stdout",
    "/proc/self/fd/2": "/dev/stderr",
    BOX_HOME: "/tmp",  # temporary files count towards the disk limit of the box
}


@functools.lru_cache(maxsize=1)
def find_bubblewrap() -> tuple[str | None, tuple[str, ...]]:
    """Returns the path of bubblewrap (or None), and those of _RECENT_OPTIONS that this version has."""
    path = shutil.which("bwrap") or shutil.which("bwrap", path="/usr/bin:/bin:/usr/local/bin")
    if path is None:
        return None, ()
    try:
        help_text = subprocess.run(
            [path, "--help"], capture_output=True, text=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None, ()
    return path, tuple(name for name in _RECENT_OPTIONS if f"--{name} " in help_text)


def build_options(
    request: RunRequest, mount_points: dict[str, str], file_fds: list[int]
) -> list[str]:
    """Returns the options for one run; `mount_points` are those of `BindMounts.bind`."""
    plan, read_paths = request.plan, request.plan.interpreter.read_paths
    options = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    options += ["--cap-drop", "ALL", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    options += ["--hostname", "box", "--clearenv"]
    for name, value in box_environment(BOX_HOME).items():
        options += ["--setenv", name, value]
    options += _system_mount_options()
    for path in read_paths:
        options += ["--ro-bind", mount_points.get(path, path), path]
    for path in plan.interpreter.masked_paths:
        options += ["--tmpfs", path, "--remount-ro", path]
    options += ["--proc", "/proc"] if plan.mount_proc else []
    options += ["--dir", "/dev"]
    for path in DEVICES:
        options += ["--dev-bind", path, path]
    for target, link in _SYMLINKS.items():
        if not any(path.startswith(link + "/") for path in read_paths):
            options += ["--symlink", target, link]
    options += ["--perms", "0700", "--size", str(request.job.disk_mb << 20), "--tmpfs", BOX_HOME]
    options += ["--symlink", BOX_HOME, "/dev/shm", "--remount-ro", "/", "--chdir", BOX_HOME]
    # Files come last: in a spare, bubblewrap makes all mounts and then waits for the program.
    for name, descriptor in zip(request.file_names, file_fds, strict=True):
        options += ["--perms", "0600", "--file", str(descriptor), f"{BOX_HOME}/{name}"]
    if "disable-userns" in plan.bwrap_options:
        options.append("--disable-userns")
    return options


def build_command(request: RunRequest, options_fd: int) -> list[str]:
    """Returns the command line; bubblewrap reads its options from `options_fd`."""
    assert request.plan.bwrap_path is not None
    program = [request.plan.interpreter.executable, f"{BOX_HOME}/main.py", *request.job.argv]
    return [request.plan.bwrap_path, "--args", str(options_fd), "--", *program]


@functools.lru_cache(maxsize=1)
def _system_mount_options() -> list[str]:
    options = []
    for path in SYSTEM_PATHS:
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    return options
