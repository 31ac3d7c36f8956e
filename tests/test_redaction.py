"""Secrets are in no file of a run, no report, no card and no message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hone.config import ConfigError
from hone.config.document import as_yaml, format_with_origins
from hone.redaction import redact, redact_text
from hone.rewards.failures import Failed
from hone.rewards.scorer import ScorerInput, score_row
from hone.tracking import RunFolder
from hone.tracking.report import write_report
from hone.tracking.tracking import Tracking
from hone.trainer.model_card import write_card
from hone.trainer.ppo.checkpoint import changed_settings
from hone.verl.dialect import compose

SECRET = "s3cret"
KWARGS = {
    "api_key": SECRET,
    "hf_token": SECRET,
    "password": SECRET,
    "client_secret": SECRET,
    "OPENAI_API_KEY": SECRET,
    "url": f"https://me:{SECRET}@judge.example/v1?k={SECRET}",
    "headers": [f"Bearer {SECRET}"],
    "nested": {"Authorization": SECRET, "token": {"value": SECRET}},
}
CONFIG = {"custom_reward_function": {"path": "r.py", "reward_kwargs": KWARGS}}


def test_only_secrets_are_redacted() -> None:
    assert SECRET not in str(redact(CONFIG))
    config = {
        "api_key_env": "JUDGE_KEY",
        "max_token_len": 5,
        "tokenizer_path": "m",
        "prompt_key": "prompt",
        "api_key": None,
        "url": "http://127.0.0.1:8000/v1",
        "path": "hdfs://host/a@b",
        "template": "What is 2+2? Write to me@mail.example",
        "sizes": [1, 2.5],
    }
    assert redact(config) == config


def test_a_run_folder_its_report_and_its_card_have_no_secret(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    origins = {f"custom_reward_function.reward_kwargs.{name}": "command line" for name in KWARGS}
    run.write_config(CONFIG, origins)
    run.metrics_file.write_text('{"step": 1, "reward/mean": 1.0}\n')
    assert "api_key: <redacted>" in run.config_file.read_text()
    assert "@judge.example/v1" in run.config_file.read_text()
    report = write_report([run.path], tmp_path / "report.html")
    actor = run.path / "global_step_1" / "actor"
    actor.mkdir(parents=True)
    write_card(actor, actor, "model")
    tracked = Tracking("p", "e", "console", CONFIG, tmp_path / "tracked")
    texts = [run.config_file.read_text(), report.read_text(), (actor / "README.md").read_text()]
    assert "reward_kwargs.api_key: <redacted>" in texts[2]
    assert not [text for text in texts if SECRET in text]
    assert SECRET not in str(tracked.trackers["console"].run.config)


def test_a_report_and_a_card_of_an_older_run_have_no_secret(tmp_path: Path) -> None:

    run = RunFolder(tmp_path / "run")
    run.write_config({}, {"custom_reward_function.reward_kwargs": "command line"})
    run.config_file.write_text(json.dumps(CONFIG))
    run.metrics_file.write_text('{"step": 1, "reward/mean": 1.0}\n')
    actor = run.path / "global_step_1" / "actor"
    actor.mkdir(parents=True)
    write_card(actor, actor, "model")
    assert SECRET not in write_report([run.path], tmp_path / "report.html").read_text()
    assert SECRET not in (actor / "README.md").read_text()


def test_a_failure_of_a_scorer_has_no_secret() -> None:
    def scorer(solution_str: str, api_key: str) -> float:
        raise ValueError(f"wrong key {api_key} at https://me:{SECRET}@host/v1")

    failure = score_row(scorer, ScorerInput("s", "1", "1", {}), {"api_key": "sk-12345"})
    assert isinstance(failure, Failed)
    assert "wrong key <redacted> at https://<redacted>@host/v1" in failure.detail
    assert SECRET not in redact_text(f"POST https://a.b/c?api_key={SECRET}: 401")


KEY = "custom_reward_function.reward_kwargs"


def test_the_config_of_a_run_does_not_give_a_run_its_secret(tmp_path: Path) -> None:
    given = [f"+{KEY}.api_key={SECRET}"]
    composed = compose(given)
    assert SECRET not in as_yaml(composed) + format_with_origins(composed)
    RunFolder(tmp_path).write_config(
        dict(redact({"custom_reward_function": {"reward_kwargs": KWARGS}}))
    )
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ncustom_reward_function: {reward_kwargs: {api_key: <redacted>}}"
    )
    sentence = rf"{KEY}\S* holds a secret that is not stored in .*set it on the command line"
    with pytest.raises(ConfigError, match=sentence):
        compose([], config_name="mine", config_path=tmp_path)
    config = compose(given, config_name="mine", config_path=tmp_path).config
    assert config.custom_reward_function.reward_kwargs["api_key"] == SECRET


def test_a_resumed_run_reports_no_change_of_a_secret() -> None:
    assert changed_settings(redact(CONFIG), CONFIG, ("custom_reward_function",)) == []
