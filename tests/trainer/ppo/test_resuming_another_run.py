"""A run that goes on in a used folder says what differs, and refuses what cannot go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hone import cli
from hone.config import config_to_dict
from hone.trainer.ppo.checkpoint import PPO_KEYS, STATE_FILE, changed_settings
from hone.trainer.ppo.trainer import PPOTrainer
from hone.verl.dialect import load_config

from ..runs import Task

MODEL = "actor_rollout_ref.model.path"
LR = "actor_rollout_ref.actor.optim.lr"


@pytest.fixture(autouse=True)
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: PPOTrainer) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(PPOTrainer, "init_workers", refuse)


@pytest.fixture
def finished_run(task: Task, tmp_path: Path) -> Path:
    """A folder as a GRPO run leaves it, with the data set's own state and empty weights."""
    import yaml  # type: ignore[import-untyped]

    from hone.data.dataset import RLHFDataset
    from hone.models.load import load_tokenizer

    folder = tmp_path / "run"
    (folder / "global_step_2" / "actor").mkdir(parents=True)
    config = load_config(task.overrides(folder))
    (folder / "config.yaml").write_text(yaml.safe_dump(config_to_dict(config)))
    rows = RLHFDataset(str(task.train), load_tokenizer(str(task.model)), config.data)
    state = {"loader": {"dataset": rows.state_dict()}, "kl_controller": {}, "step": 2}
    (folder / "global_step_2" / STATE_FILE).write_text(json.dumps(state))
    return folder


def dry_run(task: Task, folder: Path, *overrides: str) -> int:
    more = ("trainer.total_training_steps=4", *overrides)
    return cli.main(["train", "--dry-run", *task.overrides(folder, *more)])


def test_the_same_settings_are_not_spoken_of(
    task: Task, finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = ("trainer.total_training_steps=9", "trainer.save_freq=3", "trainer.logger=[console]")
    assert dry_run(task, finished_run, *others) == 0
    assert "from global_step_2 on" not in capsys.readouterr().out
    # Nor are others where no step is left.
    assert dry_run(task, finished_run, f"{LR}=1e-3", "trainer.total_training_steps=2") == 0
    assert "from global_step_2 on" not in capsys.readouterr().out


def test_another_learning_rate_estimator_and_model_are_a_line_each(
    task: Task, finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(task.model, other := tmp_path / "other")
    assert (
        dry_run(
            task, finished_run, f"{LR}=1e-3", "algorithm.adv_estimator=rloo", f"{MODEL}={other}"
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert f"from global_step_2 on: {LR}=0.001, before 0.01" in lines
    assert "from global_step_2 on: algorithm.adv_estimator=rloo, before grpo" in lines
    (line,) = (line for line in lines if "was trained from" in line)
    assert f"{MODEL}={task.model}, not from {other}" in line
    assert sum("global_step_2" in line for line in lines) == 3


def test_many_changes_are_a_few_lines(task: Task) -> None:
    before = config_to_dict(load_config(task.overrides(Path("run"))))
    keys = [key for key in before["algorithm"] if not isinstance(before["algorithm"][key], dict)]
    now = {**before, "algorithm": {**before["algorithm"], **dict.fromkeys(keys, "other")}}
    changes = changed_settings(before, now, PPO_KEYS)
    assert len(changes) == 6
    assert changes[-1] == f"and {len(keys) - 5} settings more"


def test_options_of_the_users_own_names_are_changes_too(task: Task) -> None:
    coefficient, option = "reward_model.turn_reward_coef.", "custom_reward_function.reward_kwargs."

    def settings(*overrides: str) -> dict[str, Any]:
        return config_to_dict(load_config(task.overrides(Path("run"), *overrides)))

    old, new = settings(f"{option}strict=true"), settings(f"{coefficient}search=0.5")
    assert changed_settings(old, new, PPO_KEYS) == [
        f"{coefficient}search=0.5, before not set",
        f"{option}strict not set, before true",
    ]
    del old["algorithm"]["gamma"]  # the earlier run was of a version without this key
    assert len(changed_settings(old, new, PPO_KEYS)) == 2


def test_a_run_without_a_trained_reward_model_does_not_go_on_with_one(
    task: Task, finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prime = ("reward_model.enable=true", "reward_model.type=prime", "algorithm.adv_estimator=rloo")
    model = f"reward_model.model.path={task.model}"
    assert dry_run(task, finished_run, *prime, model) == 2
    output = capsys.readouterr().err
    assert "global_step_2 has no reward model: the run that wrote it trained none" in output


def test_a_run_without_a_critic_does_not_go_on_with_one(
    task: Task, finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    critic = f"critic.model.path={task.model}"
    assert dry_run(task, finished_run, "algorithm.adv_estimator=gae", critic) == 2
    output = capsys.readouterr().err
    assert f"{finished_run}/global_step_2 has no critic: the run that wrote it" in output
    assert "(algorithm.adv_estimator=grpo) trained none" in output
    fresh = "trainer.resume_mode=disable"
    assert dry_run(task, finished_run, "algorithm.adv_estimator=gae", critic, fresh) == 0


def test_other_data_are_refused_before_models_load(
    task: Task, finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(task, finished_run, f"data.train_files={task.test}") == 2
    assert "the data differ from the checkpoint's data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "message"),
    [("runs/best", "must name a folder global_step_N"), ("runs/global_step_7", "does not exist")],
)
def test_a_path_to_resume_from_that_leads_nowhere_is_refused(
    task: Task, tmp_path: Path, path: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
    assert dry_run(task, tmp_path / "run", *overrides) == 2
    assert f"trainer.resume_from_path={path} {message}" in capsys.readouterr().err


def test_a_config_that_cannot_be_read_stops_nothing(task: Task, finished_run: Path) -> None:
    (finished_run / "config.yaml").write_text("{[")
    assert dry_run(task, finished_run) == 0


def any_trainer(task: Task, *overrides: str, **parts: Any) -> PPOTrainer:
    from hone.models.load import load_tokenizer

    config = load_config(task.overrides(Path("run"), *overrides))
    return PPOTrainer(config, load_tokenizer(str(task.model)), **parts)


def test_a_trainer_takes_rows_in_memory(task: Task) -> None:
    rows = [json.loads(line) for line in task.train.read_text().splitlines()]
    trainer = any_trainer(task, "data.train_files=[]", train_dataset=rows, val_dataset=rows[:3])
    batch = trainer.loader.next_batch()
    assert len(batch["prompt_ids"]) == 4
    assert len(trainer.val_dataset) == 3
    resumed = any_trainer(task, "data.train_files=[]", train_dataset=list(rows))
    assert resumed.loader.next_batch()["uid"].tolist() == batch["uid"].tolist()


def test_a_trainer_takes_tables_and_frames(task: Task) -> None:
    import pyarrow as pa

    class Frame:
        columns = ("prompt",)

        def to_dict(self, orient: str) -> list[dict[str, Any]]:
            return {"records": rows}[orient]

    rows = [json.loads(line) for line in task.train.read_text().splitlines()]
    for table in (pa.Table.from_pylist(rows), Frame()):
        assert len(any_trainer(task, train_dataset=table).train_dataset) == len(rows)


def test_a_bad_row_in_memory_is_named(task: Task) -> None:
    from hone.data.rows import DataError

    with pytest.raises(DataError, match=r"rows in memory, row 1: column 'prompt' .*the row has q"):
        any_trainer(task, train_dataset=[{"prompt": "1+1="}, {"q": "2"}])
    with pytest.raises(DataError, match="the training data set has no rows"):
        any_trainer(task, train_dataset=[])
