"""The mutation check as a test: a sample with `make test-slow`; all of it by running the script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mutation.py")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_change_of_a_sign_a_constant_or_a_comparison_is_noticed():
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--jobs", "2", "--every", "40"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_check_itself_makes_changes_and_covers_every_estimator_and_loss():
    listed = subprocess.run(
        [sys.executable, str(SCRIPT), "--list"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(listed) > 400
    rooms = SCRIPT.parents[2] / "hone" / "algorithms"
    for folder in ("advantages", "policy_losses"):
        for path in (rooms / folder).glob("*.py"):
            if path.name != "__init__.py":
                assert any(f"{folder}/{path.name}" in line for line in listed), path.name
