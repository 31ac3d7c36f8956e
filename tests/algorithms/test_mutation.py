"""Mutation testing of a sample of mutants; the script runs all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mutation.py")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_mutant_of_a_sample_is_detected():
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--jobs", "2", "--every", "40"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_mutants_cover_every_estimator_and_loss():
    listed = subprocess.run(
        [sys.executable, str(SCRIPT), "--list"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(listed) > 400
    package = SCRIPT.parents[2] / "hone" / "algorithms"
    for folder in ("advantages", "policy_losses"):
        for path in (package / folder).glob("*.py"):
            if path.name != "__init__.py":
                assert any(f"{folder}/{path.name}" in line for line in listed), path.name
