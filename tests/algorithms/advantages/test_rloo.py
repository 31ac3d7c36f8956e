"""PURE's token-level RLOO with the golden numbers, and its strict minimum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.algorithms.advantages import get_estimator
from hone.algorithms.advantages.rloo import rloo, rloo_token
from hone.algorithms.credit import GAMMA_DECAY, STRICT_MIN, assign_credit
from hone.ops.rows import last_true_index, masked_whiten

from .references import pure_reference

MASK = torch.zeros(2, 8)
MASK[0, :5], MASK[1, :3] = 1, 1
REWARDS = torch.zeros(2, 8, dtype=torch.float64)
REWARDS[0, 1], REWARDS[0, 4], REWARDS[1, 2] = -0.2, 0.1 + 1.0, 0.05
INDEX = ["p", "p"]


def test_golden_returns_and_baselines_of_true_lengths():
    advantages, returns = rloo_token(REWARDS, MASK, INDEX, gamma=1.0)
    np.testing.assert_allclose(returns[0, :5], [0.9, 0.9, 1.1, 1.1, 1.1])
    np.testing.assert_allclose(returns[1, :3], [0.05] * 3)
    np.testing.assert_allclose(advantages[0, :5], np.array([0.9, 0.9, 1.1, 1.1, 1.1]) - 0.05)
    np.testing.assert_allclose(advantages[1, :3], [0.05 - 1.02] * 3)
    assert (advantages[~MASK.bool()] == 0).all()


def test_padding_does_not_dilute_the_baseline():
    wide = torch.nn.functional.pad(REWARDS, (0, 100)), torch.nn.functional.pad(MASK, (0, 100))
    narrow, _ = rloo_token(REWARDS, MASK, INDEX, gamma=1.0)
    padded, _ = rloo_token(*wide, INDEX, gamma=1.0)
    np.testing.assert_array_equal(padded[:, :8], narrow)


def test_the_padded_golden_numbers_follow_with_the_padded_baseline_put_back():
    """The published run divided by the padded width 8: whitened advantages then are the golden ones."""
    _, returns = rloo_token(REWARDS, MASK, INDEX, gamma=1.0)
    diluted = returns - torch.tensor([[0.15 / 8], [5.1 / 8]])
    white = masked_whiten(diluted, MASK)
    np.testing.assert_allclose(
        white[MASK.bool()], [0.57572, 0.57572] + [0.81773] * 3 + [-1.20154] * 3, atol=1e-5
    )


def test_a_single_response_keeps_its_returns():
    advantages, returns = rloo_token(REWARDS[:1], MASK[:1], ["p"], gamma=1.0)
    np.testing.assert_array_equal(advantages, returns)


def test_gamma_comes_from_the_config_and_its_default_is_one():
    _, default = rloo_token(REWARDS, MASK, INDEX)
    np.testing.assert_allclose(default[0, 0], 0.9)
    _, halved = rloo_token(REWARDS, MASK, INDEX, config={"gamma": 0.5})
    np.testing.assert_allclose(halved[0, 0], -0.1 + 1.1 / 16)


def test_the_strict_minimum_replaces_the_sum_of_the_process_part_only():
    process = torch.zeros(2, 8, dtype=torch.float64)
    process[0, 1], process[0, 4], process[1, 2] = -0.2, 0.1, 0.05
    columns = {"reward/process": process, "step_mask": process != 0}
    strict = get_estimator("rloo_token", credit_assignment=STRICT_MIN)
    assert set(strict.requires) == set(columns)
    assert get_estimator("rloo_token", credit_assignment=0.1).requires == ()
    _, returns = rloo_token(
        REWARDS, MASK, INDEX, gamma=1.0, credit_assignment=STRICT_MIN, **columns
    )
    np.testing.assert_allclose(returns[0, :5], [0.8, 0.8, 1.1, 1.1, 1.1])
    _, summed = rloo_token(REWARDS, MASK, INDEX, gamma=1.0, credit_assignment=0.1, **columns)
    np.testing.assert_allclose(summed[0, :5], [0.9, 0.9, 1.1, 1.1, 1.1])


@pytest.mark.parametrize("there", [{}, {"step_mask": MASK}, {"reward/process": REWARDS}])
def test_the_strict_minimum_without_its_columns_is_refused(there):
    with pytest.raises(TypeError, match=r"needs the column '(step_mask|reward/process)'"):
        rloo_token(REWARDS, MASK, INDEX, gamma=1.0, credit_assignment=STRICT_MIN, **there)


PROCESS = torch.zeros(2, 8, dtype=torch.float64)
PROCESS[0, 1], PROCESS[0, 4], PROCESS[1, 2] = -0.2, 0.1, 0.05
STEPS = PROCESS != 0


def columns_of(scores):
    return {"reward/process": PROCESS, "step_mask": STEPS, "token_level_scores": scores}


def test_golden_token_baseline_of_step_rewards():
    """Outcomes −.1 and .05, lengths 5 and 3, steps of 1, 2 and 2 tokens without the ones that end them."""
    advantages, returns = rloo_token(
        PROCESS, MASK, INDEX, credit_assignment=0.1, process_baseline="token", **columns_of(PROCESS)
    )
    first, second, other = -0.2 - 0.05 / 3, 0.1 - 2 * 0.05 / 3, 0.05 + 2 * 0.1 / 5
    np.testing.assert_allclose([first, second, other], [-0.216667, 0.066667, 0.09], atol=1e-6)
    np.testing.assert_allclose(advantages[0, :5], [first + second] * 2 + [second] * 3)
    np.testing.assert_allclose(advantages[1, :3], [other] * 3)
    np.testing.assert_allclose(returns[0, :5], [-0.1] * 2 + [0.1] * 3)


def test_the_step_baseline_and_the_rule_score_by_hand():
    """The others' reward per step (.05 and −.05) at every step end; scores 1 and 0 against each other."""
    advantages, _ = rloo_token(
        REWARDS, MASK, INDEX, credit_assignment=0.1, process_baseline="step", **columns_of(REWARDS)
    )
    np.testing.assert_allclose(advantages[0, :5], [-0.25 + 0.05 + 1] * 2 + [0.05 + 1] * 3)
    np.testing.assert_allclose(advantages[1, :3], [0.05 + 0.05 - 1] * 3)


def test_rloo_over_process_rewards_is_the_form_of_tokens_and_over_scores_it_is_not():
    tokens, _ = rloo_token(REWARDS, MASK, INDEX, gamma=1.0)
    np.testing.assert_array_equal(rloo(REWARDS, MASK, INDEX, credit_assignment=0.1)[0], tokens)
    scores, _ = rloo(REWARDS, MASK, INDEX)
    np.testing.assert_allclose(scores[0, :5], [0.9 - 0.05] * 5)


FORMS = [(c, b) for c in (GAMMA_DECAY, 0.1) for b in ("return", "step", "token")]


@pytest.mark.parametrize(("credit", "baseline"), [*FORMS, (STRICT_MIN, "return")])
@pytest.mark.parametrize("seed", range(3))
def test_every_form_equals_the_slow_reference(credit, baseline, seed):
    """Trajectories of one and of two rows, masked tool tokens, empty rows, groups of 1, 2 and 3."""
    draw = torch.Generator().manual_seed(seed)
    uid, trajectory = list("aaaabbcccd"), list("1123121123")
    shape = (len(uid), 7)
    lengths = torch.tensor([7, 3, 5, 0, 1, 7, 4, 6, 2, 7])
    mask = (torch.arange(7) < lengths[:, None]) & (torch.rand(shape, generator=draw) < 0.8)
    is_last = torch.arange(7) == last_true_index(mask)[:, None]
    steps = mask & (is_last | (torch.rand(shape, generator=draw) < 0.4))
    raw = torch.rand(shape, generator=draw, dtype=torch.float64) * 2 - 1
    process = assign_credit(raw, steps, credit)
    scores = process + (torch.rand(shape, generator=draw) < 0.1).double() * mask
    rewards = scores - 0.01 * torch.rand(shape, generator=draw, dtype=torch.float64) * mask
    options = {"credit_assignment": credit, "process_baseline": baseline, "gamma": 1.0}
    columns = {"reward/process": process, "step_mask": steps, "token_level_scores": scores}
    actual = rloo_token(rewards, mask, uid, trajectory_id=trajectory, **options, **columns)
    expected = pure_reference(
        rewards, scores, process, steps, mask, uid, trajectory, credit, baseline
    )
    for values, reference in zip(actual, expected, strict=True):
        dense = torch.zeros(shape, dtype=torch.float64)
        for place, value in reference.items():
            dense[place] = value
        torch.testing.assert_close(values, dense, atol=1e-12, rtol=1e-12)
