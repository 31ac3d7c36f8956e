"""Metrics of a step: groups without signal, and the timers of its phases."""

from __future__ import annotations

import logging
from collections import defaultdict

import pytest
import torch

from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.trainer.ppo import trainer
from hone.trainer.ppo.alarms import StepWarnings
from hone.trainer.ppo.credit import GROUPS_WITHOUT_SIGNAL, data_metrics, signal_metrics
from hone.trainer.ppo.metrics import pop_timing


def batch(scores: list[float], uids: str, trajectories: str | None = None) -> DataProto:
    tokens = torch.zeros(len(scores), 3)
    tokens[:, 1] = torch.tensor(scores)
    arrays = {"uid": object_array(list(uids))}
    if trajectories is not None:
        rows = [trajectories[:i].count(name) for i, name in enumerate(trajectories)]
        arrays["trajectory_row"] = object_array(rows)
    return DataProto.from_dict(
        {"token_level_scores": tokens, "response_mask": torch.ones(len(scores), 3)}, arrays
    )


@pytest.mark.parametrize(
    ("scores", "uids", "share"),
    [
        ([1, 1, 0, 1], "aabb", 0.5),
        ([0.7, 0.7, 0.7, 0.1, 0.1, 0.1], "aaabbb", 1.0),
        ([1, 0, 0, 1], "aabb", 0.0),
        ([1, 1, 0], "aab", 1.0),
    ],
)
def test_the_share_of_groups_without_signal_is_measured(
    scores: list[float], uids: str, share: float
) -> None:
    assert signal_metrics(batch(scores, uids)) == {GROUPS_WITHOUT_SIGNAL: share}


def test_groups_of_one_have_no_such_share() -> None:
    assert signal_metrics(batch([1, 1, 1], "abc")) == {}


def test_rows_of_one_trajectory_are_one_response() -> None:
    assert signal_metrics(batch([1, 0, 1], "aaa", "xxy")) == {GROUPS_WITHOUT_SIGNAL: 1.0}


def test_a_batch_without_signal_is_told_once_until_there_is_some_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step_warnings = StepWarnings(is_group_relative=True)
    empty, something = batch([1, 1, 0, 0], "aabb"), batch([1, 0, 0, 0], "aabb")
    for step, rows in enumerate([empty, empty, something, empty], start=1):
        step_warnings.observe(signal_metrics(rows), step)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [w.partition(":")[0] for w in warnings] == ["step 1", "step 4"]
    assert "in each group all responses have the same score" in warnings[0]
    assert "algorithm.filter_groups.enable=true" in warnings[0]


def test_each_trajectory_counts_for_the_style_of_its_own_rows() -> None:
    zeros, ones = torch.zeros(4, 3), torch.ones(4, 3)
    scores = torch.tensor([0.0, 1.0, 0.0, 5.0])[:, None] * torch.tensor([0.0, 0.0, 1.0])
    columns = dict.fromkeys(("token_level_rewards", "advantages", "returns", "rm_scores"), zeros)
    columns |= {"token_level_scores": scores, "responses": zeros.long(), "response_mask": ones}
    columns |= {"attention_mask": torch.ones(4, 5)}
    styles = [{"style": style} for style in ("rule", "rule", "model", "model")]
    arrays = {"reward_model": object_array(styles), "trajectory_row": object_array([0, 1, 0, 1])}
    metrics = data_metrics(DataProto.from_dict(columns, arrays), 2, 3)
    assert metrics["reward/style_rule/mean"] == 1.0
    assert metrics["reward/style_model/mean"] == 5.0


def test_an_estimator_that_compares_no_groups_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    StepWarnings(is_group_relative=False).observe(signal_metrics(batch([1, 1], "aa")), 1)
    assert caplog.records == []


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trainer, "time", clock)
    return clock


@pytest.fixture
def timed() -> trainer.PPOTrainer:
    """A trainer that only measures time."""
    timed = trainer.PPOTrainer.__new__(trainer.PPOTrainer)
    timed.seconds = defaultdict(float)
    return timed


def test_a_timer_becomes_a_metric(clock: Clock, timed: trainer.PPOTrainer) -> None:
    with timed.timer("gen"):
        clock.now += 2.5
    assert pop_timing(timed.seconds) == {"timing_s/gen": 2.5}
    assert pop_timing(timed.seconds) == {}


def test_a_repeated_timer_adds_up_and_timers_nest(clock: Clock, timed: trainer.PPOTrainer) -> None:
    with timed.timer("step"):
        for seconds in (1.0, 2.0):
            with timed.timer("gen"):
                clock.now += seconds
        clock.now += 4.0
    assert pop_timing(timed.seconds) == {"timing_s/gen": 3.0, "timing_s/step": 7.0}


def test_time_before_an_exception_counts(clock: Clock, timed: trainer.PPOTrainer) -> None:
    def fail() -> None:
        with timed.timer("gen"):
            clock.now += 1.0
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert pop_timing(timed.seconds) == {"timing_s/gen": 1.0}
