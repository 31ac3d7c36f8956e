"""Chooses the Python interpreter of the box, and the paths that it needs.

Only the standard library is visible: site-packages is hidden, unless the interpreter belongs to a
virtual environment. bubblewrap.py and landlock.py make the paths visible.
"""

from __future__ import annotations

import functools
import json
import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hone.sandbox.result import SandboxUnavailable

SYSTEM_PYTHON = "/usr/bin/python3"
SYSTEM_PATHS = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin")
_SYSTEM_PREFIXES = tuple(f"{path}/" for path in SYSTEM_PATHS)
_PRINT_FACTS = (
    "import json, sys; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix,"
    " getattr(sys, '_base_executable', sys.executable), '%d.%d' % sys.version_info[:2]]))"
)


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter and the paths that it needs to start."""

    executable: str
    read_paths: tuple[str, ...]
    """Paths outside the system directories that it needs; they are read-only."""
    masked_paths: tuple[str, ...]
    """Directories below `read_paths` that are hidden."""

    def reachable_by(self, uid: int, gid: int) -> bool:
        """Whether the user `uid` of the group `gid` can open all paths."""
        for path in map(Path, (self.executable, *self.read_paths)):
            for part in (path, *path.parents):
                info = part.stat()
                shift = 6 if info.st_uid == uid else 3 if info.st_gid == gid else 0
                needed_bits = 0o1 if stat.S_ISDIR(info.st_mode) else 0o5
                if (info.st_mode >> shift) & needed_bits != needed_bits:
                    return False
        return True


@functools.lru_cache(maxsize=8)
def describe(executable: str | None = None) -> Interpreter:
    """Returns the interpreter at that path, or without a path the base one of this process."""
    if executable is None:
        base = getattr(sys, "_base_executable", None) or sys.executable
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        facts = [base, sys.base_prefix, sys.base_prefix, base, version]
    else:
        try:
            command = [executable, "-I", "-c", _PRINT_FACTS]
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=30, check=True
            )
            facts = json.loads(process.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise SandboxUnavailable(
                f"sandbox: interpreter={executable!r} does not run ({error}); set a Python ≥ 3.8"
            ) from error
    path, prefix, base_prefix, base_executable, version = facts
    real_path = os.path.realpath(base_executable)
    in_venv = prefix != base_prefix
    needed_paths = [os.path.dirname(real_path) if in_venv else real_path]
    needed_paths += [os.path.join(base_prefix, name) for name in ("lib", "lib64")]
    if in_venv:
        needed_paths.append(prefix)
    read_paths = tuple(
        dict.fromkeys(
            needed
            for needed in needed_paths
            if not f"{needed}/".startswith(_SYSTEM_PREFIXES) and os.path.exists(needed)
        )
    )
    library = f"{base_prefix}/lib/python{version}"
    package_directories = (
        f"{library}/site-packages",
        f"{library}/dist-packages",
        f"{base_prefix}/lib/python3/dist-packages",
        f"{base_prefix}/local/lib/python{version}/dist-packages",
    )
    masked_paths = () if in_venv else tuple(filter(os.path.isdir, package_directories))
    return Interpreter(path if in_venv else real_path, read_paths, masked_paths)


def choose(executable: str | None, *, uid: int, gid: int, bind_interpreter: bool) -> Interpreter:
    """Returns the interpreter at `executable`, or by default that of this process.

    If `uid` cannot read the default, the system's Python replaces it.
    """
    interpreter = describe(executable)
    if bind_interpreter or interpreter.reachable_by(uid, gid):
        return interpreter
    if executable is None and os.path.exists(SYSTEM_PYTHON):
        return describe(SYSTEM_PYTHON)
    raise SandboxUnavailable(
        f"sandbox: uid {uid} cannot read the interpreter {interpreter.executable}, and this process"
        f" may not mount it elsewhere; choose one that it can read, such as {SYSTEM_PYTHON}"
    )
