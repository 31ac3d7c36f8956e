"""PRIME's implicit rewards and the losses of its reward model, against numbers computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hone.algorithms.credit import (
    implicit_rewards,
    mean_contrast_logits,
    outcome_losses,
    ranking_accuracy,
)

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
RATIO = torch.tensor([[2.0, -4.0, 6.0, 99], [1.0, -3.0, 99, 99]], dtype=torch.float64)


def rewards(granularity, norm):
    actual = implicit_rewards(RATIO, MASK, beta=0.05, granularity=granularity, norm=norm)
    return actual.tolist()


def test_each_token_but_the_last_has_beta_times_its_log_ratio():
    np.testing.assert_allclose(rewards("token", "none"), [[0.1, -0.2, 0, 0], [0.05, 0, 0, 0]])


def test_the_whole_response_is_rewarded_on_its_last_token():
    np.testing.assert_allclose(rewards("whole", "none"), [[0, 0, 0.2, 0], [0, -0.1, 0, 0]])


def test_batch_norm_divides_by_the_largest_return():
    # Returns are −0.1, −0.2 and 0.05: the largest magnitude is 0.2.
    scale = 0.2 + 1e-6
    expected = np.array([[0.1, -0.2, 0, 0], [0.05, 0, 0, 0]]) / scale
    np.testing.assert_allclose(rewards("token", "batch_norm"), expected)


def test_cross_entropy_of_the_logit_with_the_outcome():
    # The logits are 0.05·4 = 0.2 and 0.05·(−2) = −0.1.
    losses = outcome_losses(RATIO, torch.tensor([1.0, 0.25]), MASK, 0.05, None)
    p = 1 / (1 + math.exp(0.1))
    expected = [math.log(1 + math.exp(-0.2)), -0.25 * math.log(p) - 0.75 * math.log(1 - p)]
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


def test_dpo_compares_with_the_mean_of_the_groups_other_outcomes():
    logit = torch.tensor([0.2, -0.1, 0.5, 0.7], dtype=torch.float64)
    outcome = torch.tensor([1.0, 0.0, 0.0, 1.0])
    contrast_logits = mean_contrast_logits(logit, outcome, ["p", "p", "p", "alone"])
    np.testing.assert_allclose(contrast_logits, [0.2, 0.2, 0.2, 0.0])
    losses = outcome_losses(RATIO, outcome[:2], MASK, 0.05, contrast_logits[:2] - 0.1)
    expected = [math.log(1 + math.exp(-0.1)), math.log(1 + math.exp(-0.2))]
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


def test_ranking_counts_pairs_of_one_prompt():
    logit = torch.tensor([0.3, -0.2, 0.5, 0.1, -1.0, 0.4, 0.6])
    outcome = torch.tensor([1.0, 0, 0, 0, 1, 1, 1])
    pairs, signs = ranking_accuracy(logit, outcome, [*"ppppqqq"])
    assert pairs == pytest.approx(2 / 3)  # 0.3 is above −0.2 and 0.1, and below 0.5
    assert signs == pytest.approx(4 / 7)
    assert ranking_accuracy(logit, torch.ones(7), ["p"] * 7)[0] == 0.5
