"""Rollout and trainer log-probs: their agreement is reported, and their difference is corrected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hone.protocol import DataProto

from ..runs import Run


def test_rollout_and_trainer_agree_on_log_probs(train: Callable[..., Run]) -> None:
    lines = train("actor_rollout_ref.actor.ppo_epochs=2").steps
    assert all(line["rollout_corr/log_prob_abs_diff_max"] < 1e-4 for line in lines)


def test_no_agreement_is_reported_that_nobody_measured(train: Callable[..., Run]) -> None:
    for line in train("algorithm.rollout_correction.bypass_mode=true").steps:
        names = [n for n in line if "log_prob_abs_diff" in n or "rollout_probs_diff" in n]
        assert not names
        assert "rollout_corr/kl" not in line


@pytest.mark.parametrize(
    "correction",
    [
        ["rollout_is=token", "rollout_is_threshold=1.01"],
        ["rollout_is=sequence"],
        ["rollout_is=token", "rollout_is_threshold='0.5_2.0'"],
        ["rollout_rs=token_k2", "rollout_rs_threshold=0.5"],
        ["rollout_rs=seq_mean_k1", "rollout_rs_threshold='0.9_1.1'"],
        ["bypass_mode=true"],
        ["bypass_mode=true", "loss_type=reinforce", "rollout_is=token"],
    ],
    ids=" ".join,
)
def test_correction_trains(train: Callable[..., Run], correction: list[str]) -> None:
    run = train(*(f"algorithm.rollout_correction.{c}" for c in correction))
    row = run.rollouts(1)[0]
    if correction[0].startswith("rollout_is"):
        # The engines agree, so nothing is cut: every weight is 1.
        assert row["rollout_is_weights"] == pytest.approx(row["response_mask"], abs=1e-3)
        assert run.steps[0]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-3)
    elif correction[0].startswith("rollout_rs"):
        assert row["loss_mask"] == row["response_mask"]
    else:
        assert row["old_log_probs"] == row["rollout_log_probs"]
        assert run.steps[0]["training/old_log_probs_recomputed"] == 0.0
    assert run.steps[0]["actor/grad_norm"] > 0


def test_rejected_tokens_leave_the_loss_and_nothing_else(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.trainer.ppo.source import TrajectorySource

    rows = TrajectorySource.rows

    def doubtful(self: Any, *arguments: Any) -> DataProto:
        batch = rows(self, *arguments)
        batch.batch["rollout_log_probs"][:, 0] -= 3.0  # as if the engine had thought otherwise
        return batch

    monkeypatch.setattr(TrajectorySource, "rows", doubtful)
    run = train(
        "algorithm.rollout_correction.rollout_rs=token_k2",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5",
    )
    for row in run.rollouts(1):
        assert row["loss_mask"] == [0, *row["response_mask"][1:]]
        assert row["advantages"][0] == row["advantages"][1]
