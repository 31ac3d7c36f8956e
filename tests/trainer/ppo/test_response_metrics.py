"""PURE's metrics, computed by hand on a batch of four responses to two prompts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hone.config import PPOTrainerConfig
from hone.models.tiny import character_tokenizer
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.trainer.ppo.response_metrics import (
    correctness,
    filter_metrics,
    reflection_score,
    response_metrics,
)
from hone.trainer.ppo.selection import keep_mask
from hone.verl.dialect import load_config

from ..runs import Run

TOKENIZER = character_tokenizer()
TEXTS = ["abab", "aaaa", "ab", "wait, no"]
"""Their repeatness is 0.3, 0.6, 0 and 0."""
WIDTH = 10
GROUPS = "ppqq"
VERDICTS = [1.0, 0.0, 1.0, 1.0]
MODEL_REWARDS = [0.8, 0.4, -0.5, 0.1]


def config(*overrides: str) -> PPOTrainerConfig:
    model = ["reward_model.enable=true", "reward_model.model.path=rm", "reward_model.type=orm"]
    limit = ["data.max_response_length=8", "actor_rollout_ref.model.path=m", "data.train_files=x"]
    return load_config([*model, *limit, *overrides])


def batch(**changes: Any) -> DataProto:
    ids = [TOKENIZER.encode(text, add_special_tokens=False) for text in TEXTS]
    lengths = torch.tensor([len(row) for row in ids])
    responses = torch.tensor([row + [0] * (WIDTH - len(row)) for row in ids])
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    last = torch.nn.functional.one_hot(lengths - 1, WIDTH).float()
    columns = {
        "responses": responses,
        "response_mask": mask,
        "attention_mask": torch.cat([torch.ones(4, 2, dtype=torch.long), mask], 1),
        "reward/rule": last * torch.tensor(VERDICTS)[:, None],
        "reward/model": last * torch.tensor(MODEL_REWARDS)[:, None],
        "old_log_probs": mask * -1.0,
        "ref_log_prob": mask * -2.0,
    }
    arrays = {"uid": list(GROUPS), "reward_failure": [None] * 4}
    for name, value in changes.items():
        (columns if isinstance(value, torch.Tensor) else arrays)[name] = value
    return DataProto.from_dict(columns, {n: object_array(v) for n, v in arrays.items()})


def approximately(expected: dict[str, float]) -> Any:
    return pytest.approx(expected, abs=1e-6)


def test_every_metric_of_an_outcome_reward_equals_the_one_computed_by_hand() -> None:
    metrics = response_metrics(batch(), TOKENIZER, config())
    expected = {
        "instant_rewards/verifiable_reward": (0.75, 1, 0),
        "instant_rewards/outcome_reward": (0.2, 0.8, -0.5),
        "high_level_scores/repeat_score": (0.225, 0.6, 0),
        "high_level_scores/reflection_pattern_score": (0.25, 1, 0),
        "group_info/pass_at_n/whole_batch": (1, 1, 1),
        "group_info/avg_n/whole_batch": (0.75, 1, 0.5),
        "response_length/whole": (4.5, 8, 2),
        "response_length/correct": (14 / 3, 8, 2),
        "response_length/incorrect": (4, 4, 4),
    }
    spread = {f"{n}/{s}": v for n, x in expected.items() for s, v in zip(KINDS, x, strict=True)}
    assert metrics == approximately(
        spread
        | {
            # Two of four agree: (0.8, right) and (0.1, right); (0.4, wrong) and (-0.5, right) do not.
            "instant_rewards/orm_match_vr": 0.5,
            # k3 with log-ratio 1: e^-1 + 1 - 1.
            "instant_rewards/kl/mean": 0.36787944,
            "high_level_scores/high_repeatness_ratio/whole": 0.5,
            "high_level_scores/high_repeatness_ratio/correct": 1 / 3,
            "high_level_scores/high_repeatness_ratio/incorrect": 1,
            "response_length/whole/clip_ratio": 0.25,
            "response_length/correct/clip_ratio": 1 / 3,
            "response_length/incorrect/clip_ratio": 0,
        }
    )


KINDS = ("mean", "max", "min")


@pytest.mark.parametrize(
    ("credit", "outcomes"),
    [("gamma-decay", [0.5, 0.4, -0.5, 0.0]), ("strict min-form", [0.2, 0.4, -0.5, -0.2])],
)
def test_process_rewards_are_combined_as_the_credit_is_and_without_their_weight(
    credit: str, outcomes: list[float]
) -> None:
    steps = torch.zeros(4, WIDTH)
    for row, (position, reward) in enumerate([(1, 0.3), (3, 0.4), (1, -0.5), (4, 0.2)]):
        steps[row, position] = reward
    steps[0, 3], steps[3, 7] = 0.2, -0.2
    scored = batch(**{"reward/process": steps * 0.5, "step_mask": (steps != 0).long()})
    scored.batch.pop("reward/model")
    metrics = response_metrics(
        scored,
        TOKENIZER,
        config(
            "reward_model.type=prm",
            "reward_model.modeling_reward_coef=0.5",
            f"reward_model.credit_assignment={credit}",
        ),
    )
    name = "instant_rewards/outcome_reward"
    assert [metrics[f"{name}/{kind}"] for kind in KINDS] == pytest.approx(
        [sum(outcomes) / 4, max(outcomes), min(outcomes)]
    )
    assert metrics["num_of_steps/tokens_per_step"] == pytest.approx(18 / 6)
    agrees = [(o > 0) == (v == 1) for o, v in zip(outcomes, VERDICTS, strict=True)]
    assert metrics["instant_rewards/orm_match_vr"] == sum(agrees) / 4


@pytest.mark.parametrize(
    ("credit", "outcomes"), [("gamma-decay", [0.9, -0.5]), ("strict min-form", [0.2, -0.5])]
)
def test_step_rewards_are_combined_over_the_rows_of_a_trajectory(
    credit: str, outcomes: list[float]
) -> None:
    """The first trajectory has steps of 0.3 and 0.2, and of 0.4; the second one step of −0.5."""
    steps = torch.zeros(4, WIDTH)
    for row, (position, reward) in enumerate([(1, 0.3), (3, 0.4), (1, -0.5)]):
        steps[row, position] = reward
    steps[0, 3] = 0.2
    rows = batch(
        trajectory_row=[None, 1, None, 1],
        **{"reward/process": steps, "step_mask": (steps != 0).long()},
    )
    rows.batch.pop("reward/model")
    settings = config("reward_model.type=prm", f"reward_model.credit_assignment={credit}")
    metrics = response_metrics(rows, TOKENIZER, settings)
    name = "instant_rewards/outcome_reward"
    assert [metrics[f"{name}/{kind}"] for kind in KINDS] == pytest.approx(
        [sum(outcomes) / 2, max(outcomes), min(outcomes)]
    )
    verdicts = correctness(rows, settings)[[1, 3]].tolist()
    agrees = [(o > 0) == (v == 1) for o, v in zip(outcomes, verdicts, strict=True)]
    assert metrics["instant_rewards/orm_match_vr"] == sum(agrees) / 2


def test_rows_without_a_verdict_are_neither_correct_nor_incorrect() -> None:
    rows = batch(
        reward_failure=["no_ground_truth", None, None, None],
        reward_model=[{}, {}, {"style": "model"}, {"style": "rule"}],
    )
    metrics = response_metrics(rows, TOKENIZER, config())
    assert metrics["response_length/correct/mean"] == 8
    assert metrics["instant_rewards/orm_match_vr"] == 0.5
    assert metrics["group_info/avg_n/whole_batch/mean"] == 0.5
    assert metrics["response_length/whole/mean"] == 4.5


def test_a_trajectory_is_correct_by_the_sum_of_its_rows() -> None:
    rows = batch(trajectory_row=[None, 1, None, 1])
    rows.batch["reward/agent"] = rows.batch.pop("reward/rule") * torch.tensor([1, 1, 0, 0])[:, None]
    assert correctness(rows, config()).tolist() == pytest.approx(
        [math.nan, 1.0, math.nan, 0.0], nan_ok=True
    )


def test_rows_that_the_reward_model_does_not_score_are_no_outcome() -> None:
    styles = [{"style": s} for s in ("model", "rule", "rule", "model")]
    metrics = response_metrics(batch(reward_model=styles), TOKENIZER, config(), route_by_style=True)
    assert metrics["instant_rewards/outcome_reward/mean"] == pytest.approx((0.8 + 0.1) / 2)
    assert "instant_rewards/orm_match_vr" not in metrics
    assert metrics["response_length/incorrect/mean"] == 4


def test_without_any_verdict_nothing_is_called_correct() -> None:
    manager = ("reward_model.reward_manager=blank",)
    metrics = response_metrics(batch(), TOKENIZER, config(*manager))
    needs_one = ("orm_match", "verifiable", "correct", "group_info")
    assert not [name for name in metrics if any(word in name for word in needs_one)]
    assert metrics["instant_rewards/outcome_reward/mean"] == pytest.approx(0.2)


def test_the_verdict_is_the_scorers_accuracy_where_it_gives_one() -> None:
    rows = batch(acc=[0.0, 0.0, 1.0, None])
    rows.meta_info["reward_extra_names"] = ["acc"]
    metrics = response_metrics(rows, TOKENIZER, config())
    assert metrics["response_length/correct/mean"] == 5
    assert metrics["response_length/incorrect/mean"] == 4


def test_a_filter_reports_the_groups_before_and_after_it() -> None:
    full_batch = batch()
    kept_batch = full_batch.select_idxs(torch.tensor([0, 1]))
    tree = config("curriculum_learning.enable=true")
    metrics = filter_metrics(full_batch, kept_batch, tree)
    assert metrics["group_info/avg_n/whole_batch/mean"] == 0.75
    assert metrics["curriculum_learning/original_batch_size"] == 4
    assert metrics["curriculum_learning/filtered_batch_size"] == 2
    assert metrics["curriculum_learning/retain_ratio"] == 0.5
    retained = response_metrics(kept_batch, TOKENIZER, tree)
    assert retained["group_info/avg_n/retained_batch/mean"] == 0.5
    assert "group_info/avg_n/whole_batch/mean" not in retained


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Wait, let me recheck this. However, let's verify", 4),
        ("recheck", 0),
        ("Retry\nTry again; alternatively, rethink it, let's check", 5),
        ("wait here", 0),
    ],
)
def test_reflection_patterns_are_counted(text: str, count: int) -> None:
    assert reflection_score(text) == count


def test_the_curriculum_compares_rule_scores_whatever_the_reward_model_says() -> None:
    scored = batch(token_level_scores=torch.full((4, WIDTH), 7.0))
    tree = ("curriculum_learning.enable=true",)
    keep = keep_mask(scored, config(*tree))
    assert keep is not None
    assert keep.tolist() == [True, True, False, False]
    assert keep_mask(scored, config(*tree, "reward_model.reward_manager=blank")) is None


@pytest.mark.parametrize("filters", ["curriculum_learning", "algorithm.filter_groups"])
def test_a_run_with_a_filter_logs_what_it_keeps(train: Callable[..., Run], filters: str) -> None:
    run = train(
        f"{filters}.enable=true",
        "trainer.response_metrics=true",
        "custom_reward_function.name=by_row",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=1",
    )
    (line,) = run.steps
    rows = run.rollouts(1)
    sizes = [line[f"curriculum_learning/{n}_batch_size"] for n in ("original", "filtered")]
    assert sizes[1] == len(rows) < sizes[0]
    assert line["group_info/avg_n/whole_batch/min"] == 0
    is_correct = [row["score"] > 0.5 for row in rows]
    assert line["group_info/avg_n/retained_batch/mean"] == pytest.approx(
        sum(is_correct) / len(is_correct)
    )
    assert line["actor/avg_ratio"] == pytest.approx(1, abs=0.05)
    assert "timing_s/compute_additional_metrics" in line


def test_a_plain_run_has_none_of_them(train: Callable[..., Run]) -> None:
    (line, _) = train().steps
    assert not [name for name in line if name.startswith(("high_level_scores", "group_info"))]


def test_rows_without_an_answer_count_in_no_metric_of_the_rule_and_pass_the_curriculum() -> None:
    missing = [None, None, "no_ground_truth", "no_ground_truth"]
    without = batch(reward_failure=missing, **{"reward/rule": batch().batch["reward/rule"] * 0})
    metrics = response_metrics(without, TOKENIZER, config())
    answered = response_metrics(batch(), TOKENIZER, config())
    assert answered["instant_rewards/verifiable_reward/mean"] == 0.75
    assert metrics["instant_rewards/verifiable_reward/mean"] == 0.0
    assert metrics["group_info/avg_n/whole_batch/mean"] == 0.0  # of the one group with answers
    assert metrics["instant_rewards/orm_match_vr"] == 0.0  # 0.8 and 0.4 say right, the rule wrong
    for name in ("remove_extreme", "interquartile"):
        settings = config("curriculum_learning.enable=true", f"curriculum_learning.fn_name={name}")
        keep = keep_mask(batch(reward_failure=missing), settings)
        assert keep is not None
        assert keep.tolist()[2:] == [True, True]
    assert keep_mask(without, config("curriculum_learning.enable=true")).tolist() == [
        False,
        False,
        True,
        True,
    ]
