"""Quick attacks on a box, with which `hone doctor` checks the sandbox of this machine."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hone.sandbox.layers import DEFAULT_MINIMUM, run_python
from hone.sandbox.plan import BOX_HOME, box_environment
from hone.sandbox.result import JobFields, SandboxResult, Status

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Check:
    """An attack, and whether the box contained it (`passed`)."""

    name: str
    passed: bool
    detail: str


_FORK_PROGRAM = """
import os, time
count = 0
try:
    for count in range(10_000):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
except OSError:
    print(count)
"""


def self_test(
    minimum: Collection[str] = DEFAULT_MINIMUM, interpreter: str | None = None
) -> list[Check]:
    """Runs the attacks and returns the checks; raises SandboxUnavailable without the `minimum`."""

    def run(code: str, **job_fields: Unpack[JobFields]) -> SandboxResult:
        job_fields.setdefault("timeout_s", 30.0)
        return run_python(code, minimum=minimum, interpreter=interpreter, **job_fields)

    checks: list[Check] = []

    def add_check(name: str, result: SandboxResult, passed: bool) -> None:
        last_line = (result.stderr or result.stdout).strip().rpartition("\n")[2][:200]
        detail = f"{result.status.value}: {last_line}" if last_line else result.status.value
        checks.append(Check(name, passed, detail))

    box_variables = {*box_environment(BOX_HOME), "LC_CTYPE", "PWD"}  # bubblewrap sets PWD
    with tempfile.NamedTemporaryFile("w", prefix="hone-secret-") as secret:
        secret.write("planted")
        secret.flush()
        os.chmod(secret.name, 0o644)
        result = run(f"print(open({secret.name!r}).read())")
        add_check("files outside are not readable", result, "planted" not in result.stdout)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print(1)")
        add_check("no network", result, not result.ok)
    result = run("import os; print(*sorted(os.environ))")
    inherited_variables = set(result.stdout.split()) - box_variables
    add_check("the environment is not inherited", result, result.ok and not inherited_variables)
    result = run(f"import os; os.kill({os.getpid()}, 0); print(1)")
    add_check("processes outside cannot be signalled", result, not result.ok)
    result = run(_FORK_PROGRAM, processes=16)
    add_check("forks are limited", result, result.ok and int(result.stdout) <= 16)
    result = run("x = bytearray(1 << 30); print(len(x))", memory_mb=256)
    add_check("memory is limited", result, result.status is Status.MEMORY)
    result = run("while True: pass", timeout_s=0.5)
    add_check("time is limited", result, result.status is Status.TIMEOUT)
    result = run("while True: print('x' * 4096)", output_bytes=1 << 16)
    add_check("output is limited", result, result.status is Status.OUTPUT)
    return checks
