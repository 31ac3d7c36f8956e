"""The warden's bind mounts are invisible outside its mount namespace."""

from __future__ import annotations

from pathlib import Path

from hone.sandbox import run_python


def test_bind_mounting_the_interpreter_changes_no_mount_of_this_process(bwrap: None) -> None:
    before = Path("/proc/self/mounts").read_text()
    assert run_python("pass").ok
    assert Path("/proc/self/mounts").read_text() == before
