"""GRPO and Dr.GRPO by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.algorithms.advantages.estimator import dr_grpo, grpo
from hone.algorithms.advantages.group_baseline import grpo_passk


def column(scores):
    return torch.tensor(scores, dtype=torch.float64)[:, None], torch.ones(len(scores), 1)


def test_golden_scores_of_one_group():
    rewards, mask = column([1, 0, 0, 1, 0])
    advantages, returns = grpo(rewards, mask, index=["p"] * 5, norm_adv_by_std_in_grpo=True)
    np.testing.assert_allclose(
        advantages[:, 0], [1.09544, -0.7303, -0.7303, 1.09544, -0.7303], atol=1e-5
    )
    assert torch.equal(advantages, returns)


def test_epsilon_is_added_to_the_deviation_not_to_the_variance():
    rewards, mask = column([1e-6, -1e-6])
    advantages, _ = grpo(rewards, mask, index=["p", "p"], norm_adv_by_std_in_grpo=True)
    std = np.sqrt(2) * 1e-6
    np.testing.assert_allclose(advantages[0, 0], 1e-6 / (std + 1e-6))


def test_dr_grpo_only_subtracts_the_mean():
    rewards, mask = column([1, 0, 0, 1, 0])
    expected = [[0.6], [-0.4], [-0.4], [0.6], [-0.4]]
    for advantages, _ in (
        dr_grpo(rewards, mask, index=["p"] * 5),
        grpo(rewards, mask, index=["p"] * 5, config={"norm_adv_by_std_in_grpo": False}),
    ):
        np.testing.assert_allclose(advantages, expected)


def test_both_names_of_grpo_follow_the_switch():
    from hone.algorithms.advantages import get_adv_estimator_fn

    rewards, mask = column([1, 0])
    for name in ("grpo", "grpo_vectorized"):
        fn = get_adv_estimator_fn(name)
        off, _ = fn(rewards, mask, index=["p", "p"], config={"norm_adv_by_std_in_grpo": False})
        assert off[0, 0].item() == 0.5


def test_the_division_is_on_by_default():
    rewards, mask = column([1, 0])
    advantages, _ = grpo(rewards, mask, index=["p", "p"])
    assert advantages[0, 0].item() == pytest.approx(np.sqrt(0.5), abs=1e-5)


def test_tiny_differences_are_not_drowned_by_a_variance_floor():
    rewards, mask = column([1e-4, 0])
    advantages, _ = grpo(rewards, mask, index=["p", "p"])
    assert advantages[0, 0].item() == pytest.approx(0.5e-4 / (1e-4 / np.sqrt(2) + 1e-6), rel=1e-6)


def test_epsilon_is_honoured():
    """(1 − 0.5)/(√0.5 + 0.5) = 0.4142; it used to be ignored in silence."""
    rewards, mask = column([1, 0])
    advantages, _ = grpo(rewards, mask, index=["p", "p"], epsilon=0.5)
    assert advantages[0, 0].item() == pytest.approx(0.5 / (np.sqrt(0.5) + 0.5), rel=1e-12)
    best, _ = grpo_passk(rewards, mask, index=["p", "p"], epsilon=0.5)
    assert best[0, 0].item() == pytest.approx(1 / (np.sqrt(0.5) + 0.5), rel=1e-12)


def test_a_misspelt_switch_is_refused():
    rewards, mask = column([1, 0])
    with pytest.raises(TypeError, match="Did you mean 'norm_adv_by_std_in_grpo'"):
        grpo(rewards, mask, index=["p", "p"], norm_adv_by_std=False)
    with pytest.raises(TypeError, match="dr_grpo takes no argument 'norm_adv_by_std_in_grpo'"):
        dr_grpo(rewards, mask, index=["p", "p"], norm_adv_by_std_in_grpo=True)


@pytest.mark.parametrize("estimator", [grpo, grpo_passk], ids=["grpo", "grpo_passk"])
def test_an_epsilon_of_zero_gives_groups_of_equal_scores_0(estimator):
    rewards, mask = column([0.7, 0.7, 0.7])
    advantages, _ = estimator(rewards, mask, index=["p"] * 3, epsilon=0.0)
    assert (advantages == 0).all()


def test_statistics_count_a_trajectory_of_two_rows_once_by_hand() -> None:
    """One prompt: a trajectory of two rows that earns 1 + 2, and two of one row that earn 0 and 6."""
    rewards = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0], [0.0, 6.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
    ids = ["t0", "t0", "t1", "t2"]
    advantages, _ = grpo(
        rewards, mask, index=["p"] * 4, trajectory_id=ids, norm_adv_by_std_in_grpo=True
    )
    # Mean (3 + 0 + 6) / 3 = 3, and the deviation with n - 1: sqrt((0 + 9 + 9) / 2) = 3.
    by_hand = [[0.0, 0.0], [0.0, 0.0], [-1.0, -1.0], [1.0, 1.0]]
    np.testing.assert_allclose(advantages, by_hand, atol=1e-6)
