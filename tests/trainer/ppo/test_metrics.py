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
from hone.trainer.ppo.metrics import DISTINCT_ANSWERS, distinct_answers, pop_timing


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


def answers(responses: str, uids: str, truths: list[object] | None = None) -> DataProto:
    """A batch whose responses are letters, each followed by an unmasked token that differs in every row."""
    columns = {
        "responses": torch.tensor([[ord(letter), row] for row, letter in enumerate(responses)]),
        "response_mask": torch.tensor([[1, 0]] * len(responses)),
    }
    arrays = {"uid": object_array(list(uids))}
    if truths is not None:
        by_uid = dict(zip(dict.fromkeys(uids), truths, strict=True))
        arrays["reward_model"] = object_array([{"ground_truth": by_uid[uid]} for uid in uids])
    return DataProto.from_dict(columns, arrays)


@pytest.mark.parametrize(
    ("responses", "uids", "truths", "share"),
    [
        ("xxyxxxzxx", "aaabbbccc", ["1", "2", "3"], 0.0),  # the most frequent response counts
        ("xyzxyz", "abcdef", ["1", "2", "3", "1", "2", "3"], 1.0),
        ("xyxyxy", "abcdef", ["1", "2", "3", "1", "2", "3"], 0.5),
        ("uvwxyz", "abcdef", ["1", "2", "1", "2", "1", "2"], 1.0),  # more than expected
        ("xxyy", "abcd", [[1, 2], [1, 2], {"a": 1}, {"a": 1}], 1.0),
        ("xxxy", "abcd", None, 1 / 3),
        ("xxxy", "abcd", [None, None, None, None], 1 / 3),
    ],
)
def test_distinct_answers_are_compared_with_those_expected(
    responses: str, uids: str, truths: list[object] | None, share: float
) -> None:
    metrics = distinct_answers(answers(responses, uids, truths))
    assert metrics == {DISTINCT_ANSWERS: pytest.approx(share)}


def test_one_expected_answer_has_no_distinct_answers() -> None:
    assert distinct_answers(answers("xyx", "abc", ["1", "1", "1"])) == {}
    assert distinct_answers(answers("xy", "aa")) == {}


def test_a_trajectory_answers_with_its_last_row() -> None:
    rows = answers("pxqx", "aabb")
    rows.non_tensor_batch["trajectory_row"] = object_array([0, 1, 0, 1])
    assert distinct_answers(rows) == {DISTINCT_ANSWERS: 0.0}


@pytest.mark.parametrize(
    ("scores", "shares", "steps"),
    [
        ([0.1, 0.3, 0.3, 0.3, 0.3], [1, 0, 0, 0, 0], ["step 4"]),
        ([0.1, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3], [1, 0, 0, 0.5, 0, 0, 0, 0], ["step 7"]),
        ([0.3] * 5, [1, 0, 0, 0, 0], []),  # the reward does not rise
        ([0.1, 0.3, 0.5, 0.7, 0.9], [1, 0.9, 0.8, 0.7, 0.6], []),  # the answers do not get the same
    ],
)
def test_a_reward_that_rises_while_answers_become_constant_is_said_once(
    scores: list[float], shares: list[float], steps: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    step_warnings = StepWarnings(is_group_relative=True)
    for step, (score, share) in enumerate(zip(scores, shares, strict=True), 1):
        step_warnings.observe({"critic/score/mean": score, DISTINCT_ANSWERS: share}, step)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == steps
    for record in caplog.records:
        assert "from 0.1 to 0.3 while almost all prompts get the same answer" in record.getMessage()


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
