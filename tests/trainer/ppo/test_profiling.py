"""`global_profiler`: listed steps leave a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone import cli
from hone.controller import Role, profiling
from hone.trainer.ppo.profiling import profiled_ranks
from hone.verl.dialect import load_config

from ..runs import Task


def test_each_listed_step_leaves_a_trace_in_the_run_folder(task: Task, tmp_path: Path) -> None:
    roles = (
        "actor_rollout_ref.rollout.profiler.enable=true"  # the reference and the actor are silent
    )
    overrides = task.overrides(tmp_path / "run", "trainer.profile_steps=[2]", roles)
    assert cli.main(["train", *overrides]) == 0
    (trace,) = (tmp_path / "run" / "profile").iterdir()
    assert trace.name == "step_2-rollout-rank_0.json.gz"


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ([], {"actor": None, "rollout": None, "critic": None}),
        (["actor.enable=true"], {"actor": (0,), "rollout": (0,), "critic": ()}),
        (["actor.enable=true", "actor.ranks=[1,3]"], {"actor": (1, 3), "rollout": (1, 3)}),
        (["actor.enable=true", "actor.all_ranks=true"], {"actor": None, "rollout": None, "rm": ()}),
        (["actor.ranks=[2]", "critic.enable=false"], {"actor": (2,), "critic": (), "ref": None}),
        (["critic.enable=true", "rollout.ranks=[1]"], {"actor": (), "rollout": (), "critic": (0,)}),
    ],
)
def test_the_roles_choose_their_ranks(
    settings: list[str], ranks: dict[str, tuple[int, ...] | None]
) -> None:
    config = load_config([*(_key(setting) for setting in settings), "global_profiler.steps=[1]"])
    profiled = {role: profiled_ranks(config, Role.from_string(role)) for role in ranks}
    assert profiled == ranks


def _key(setting: str) -> str:
    role, _, rest = setting.partition(".")
    return f"{'critic' if role == 'critic' else f'actor_rollout_ref.{role}'}.profiler.{rest}"


def test_a_run_whose_roles_choose_no_rank_says_that_it_records_nothing(
    task: Task, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = ("global_profiler.steps=[1]", "critic.profiler.enable=true")  # GRPO has no critic
    assert cli.main(["train", *task.overrides(tmp_path / "run", *settings)]) == 0
    output = " ".join(" ".join(capfd.readouterr()).split())
    assert "global_profiler.steps records nothing" in output
    assert "traces in" not in output
    assert not (tmp_path / "run" / "profile").exists()


def test_a_step_that_fails_stops_the_recording(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hone.trainer.ppo.trainer.PPOTrainer.update", fails)
    overrides = task.overrides(tmp_path / "run", "global_profiler.steps=[1]")
    assert cli.main(["train", *overrides]) == 2
    assert profiling._current_profile is None
    assert not (tmp_path / "run" / "profile").exists()
