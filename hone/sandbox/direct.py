"""The box without bubblewrap: a temporary directory, Landlock for files, seccomp for sockets.

Weaker than bubblewrap (no PID namespace: host processes are visible in number, not in content), and
used only where the configured minimum allows it. Leaves out limits: spawn.py sets them.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile

from hone.sandbox import landlock, seccomp
from hone.sandbox.interpreter import SYSTEM_PATHS
from hone.sandbox.plan import Order, Plan

log = logging.getLogger(__name__)

_TOOLS = {"PATH": "/usr/bin:/bin"}


def make_home(order: Order, files: list[int]) -> str:
    """The run's directory on the host, filled with its files."""
    home = tempfile.mkdtemp(prefix=f"hone-box-{os.getpid()}-")
    for name, descriptor in zip(order.files, files, strict=True):
        path = os.path.join(home, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as target, os.fdopen(os.dup(descriptor), "rb") as source:
            shutil.copyfileobj(source, target)
    return home


def remove_home(home: str) -> None:
    """Remove it, however deep the program nested it and whatever it locked: by the system's tools,
    which know no recursion limit and never follow a link."""
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf", "--one-file-system"]):
        subprocess.run([*command, "--", home], stderr=subprocess.DEVNULL, env=_TOOLS)
    if os.path.lexists(home):
        log.warning("sandbox: %s could not be removed; remove it by hand", home)


def command(plan: Plan, home: str, order: Order) -> list[str]:
    return [plan.interpreter.executable, f"{home}/main.py", *order.argv]


def close_in(plan: Plan, home: str) -> None:
    """Called in the child, last: from here on only the box is left."""
    os.setsid()
    os.chdir(home)
    devices = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
    read = (*SYSTEM_PATHS, *plan.interpreter.reads)
    landlock.restrict(read=read, write=(home, *devices))
    if plan.seccomp:
        seccomp.install(seccomp.build_filter(keep_group=True))
