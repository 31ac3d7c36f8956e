"""A warden has root privileges only inside `as_root`, and its children have none."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest

from hone.sandbox.processes import as_root, drop_root, lower_privileges

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can lower its privileges")


def in_child(action: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_lowered_process_is_root_only_inside_as_root() -> None:
    def action() -> None:
        lower_privileges(65534)
        assert (os.getuid(), os.geteuid(), os.getgroups()) == (65534, 65534, [])
        with as_root():
            assert os.geteuid() == 0
            with as_root():
                assert os.geteuid() == 0
            assert os.geteuid() == 0
        assert os.geteuid() == 65534

    assert in_child(action) == 0


def test_dropped_root_cannot_be_regained() -> None:
    def action() -> None:
        lower_privileges(65534)
        drop_root()
        assert (os.getresuid(), os.getresgid()) == ((65534,) * 3, (65534,) * 3)
        with as_root():
            assert os.geteuid() == 65534
        with pytest.raises(PermissionError):
            os.seteuid(0)

    assert in_child(action) == 0


def test_a_program_executed_by_a_lowered_process_has_no_root() -> None:
    def action() -> None:
        lower_privileges(65534)
        code = "grep -q '^Uid:.65534.65534.65534.65534$' /proc/self/status"
        code += " && grep -q '^CapPrm:.0000000000000000$' /proc/self/status"
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", code], {"PATH": "/usr/bin:/bin"})
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    assert in_child(action) == 0
