"""A user's function as an estimator: it gets what its signature takes, and returns a pair."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from hone.algorithms.advantages.estimator import (
    Estimator,
    FunctionEstimator,
    Trajectories,
    create_estimator,
)
from hone.plugins import PluginError

REWARDS, MASK = torch.tensor([[1.0, 2.0]]), torch.ones(1, 2)


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


def test_arguments_are_given_by_name_where_the_function_has_verls_names() -> None:
    def reversed_order(response_mask, token_level_rewards, index=None):
        return token_level_rewards, response_mask

    def other_names(rewards, mask):
        return rewards, mask

    for function in (reversed_order, other_names):
        advantages, returns = FunctionEstimator(function, None)(Trajectories(REWARDS, MASK))
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
