"""PURE's token-level RLOO with the golden numbers, and its strict minimum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.algorithms.advantages import get_estimator
from hone.algorithms.advantages.rloo import rloo_token
from hone.algorithms.credit import STRICT_MIN
from hone.algorithms.shaping import normalise_advantages

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
    white = normalise_advantages(diluted, MASK)
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
    with pytest.raises(ValueError, match="step_mask"):
        rloo_token(REWARDS, MASK, INDEX, gamma=1.0, credit_assignment=STRICT_MIN, **there)
