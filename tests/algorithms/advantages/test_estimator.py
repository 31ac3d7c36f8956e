"""A user's function as an estimator gets the arguments of its signature and returns a pair. Trajectories of
several rows have sums, also in batches larger than one block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hone.algorithms.advantages.estimator import (
    Estimator,
    FunctionEstimator,
    Outcomes,
    Trajectories,
    create_estimator,
    row_sums,
)
from hone.plugins import PluginError

REWARDS, MASK = torch.tensor([[1.0, 2.0]]), torch.ones(1, 2)


def outcomes_of(rewards, mask, uid, trajectory_id=None) -> Outcomes:
    return Trajectories(rewards, mask, uid, {"trajectory_id": trajectory_id}).outcomes(
        "test", rewards
    )


def test_a_function_that_returns_a_pair_is_an_estimator() -> None:
    def doubled(token_level_rewards, response_mask, index=None, config=None):
        return 2 * token_level_rewards, token_level_rewards

    advantages, returns = FunctionEstimator(doubled, None)(Trajectories(REWARDS, MASK))
    assert torch.equal(advantages, 2 * REWARDS)
    assert torch.equal(returns, REWARDS)


@pytest.mark.parametrize("result", [(REWARDS,), (REWARDS, REWARDS, REWARDS), REWARDS, None])
def test_anything_but_a_pair_is_refused_by_name(result) -> None:
    def wrong(token_level_rewards, response_mask):
        return result

    with pytest.raises(PluginError, match=r"wrong returned a .*return \(advantages, returns\)"):
        FunctionEstimator(wrong, None)(Trajectories(REWARDS, MASK))


def test_arguments_are_given_by_name() -> None:
    def reversed_order(response_mask, token_level_rewards, index=None):
        return token_level_rewards, response_mask

    advantages, returns = FunctionEstimator(reversed_order, None)(Trajectories(REWARDS, MASK))
    assert torch.equal(advantages, REWARDS)
    assert torch.equal(returns, MASK)


@dataclass(frozen=True)
class Constant(Estimator):
    value: float = 3.0

    def __call__(self, batch: Trajectories) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.rewards * 0 + self.value, batch.rewards


def test_an_entry_is_an_estimator_class_one_of_them_or_a_function() -> None:
    def mine(token_level_rewards, response_mask):
        return token_level_rewards, token_level_rewards

    assert create_estimator(Constant, None, value=2.0) == Constant(2.0)
    assert create_estimator(Constant(4.0), None) == Constant(4.0)
    assert create_estimator(mine, None) == FunctionEstimator(mine, None)


@pytest.mark.parametrize("entry", [5, "grpo", dict, Estimator])
def test_an_entry_that_cannot_estimate_is_refused(entry) -> None:
    with pytest.raises(PluginError, match=r"is not an advantage estimator|must define __call__"):
        create_estimator(entry, None)


ROWS = 600
RANDOM = np.random.default_rng(0)
MASK = torch.from_numpy(RANDOM.uniform(size=(ROWS, 3)) < 0.5)
REWARDS = torch.from_numpy(RANDOM.normal(size=(ROWS, 3)))


def test_sums_cover_every_row_of_a_large_batch():
    expected = np.where(MASK, REWARDS, 0).sum(1)
    np.testing.assert_allclose(row_sums(REWARDS, MASK), expected)
    with_junk = torch.where(MASK, REWARDS, torch.nan)
    np.testing.assert_allclose(row_sums(with_junk, MASK), expected)


def test_a_value_per_trajectory_is_broadcast_to_every_row_of_a_large_batch():
    outcome = outcomes_of(REWARDS, MASK, [i % 7 for i in range(ROWS)])
    values = torch.arange(1.0, ROWS + 1).double()
    np.testing.assert_array_equal(outcome.broadcast(values), values[:, None] * MASK)
    np.testing.assert_array_equal(outcome.lengths, MASK.sum(1))


def test_rows_of_one_trajectory_add_up():
    outcome = outcomes_of(REWARDS[:4], MASK[:4], list("ppqq"), list("xxxy"))
    rows = np.where(MASK[:4], REWARDS[:4], 0).sum(1)
    np.testing.assert_allclose(
        sorted(outcome.scores), sorted([rows[0] + rows[1], rows[2], rows[3]])
    )
    assert len(outcome.groups.ids) == 3
    totals = np.array([rows[0] + rows[1], rows[0] + rows[1], rows[2], rows[3]])
    np.testing.assert_allclose(
        outcome.broadcast(outcome.scores), totals[:, None] * MASK[:4].numpy()
    )


def test_whitening_of_trajectories_is_whitening_of_their_tokens():
    outcome = outcomes_of(REWARDS, MASK, [0] * ROWS)
    white = outcome.broadcast(outcome.whiten(outcome.scores))
    values = white[MASK]
    assert abs(values.mean().item()) < 1e-12
    np.testing.assert_allclose(values.var().item(), 1, rtol=1e-7)
