"""PRIME's advantages with numbers computed by hand."""

from __future__ import annotations

import numpy as np
import torch

from hone.algorithms.advantages.rloo import prime_rloo

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
IMPLICIT = torch.tensor([[0.3, -0.1, 0.0, 9.0], [0.2, 0.0, 9.0, 9.0]], dtype=torch.float64)
SCORES = torch.tensor([[0, 0, 1.0, 0], [0, 0.0, 0, 0]], dtype=torch.float64)


def returns_of(rewards, gt, dpo):
    _, returns = prime_rloo(
        rewards,
        MASK,
        ["p", "p"],
        reward_gt_coef=gt,
        reward_dpo_coef=dpo,
        **{"reward/implicit": IMPLICIT, "token_level_scores": SCORES},
    )
    return returns.numpy()


def test_the_outcome_is_compared_with_the_other_outcomes():
    np.testing.assert_allclose(returns_of(SCORES, 5, 0), [[5, 5, 5, 0], [-5, -5, 0, 0]])


def test_a_tokens_implicit_reward_is_compared_with_the_means_of_the_group():
    # The means per token are 0.2/3 and 0.1; with n = 2 each token has 2·r − (0.2/3 + 0.1).
    b = 0.2 / 3 + 0.1
    tokens = np.array([[0.6 - b, -0.2 - b, -b], [0.4 - b, -b, 0]])
    togo = np.cumsum(tokens[:, ::-1], 1)[:, ::-1] * MASK[:, :3].numpy()
    np.testing.assert_allclose(returns_of(SCORES, 0, 1)[:, :3], togo)


def test_a_kl_penalty_in_the_reward_has_no_baseline():
    kl = torch.tensor([[0.01, 0.02, 0.03, 0], [0.0, 0.05, 0, 0]], dtype=torch.float64)
    change = returns_of(SCORES - kl, 5, 1) - returns_of(SCORES, 5, 1)
    np.testing.assert_allclose(change, [[-0.06, -0.05, -0.03, 0], [-0.05, -0.05, 0, 0]], atol=1e-12)


def test_advantages_are_whitened_returns():
    advantages, returns = prime_rloo(
        SCORES, MASK, ["p", "p"], **{"reward/implicit": IMPLICIT, "token_level_scores": SCORES}
    )
    tokens = returns[MASK.bool()].numpy()
    expected = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(advantages[MASK.bool()], expected)
