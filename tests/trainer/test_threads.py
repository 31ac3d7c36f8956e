"""The number of threads belongs to the run: it is in its config, repeats on resume; busy cores are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hone.config import replace
from hone.trainer import threads
from hone.trainer.threads import busy_warning, resolve_threads
from hone.verl.dialect import compose

from .runs import Run


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A quiet machine, and the threads of before when a test ends."""
    monkeypatch.setattr(threads, "slowdown", lambda count: 0.6)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two cores on which five programs run."""
    monkeypatch.setattr(threads, "slowdown", lambda count: 9.6)
    monkeypatch.setattr(threads, "load_average", lambda: 5.04)
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)


def threads_of(run: Run) -> int:
    return yaml.safe_load((run.folder / "config.yaml").read_text())["trainer"]["num_threads"]


@pytest.mark.slow
def test_a_resumed_run_has_the_threads_of_its_first_steps_unless_told_otherwise(
    train: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def steps(count: int, *more: str) -> Run:
        return train("trainer.save_freq=1", f"trainer.total_training_steps={count}", *more)

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_of(steps(1)) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_of(steps(2)) == 2
    assert torch.get_num_threads() == 2
    assert "num_threads" not in capsys.readouterr().out
    assert threads_of(steps(3, "trainer.num_threads=1")) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "trainer.num_threads=1, but the run used 2 so far" in output


@pytest.mark.parametrize("tree", ["ppo_trainer", "sft_trainer", "generation"])
@pytest.mark.usefixtures("busy")
def test_a_busy_machine_is_told_once_with_what_helps(
    tree: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    config = compose(["trainer.device=cpu"], config_name=tree).config
    resolved, count = resolve_threads(config, 1)
    output = " ".join(capsys.readouterr().out.split())
    assert output == (
        "2 threads are 9.6 times slower than one here: other programs use the cores (load average 5.0 "
        "on 2 cores); set trainer.num_threads=1"
    )
    assert resolved.trainer.num_threads == count == 2
    assert resolve_threads(resolved, 1) == (resolved, 2)
    resolve_threads(config, 1, warn=False)
    assert resolve_threads(replace(config, "trainer.num_threads", 1), 1)[1] == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("count", "load", "free"), [(8, 3.2, 5), (8, 60.0, 1), (8, 0.0, 7), (8, None, 1)]
)
def test_the_number_that_helps_leaves_the_other_programs_their_cores(
    count: int, load: float | None, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "slowdown", lambda count: 2.0)
    monkeypatch.setattr(threads, "load_average", lambda: load)
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    assert (busy_warning(count, "cpu") or "").endswith(f"set trainer.num_threads={free}")


@pytest.mark.parametrize(
    ("count", "device", "ratio"), [(1, "cpu", 9.0), (2, "cuda", 9.0), (2, "cpu", 0.6)]
)
def test_nothing_is_told_where_threads_cost_nothing(
    count: int, device: str, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "slowdown", lambda count: ratio)
    assert busy_warning(count, device) is None


@pytest.mark.parametrize("text", ["", "trainer: 3", "- 1", "{", "trainer: {num_threads: two}"])
def test_a_config_that_says_no_number_leaves_it_to_the_machine(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "global_step_1").mkdir()
    (tmp_path / "config.yaml").write_text(text)
    config = compose([f"trainer.default_local_dir={tmp_path}"]).config
    assert resolve_threads(config, 1)[1] == 1


def test_a_run_resumed_from_elsewhere_takes_the_number_of_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "there" / "global_step_1").mkdir(parents=True)
    (tmp_path / "there" / "config.yaml").write_text("trainer: {num_threads: 3}")
    overrides = [
        f"trainer.default_local_dir={tmp_path / 'here'}",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path / 'there' / 'global_step_1'}",
    ]
    assert resolve_threads(compose(overrides).config, 1)[1] == 3
