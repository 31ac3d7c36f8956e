"""The optimal token baseline by hand."""

from __future__ import annotations

import numpy as np
import torch

from hone.algorithms.advantages import get_estimator
from hone.algorithms.advantages.optimal_token_baseline import (
    optimal_token_baseline,
    tir_optimal_token_baseline,
)


def tensors(*arrays):
    return [torch.tensor(x, dtype=torch.float64) for x in arrays]


def test_the_required_columns_are_declared():
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        assert get_estimator(name).requires == ("old_log_probs", "sum_pi_squared")
        assert get_estimator(name).uses == ("rollout_is_weights",)


def test_two_rows_by_hand_and_the_tail_of_the_longer_has_no_baseline():
    rewards, mask, probs, squares = tensors(
        [[0, 0, 1], [0, 0.5, 0]], [[1, 1, 1], [1, 1, 0]], [[0.5, 0.5, 0.5], [0.8, 0.8, 1]],
        [[0.5, 0.5, 0.5], [0.7, 0.7, 1]],
    )  # fmt: skip
    advantages, returns = optimal_token_baseline(
        rewards, mask, ["p", "p"], old_log_probs=probs.log(), sum_pi_squared=squares
    )
    # energy a token: 1 − 2·0.5 + 0.5 = 0.5 and 1 − 2·0.8 + 0.7 = 0.1; both add up over positions
    baseline = (1 * 0.5 + 0.5 * 0.1) / 0.6
    np.testing.assert_allclose(returns, [[1, 1, 1], [0.5, 0.5, 0]])
    np.testing.assert_allclose(
        advantages,
        [[1 - baseline, 1 - baseline, 1], [0.5 - baseline, 0.5 - baseline, 0]],
        atol=1e-7,
    )


def test_importance_weights_enter_squared():
    rewards, mask, probs, squares = tensors([[1], [0]], [[1], [1]], [[0.5], [0.5]], [[0.5], [0.5]])
    advantages, _ = optimal_token_baseline(
        rewards,
        mask,
        ["p", "p"],
        old_log_probs=probs.log(),
        sum_pi_squared=squares,
        rollout_is_weights=torch.tensor([[3.0], [1.0]]),
    )
    np.testing.assert_allclose(advantages[:, 0], [1 - 0.9, -0.9], atol=1e-7)


def test_the_multi_turn_form_compares_the_nth_policy_tokens():
    rewards, mask, probs, squares = tensors(
        [[0, 0, 1, 0], [0, 1, 0, 0]],
        [[1, 0, 1, 0], [1, 1, 0, 0]],
        np.full((2, 4), 0.5),
        np.full((2, 4), 0.5),
    )
    columns = {"old_log_probs": probs.log(), "sum_pi_squared": squares}
    compact, _ = tir_optimal_token_baseline(rewards, mask, ["p", "p"], **columns)
    np.testing.assert_allclose(compact, 0, atol=1e-7)
    by_column, _ = optimal_token_baseline(rewards, mask, ["p", "p"], **columns)
    np.testing.assert_allclose(by_column, [[0, 0, 1, 0], [0, 1, 0, 0]], atol=1e-7)


def test_the_tail_of_the_longest_may_keep_its_own_return_as_baseline():
    rewards, mask, probs, squares = tensors(
        [[0, 0, 1], [0, 0.5, 0], [1, 0, 0]], [[1, 1, 1], [1, 1, 0], [1, 0, 0]],
        np.full((3, 3), 0.5), np.full((3, 3), 0.5),
    )  # fmt: skip
    columns = {"old_log_probs": probs.log(), "sum_pi_squared": squares}
    for estimator in (optimal_token_baseline, tir_optimal_token_baseline):
        advantages, _ = estimator(
            rewards, mask, ["p", "p", "alone"], handle_zero_tail=False, epsilon=0.5, **columns
        )
        # energy 0.5 per token: W is 0.5, 1, 1.5 at positions 1, 2, 3
        first, second = 0.75 / (1 + 0.5), 1.5 / (2 + 0.5)
        expected = [[1 - first, 1 - second, 1 - 1.5 / 2], [0.5 - first, 0.5 - second, 0], [1, 0, 0]]
        np.testing.assert_allclose(advantages, expected, rtol=1e-12)
        values, _ = estimator(rewards, mask, ["p", "p", "alone"], **columns)
        assert values[0, 2] == 1
