"""Extras: what a score function returns next to its score, in advantages, files and metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from hone.config.reward import RewardModelConfig
from hone.protocol import DataProto
from hone.rewards.failures import RewardError
from hone.trainer.ppo.credit import score

from .. import rewards
from ..runs import Run, scored_text, task_row


def test_gdpo_gives_a_row_that_failed_the_failure_score(train: Callable[..., Run]) -> None:
    run = train(
        "algorithm.adv_estimator=gdpo",
        "algorithm.gdpo_reward_keys=[acc,format]",
        "custom_reward_function.name=fails_on_a",
        "actor_rollout_ref.rollout.n=8",
    )
    rows = run.rollouts(1)
    failed = [row for row in rows if row["reward_failure"]]
    assert 0 < len(failed) < len(rows)
    assert all(row["format"] is None for row in failed)  # the file says what the scorer said
    assert len(run.steps) == 2


def test_a_later_batch_whose_every_score_failed_is_no_end_either(train: Callable[..., Run]) -> None:
    run = train(
        "algorithm.adv_estimator=gdpo",
        "algorithm.gdpo_reward_keys=[format]",
        "custom_reward_function.name=fails_after_eight",
    )
    assert [step.get("reward/failures/exception") for step in run.steps] == [None, 8]


def test_gdpo_names_the_row_and_the_key_that_a_score_left_out(train: Callable[..., Run]) -> None:
    with pytest.raises(RewardError, match=r"row \d+ .*lexical.* no number under 'bonus', got None"):
        train(
            "algorithm.adv_estimator=gdpo",
            "algorithm.gdpo_reward_keys=[bonus]",
            "custom_reward_function.name=bonus_for_some",
            "actor_rollout_ref.rollout.n=8",
        )


SHADOWS = {"acc": 0.77, "score": 5.0, "pred": "z", "reward": 9.0, "format": 3.0}


def test_a_column_of_the_data_never_stands_for_a_score(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(task_row(i, i, **SHADOWS)) + "\n" for i in range(8)))
    run = train(
        f"data.train_files={file}",
        f"data.val_files={file}",
        "custom_reward_function.name=detailed",
        "trainer.total_training_steps=1",
    )
    rows, line = run.rollouts(1), run.steps[-1]
    for row in rows:
        expected = rewards.detailed("", scored_text(row), None)
        assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert line["accuracy"] == pytest.approx(sum(row["acc"] for row in rows) / len(rows))
    file_rows = pq.read_table(run.folder / "validation" / "step_1.parquet").to_pylist()
    right = sum(rewards.detailed("", scored_text(row), None)["acc"] for row in file_rows) / len(
        file_rows
    )
    assert line["val-core/lexical/acc/mean@1"] == pytest.approx(right)


def test_accuracy_is_not_read_from_the_data_where_no_scorer_gives_it(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(task_row(i, i, acc=0.77)) + "\n" for i in range(8)))
    run = train(f"data.train_files={file}", "trainer.total_training_steps=1")
    assert "accuracy" not in run.steps[0]


@pytest.mark.parametrize("name", ["loss_mask", "responses", "advantages", "uid", "reward/rule"])
def test_an_extra_may_not_be_called_like_a_column(name: str) -> None:
    def polite(batch: DataProto, return_dict: bool) -> dict[str, Any]:
        return {"reward_tensor": torch.zeros(2, 3), "reward_extra_info": {name: [1, 2]}}

    batch = DataProto.from_dict(
        {"responses": torch.zeros(2, 3), "response_mask": torch.ones(2, 3, dtype=torch.int64)}
    )
    with pytest.raises(RewardError, match=rf"polite returns '{name}'.*another name"):
        score(batch, polite, None, RewardModelConfig())
