"""Chooses the Python interpreter of the box, and the paths that it needs.

Only the standard library is visible: site-packages is masked, unless the interpreter belongs to a
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
    """Read-only paths that it needs outside the system directories."""
    masked_paths: tuple[str, ...]
    """Directories below `read_paths` that are hidden."""

    def reachable_by(self, uid: int, gid: int) -> bool:
        """Whether that user can open all paths."""
        for path in map(Path, (self.executable, *self.read_paths)):
            for part in (path, *path.parents):
                info = part.stat()
                shift = 6 if info.st_uid == uid else 3 if info.st_gid == gid else 0
                needed = 0o1 if stat.S_ISDIR(info.st_mode) else 0o5
                if (info.st_mode >> shift) & needed != needed:
                    return False
        return True


@functools.lru_cache(maxsize=8)
def describe(executable: str | None = None) -> Interpreter:
    """Returns the interpreter at that path; None is the base interpreter of this process."""
    if executable is None:
        base = getattr(sys, "_base_executable", None) or sys.executable
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        facts = [base, sys.base_prefix, sys.base_prefix, base, version]
    else:
        try:
            command = [executable, "-I", "-c", _PRINT_FACTS]
            run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
            facts = json.loads(run.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise SandboxUnavailable(
                f"sandbox: interpreter={executable!r} does not run ({error}); name a Python ≥ 3.8"
            ) from error
    path, prefix, base_prefix, base_executable, version = facts
    real = os.path.realpath(base_executable)
    in_venv = prefix != base_prefix
    needed = [os.path.dirname(real) if in_venv else real]
    needed += [os.path.join(base_prefix, name) for name in ("lib", "lib64")]
    if in_venv:
        needed.append(prefix)
    outside = [path for path in needed if not f"{path}/".startswith(_SYSTEM_PREFIXES)]
    read_paths = tuple(dict.fromkeys(path for path in outside if os.path.exists(path)))
    library = f"{base_prefix}/lib/python{version}"
    packages = (
        f"{library}/site-packages",
        f"{library}/dist-packages",
        f"{base_prefix}/lib/python3/dist-packages",
        f"{base_prefix}/local/lib/python{version}/dist-packages",
    )
    masked_paths = () if in_venv else tuple(path for path in packages if os.path.isdir(path))
    return Interpreter(path if in_venv else real, read_paths, masked_paths)


def choose(executable: str | None, *, uid: int, gid: int, bind_interpreter: bool) -> Interpreter:
    """Returns the interpreter for uid; by default this process's or the system's."""
    interpreter = describe(executable)
    if bind_interpreter or interpreter.reachable_by(uid, gid):
        return interpreter
    if executable is None and os.path.exists(SYSTEM_PYTHON):
        return describe(SYSTEM_PYTHON)
    raise SandboxUnavailable(
        f"sandbox: uid {uid} cannot read the interpreter {interpreter.executable}, and this process"
        f" may not mount it elsewhere; name one it can read, such as {SYSTEM_PYTHON}"
    )
