"""`hone train` without settings starts a run that can learn, and says what it chose."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.tracking.console import screen
from hone.trainer import main_ppo
from hone.trainer.config_notes import STARTING_VALUES_ORIGIN, print_config_notes
from hone.trainer.starting_values import LEARNING_RATES, starting_values
from hone.verl.dialect import compose


@pytest.fixture(scope="module")
def settings_of_task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model of 64 positions and 11 rows."""
    folder = tmp_path_factory.mktemp("given")
    tokenizer = character_tokenizer("ab")
    lm = tiny_lm(len(tokenizer), hidden=16, layers=1, mlp=16, max_positions=64)
    model = save_pretrained(lm, tokenizer, folder / "model")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": "a"}) + "\n" for _ in range(11)))
    return {
        "data.train_files": str(data),
        "actor_rollout_ref.model.path": str(model),
        "trainer.device": "cpu",
    }


def values(settings_of_task: dict[str, Any]) -> dict[str, Any]:
    return {setting.key: setting.value for setting in starting_values(settings_of_task)}


def test_batch_lengths_and_learning_rate_follow_data_model_and_device(
    settings_of_task: dict[str, Any],
) -> None:
    assert values(settings_of_task) == {
        "data.val_files": [],
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 8,
        "data.train_batch_size": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "data.max_response_length": 32,
        "data.max_prompt_length": 32,
        "actor_rollout_ref.actor.optim.lr": 2e-4,
    }
    assert [rate for _, rate in LEARNING_RATES] == sorted(rate for _, rate in LEARNING_RATES)


def test_what_the_user_gave_is_never_touched_and_what_depends_on_it_follows(
    settings_of_task: dict[str, Any],
) -> None:
    settings = {
        "data.train_batch_size": 4,
        "algorithm.adv_estimator": "gae",
        "data.max_prompt_length": 50,
    }
    result = values(settings_of_task | settings)
    assert not set(settings) & set(result)
    assert result["actor_rollout_ref.actor.ppo_mini_batch_size"] == 4
    assert "actor_rollout_ref.rollout.n" not in result
    assert result["data.max_response_length"] == 14


def test_a_response_that_takes_all_positions_does_not_shorten_the_prompts(
    settings_of_task: dict[str, Any],
) -> None:
    settings = {**settings_of_task, "data.max_response_length": 1_000_000}
    assert values(settings)["data.max_prompt_length"] == 64
    assert values({**settings, "data.max_response_length": 60})["data.max_prompt_length"] == 4


def test_a_model_or_file_that_is_not_there_is_left_to_the_checks_that_name_it() -> None:
    missing = {"data.train_files": "nowhere.parquet", "actor_rollout_ref.model.path": "/nowhere"}
    assert "actor_rollout_ref.actor.optim.lr" not in values(missing)


def test_every_value_composes_and_knows_its_origin(settings_of_task: dict[str, Any]) -> None:
    overrides = [f"{key}={value}" for key, value in settings_of_task.items()]
    composed = compose(overrides, starting_values=starting_values)
    assert composed.config.actor_rollout_ref.rollout.n == 8
    assert composed.origins["actor_rollout_ref.rollout.n"] == "hone train"
    assert composed.origins["data.train_files"] == "command line"


def test_three_lines_say_what_was_chosen(
    settings_of_task: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"{key}={value}" for key, value in settings_of_task.items()]
    screen.cache_clear()
    print_config_notes(compose(overrides))
    assert capsys.readouterr().out == ""
    print_config_notes(compose(overrides, starting_values=starting_values))
    output = capsys.readouterr().out
    screen.cache_clear()
    assert output.startswith("starting values for this data, model and device")
    assert "actor_rollout_ref.rollout.n=8" in output


def test_a_single_starting_value_is_one_line(
    settings_of_task: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    composed = compose([f"{key}={value}" for key, value in settings_of_task.items()])
    origins = {"data.train_batch_size": STARTING_VALUES_ORIGIN}
    screen.cache_clear()
    print_config_notes(replace(composed, origins=origins, notes=()))
    output = capsys.readouterr().out
    screen.cache_clear()
    assert output.splitlines()[1:] == [
        f"  data.train_batch_size={composed.config.data.train_batch_size}"
    ]


def test_main_ppo_keeps_the_defaults_of_verl(
    settings_of_task: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    configs: list[Any] = []
    monkeypatch.setattr(main_ppo, "run", lambda config, origins, dry_run: configs.append(config))
    overrides = [f"{key}={value}" for key, value in settings_of_task.items()]
    main_ppo.main(overrides)
    main_ppo.train(overrides)
    assert [c.algorithm.adv_estimator for c in configs] == ["gae", "grpo"]
    assert [c.data.train_batch_size for c in configs] == [1024, 8]


def test_a_yaml_of_the_users_own_is_taken_as_it_is(
    settings_of_task: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    configs: list[Any] = []
    monkeypatch.setattr(main_ppo, "run", lambda config, origins, dry_run: configs.append(config))
    overrides = [f"{key}={value}" for key, value in settings_of_task.items()]
    main_ppo.train(["--config-path", str(tmp_path), "--config-name", "mine", *overrides])
    assert configs[0].algorithm.adv_estimator == "gae"
