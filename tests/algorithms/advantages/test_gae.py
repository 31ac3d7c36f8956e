"""GAE by hand: the golden numbers of γ = λ = 1, whitening, and skipped tool tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.algorithms.advantages.returns import gae


def raw(rewards, values, mask, gamma, lam):
    """Advantages before whitening: returns − values."""
    rewards, values, mask = (torch.tensor(x, dtype=torch.float64) for x in (rewards, values, mask))
    _, returns = gae(rewards, values, mask, gamma, lam)
    return (returns - values * mask).numpy(), returns.numpy()


def test_without_discount_the_advantage_is_the_return_minus_the_value():
    advantages, returns = raw([[0, 0, 1.0]], [[0.2, 0.5, 0.4]], [[1, 1, 1]], 1.0, 1.0)
    np.testing.assert_allclose(advantages, [[0.8, 0.5, 0.6]])
    np.testing.assert_allclose(returns, [[1, 1, 1]])


def test_lambda_zero_is_one_step_temporal_difference():
    advantages, _ = raw([[1.0, 2.0, 3.0]], [[10.0, 20.0, 30.0]], [[1, 1, 1]], 0.5, 0.0)
    np.testing.assert_allclose(advantages, [[1 + 10 - 10, 2 + 15 - 20, 3 - 30]])


def test_discount_and_lambda_multiply_from_token_to_token():
    advantages, _ = raw([[0.0, 0.0, 1.0]], [[0.0, 0.0, 0.0]], [[1, 1, 1]], 0.5, 0.8)
    np.testing.assert_allclose(advantages, [[0.16, 0.4, 1.0]])


def test_a_tool_answer_between_two_turns_is_skipped():
    with_tool, _ = raw([[0, 9.0, 9.0, 1.0]], [[0.3, 7.0, 7.0, 0.4]], [[1, 0, 0, 1]], 0.9, 0.7)
    without, _ = raw([[0, 1.0]], [[0.3, 0.4]], [[1, 1]], 0.9, 0.7)
    np.testing.assert_allclose(with_tool[:, [0, 3]], without)
    assert (with_tool[:, 1:3] == 0).all()


def test_advantages_are_whitened_over_the_policy_tokens_only():
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 1]])
    rewards = torch.tensor([[0, 1.0, 100], [0, 0, 3.0]])
    advantages, _ = gae(rewards, torch.zeros(2, 3), mask, gamma=1.0, lam=1.0)
    values = advantages[mask.bool()]
    assert values.mean().abs() < 1e-6
    assert values.var().item() == pytest.approx(1, abs=1e-5)


def test_config_gives_gamma_and_lambda_and_the_defaults_are_hones():
    rewards, values = torch.tensor([[0, 0, 1.0]]), torch.tensor([[0.2, 0.5, 0.4]])
    mask = torch.ones(1, 3)
    _, default = gae(rewards, values, mask)
    np.testing.assert_allclose(default, [[1, 1, 1]], rtol=1e-6)
    _, chosen = gae(rewards, values, mask, config={"gamma": 0.5, "lam": 1.0})
    np.testing.assert_allclose(chosen, [[0.25, 0.5, 1]], rtol=1e-6)
