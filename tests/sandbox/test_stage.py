"""What the warden mounts for itself is seen by nobody else."""

from __future__ import annotations

from pathlib import Path

from hone.sandbox import run_python


def test_staging_the_interpreter_changes_no_mount_of_ours(bwrap: None) -> None:
    before = Path("/proc/self/mounts").read_text()
    assert run_python("pass").ok
    assert Path("/proc/self/mounts").read_text() == before
