"""Root in reserve: used where a line says so, gone for good in a child."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest

from hone.sandbox.rights import drop, lower, raised

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to lower")


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


def test_lowered_process_is_nobody_until_it_is_raised() -> None:
    def action() -> None:
        lower(65534)
        assert (os.getuid(), os.geteuid(), os.getgroups()) == (65534, 65534, [])
        with raised():
            assert os.geteuid() == 0
            with raised():
                assert os.geteuid() == 0
            assert os.geteuid() == 0
        assert os.geteuid() == 65534

    assert in_child(action) == 0


def test_dropped_process_cannot_come_back() -> None:
    def action() -> None:
        lower(65534)
        drop()
        assert (os.getresuid(), os.getresgid()) == ((65534,) * 3, (65534,) * 3)
        with raised():
            assert os.geteuid() == 65534
        with pytest.raises(PermissionError):
            os.seteuid(0)

    assert in_child(action) == 0


def test_what_a_lowered_process_executes_has_no_reserve() -> None:
    def action() -> None:
        lower(65534)
        code = "grep -q '^Uid:.65534.65534.65534.65534$' /proc/self/status"
        code += " && grep -q '^CapPrm:.0000000000000000$' /proc/self/status"
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", code], {"PATH": "/usr/bin:/bin"})
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    assert in_child(action) == 0
