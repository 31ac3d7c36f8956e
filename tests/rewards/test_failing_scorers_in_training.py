"""Scorers that hang, raise, return NaN or crash, in real training runs of a tiny model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hone.rewards.failures import RewardError
from hone.rewards.scorer import ScorerSignatureError
from hone.rewards.scores.table import UnknownSourceError
from hone.tracking import read_metrics
from hone.trainer.ppo.preflight import PreflightError
from hone.verl.dialect import load_config

SCORER = """
import os
import time


def fault_of(kind, index):
    return kind if kind != "mixed" else ("sleeps", "raises", "returns_nan", "crashes", "works")[index % 5]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, kind=""):
    fault = fault_of(kind, extra_info["index"])
    if fault == "sleeps":
        time.sleep(10**9)
    if fault == "raises":
        raise KeyError("no such rule")
    if fault == "crashes":
        os._exit(7)
    return float("nan") if fault == "returns_nan" else float(len(solution_str))
"""
REASONS = {"sleeps": "timeout", "raises": "exception", "returns_nan": "nan", "crashes": "crash"}
ROWS = 5


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, a data file of five rows, and the failing scorer."""
    from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm

    folder = tmp_path_factory.mktemp("failing")
    tokenizer = character_tokenizer()
    lm = tiny_lm(len(tokenizer), hidden=32, layers=1, mlp=32, seed=1)
    save_pretrained(lm, tokenizer, folder / "model")
    (folder / "scorer.py").write_text(SCORER)
    write_rows(folder / "train.jsonl", ["failing"] * ROWS)
    return folder


def write_rows(path: Path, sources: list[str]) -> None:
    rows = [
        {
            "data_source": source,
            "prompt": f"{i}+1=",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i},
        }
        for i, source in enumerate(sources)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(files: Path, run: Path, *overrides: str) -> list[dict[str, Any]]:
    """Runs two steps of five prompts with two responses each; returns the metrics per step."""
    from hone.trainer.main_ppo import run as run_ppo

    settings = [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={files / 'model'}",
        f"data.train_files={files / 'train.jsonl'}",
        "data.val_files=[]",
        "data.prompt_format=raw",
        f"data.train_batch_size={ROWS}",
        "data.max_prompt_length=16",
        "data.max_response_length=4",
        "actor_rollout_ref.rollout.n=2",
        "reward_model.reward_manager=prime",
        "trainer.total_training_steps=2",
        "trainer.save_freq=0",
        "trainer.logger=[jsonl]",
        "trainer.device=cpu",
        f"trainer.default_local_dir={run}",
    ]
    run_ppo(load_config([*settings, *overrides]))
    return [line for line in read_metrics(run) if "training/global_step" in line]


def scorer(files: Path, kind: str) -> tuple[str, ...]:
    """Returns the settings of a scorer; the timeout is short only where every row hangs."""
    return (
        f"custom_reward_function.path={files / 'scorer.py'}",
        f"+custom_reward_function.reward_kwargs.kind={kind}",
        f"reward_model.reward_kwargs.timeout_s={0.2 if kind == 'sleeps' else 60}",
    )


def failure_counts(step: dict[str, Any]) -> Counter[str]:
    prefix = "reward/failures/"
    counts = {k.removeprefix(prefix): int(v) for k, v in step.items() if k.startswith(prefix)}
    return Counter(counts)


def test_a_scorer_that_fails_on_every_row_stops_the_run_at_the_first_batch(
    files: Path, tmp_path: Path
) -> None:
    cause = "compute_score of .*scorer.py raised KeyError: 'no such rule' at .*scorer.py:15"
    expected = rf"none of the {2 * ROWS} responses of the first batch.*exception: {cause}$"
    with pytest.raises(RewardError, match=expected):
        train(files, tmp_path, *scorer(files, "raises"))


@pytest.mark.parametrize("policy", ["score", "raise"])
def test_a_scorer_that_never_returns_a_number_stops_the_run_before_models_load(
    files: Path, tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.trainer.ppo.trainer import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "init_workers", None)
    setting = f"reward_model.reward_kwargs.on_failure={policy}"
    with pytest.raises(
        PreflightError, match=r"train\.jsonl, row 0 .*scorer\.py:10: the score is NaN"
    ):
        train(files, tmp_path, *scorer(files, "returns_nan"), setting)


def test_a_scorer_that_cannot_be_called_stops_the_run_before_models_load(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.trainer.ppo.trainer import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "init_workers", None)
    (tmp_path / "mine.py").write_text(
        "\n\ndef compute_score(completions, **kwargs):\n    return 1\n"
    )
    with pytest.raises(ScorerSignatureError, match=r"mine\.py:3: .*completions.*TRL"):
        train(files, tmp_path, f"custom_reward_function.path={tmp_path / 'mine.py'}")


@pytest.mark.slow
def test_failures_are_counted_by_reason_and_the_other_rows_are_used(
    files: Path, tmp_path: Path
) -> None:
    settings = [f"reward_model.reward_kwargs.{s}" for s in ("failure_score=-1", "timeout_s=5")]
    one_step = "trainer.total_training_steps=1"
    (step,) = train(files, tmp_path, *scorer(files, "mixed"), *settings, one_step)
    assert failure_counts(step) == Counter(dict.fromkeys(REASONS.values(), 2))
    assert step["critic/score/min"] == -1.0
    assert step["critic/score/max"] > 0.0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sleeps", r"timeout: no score after 0.2 s; the process was killed"),
        (
            "raises",
            r"exception: .*compute_score of .* raised KeyError: 'no such rule' at .*scorer.py:",
        ),
    ],
)
def test_the_policy_raise_stops_the_run_with_row_source_and_cause(
    files: Path, tmp_path: Path, kind: str, message: str
) -> None:
    stop = "reward_model.reward_kwargs.on_failure=raise"
    with pytest.raises(
        RewardError, match=rf"row 0 \(data_source 'failing'\).*{message}.*failure_sc"
    ):
        train(files, tmp_path, *scorer(files, kind), stop)


def test_an_unknown_source_stops_the_run_before_the_first_step(files: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", ["openai/gsm8k", "openai/gsm8k", "openai/gsm9k"])
    overrides = (f"data.train_files={tmp_path / 'rows.jsonl'}", "data.train_batch_size=3")
    expected = r"'openai/gsm9k' \(.*rows.jsonl, row 2\). Did you mean 'openai/gsm8k'\? Known are .*countdown"
    with pytest.raises(UnknownSourceError, match=expected):
        train(files, tmp_path / "run", *overrides)
    assert not list((tmp_path / "run").glob("metrics.jsonl*"))
