"""The commands of docs/install.md: what they name exists, and a wheel outside the clone runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from hone.tracking import read_metrics
from hone.trainer.quickstart import ACCURACY

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "install.md"
SOURCES = (
    "hone",
    "recipe",
    "recipes",
    "examples",
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
)
SOURCES += ("LICENSE", "constraints.txt")


def copy_sources(clone: Path) -> Path:
    """Copies what a build reads from this checkout to the folder `clone`."""
    clone.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, clone / name)
    return clone


def commands(title: str) -> list[str]:
    """The command lines of one section of the page."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    assert section, title
    return [line for block in re.findall(r"```bash\n(.*?)```", section, flags=re.S)
            for line in block.strip().splitlines()]  # fmt: skip


@pytest.mark.parametrize("title", ["With an NVIDIA GPU", "On a CPU"])
def test_an_installation_takes_the_torch_that_is_tested_first_and_then_what_exists(
    title: str,
) -> None:
    lines = [shlex.split(line) for line in commands(title)]
    torch, package = [words for words in lines if words[0] == "pip"]
    pins = (ROOT / "constraints.txt").read_text().split()
    assert torch[2] in pins
    assert ("--index-url" in torch) == (title == "On a CPU")
    assert (ROOT / package[package.index("-c") + 1]).is_file()
    asked = package[-1].removeprefix(".[").removesuffix("]").split(",")
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    for extra in asked:
        assert re.search(rf"^{extra} = \[", extras, flags=re.M)


def test_make_takes_the_index_of_torch_for_torch_alone() -> None:
    shown = ["make", "-n", "-B", ".venv/.ready", "TORCH_INDEX=URL", "PYTHON=python3"]
    done = subprocess.run(shown, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    installs = [line for line in done.stdout.splitlines() if "pip install" in line]
    assert ["--index-url URL" in line for line in installs] == [True, False]


def test_the_distribution_installs_no_top_level_package_but_hone(tmp_path: Path) -> None:
    """The checkout's `recipe` would hide a user's own package of this name."""
    pytest.importorskip("setuptools", minversion="77")  # what pyproject.toml asks for
    clone, build = copy_sources(tmp_path / "clone"), tmp_path / "build"
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(build)]
    subprocess.run(command, cwd=clone, check=True, timeout=280)
    assert (clone / "recipe").is_dir()
    assert [path.name for path in build.iterdir()] == ["hone"]


@pytest.mark.slow
def test_a_wheel_outside_the_clone_runs_quickstart_config_and_a_recipe(tmp_path: Path) -> None:
    """Its dependencies are those of this environment, by a path file; the clone is not on the path."""
    pytest.importorskip("setuptools", minversion="77")  # what pyproject.toml asks for
    elsewhere, venv = tmp_path / "elsewhere", tmp_path / "venv"
    clone = copy_sources(tmp_path / "clone")
    elsewhere.mkdir()
    fresh = [sys.executable, "-m", "venv", "--without-pip", str(venv)]
    subprocess.run(fresh, check=True, timeout=280)
    site = next((venv / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = venv / "bin" / "pip"
    pip.write_text('#!/bin/sh\nexec python -m pip "$@"\n')
    pip.chmod(0o755)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    # No index and no download: the build takes setuptools from this environment (pip reads 0 as true).
    environment |= {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}

    def shell(line: str, folder: Path) -> str:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    for line in commands("Wheel"):
        shell(line, clone)
    shutil.rmtree(clone)
    assert str(site) in shell('python -c "import hone; print(hone.__file__)"', elsewhere)
    assert "CPU threads" in shell("hone config explain trainer.num_threads", elsewhere)
    shell("hone quickstart trainer.total_training_steps=30", elsewhere)
    assert (elsewhere / "quickstart" / "seed-1" / "curve.png").is_file()
    metrics = list(read_metrics(elsewhere / "quickstart" / "seed-1" / "run" / "metrics.jsonl"))
    assert metrics[0][ACCURACY] < 0.2
    assert metrics[-1][ACCURACY] > 0.8
    shell("hone recipes sums && hone recipes tinyzero && hone model tiny MODEL", elsewhere)
    few = "data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=4"
    few += " actor_rollout_ref.rollout.n=2 data.val_max_samples=4 trainer.total_training_steps=1"
    shell(f"recipes/sums/run.sh MODEL DATA RUN {few}", elsewhere)
    assert (elsewhere / "RUN" / "metrics.jsonl").is_file()
    shell("hone config check recipes/tinyzero/countdown_grpo.yaml", elsewhere)
