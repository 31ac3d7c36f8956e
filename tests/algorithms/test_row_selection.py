"""The filters of groups, and PF-PPO's resampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.algorithms.row_selection import (
    interquartile,
    keep_informative,
    pf_ppo_rows,
    pf_ppo_weights,
    remove_extreme,
)


def test_groups_of_equal_scores_are_removed_and_single_samples_kept():
    scores = [0, 1, 1, 1, 0.1, 0.1, 0.1, 5]
    index = np.array(["mixed", "mixed", "all", "all", "same", "same", "same", "one"], dtype=object)
    keep = keep_informative(scores, index)
    assert keep.tolist() == [True, True, False, False, False, False, False, True]


def test_rows_of_a_group_need_not_be_adjacent_and_scores_may_be_booleans():
    keep = keep_informative(np.array([True, False, False, False]), ["a", "b", "a", "b"])
    assert keep.tolist() == [True, False, True, False]
    assert keep_informative(torch.tensor([1.0, 1.0]), ["a", "a"]).tolist() == [False, False]


def test_the_smallest_difference_counts():
    x = torch.tensor([0.1, 0.1 + 1e-16 * 2], dtype=torch.float64)
    assert keep_informative(x, ["a", "a"]).all()


def test_remove_extreme_keeps_prompts_solved_sometimes():
    keep = remove_extreme([0, 0, 1, 1, 0, 1], list("aabbcc"))
    assert keep.tolist() == [False] * 4 + [True] * 2


def test_interquartile_keeps_the_middle_of_the_batch():
    scores = [0.0, 0.25, 0.5, 0.75, 1.0]
    keep = interquartile(scores, list("abcde"), 25, 75)
    assert keep.tolist() == [False, True, True, False, False]
    many = [i / 1000 for i in range(1001)]
    kept = interquartile(many, list(range(1001)), 25, 75).nonzero()[:, 0]
    assert kept.tolist() == list(range(250, 750))
    assert interquartile([1.0, 1.0], ["a", "b"], 25, 75).tolist() == [True, True]
    assert interquartile([], [], 25, 75).tolist() == []


def test_scores_must_be_one_number_per_row():
    with pytest.raises(ValueError, match="one number per row"):
        keep_informative(torch.ones(2, 3), ["a", "a"])
    with pytest.raises(ValueError, match="for 1 rows"):
        keep_informative([1.0, 2.0], ["a"])


def test_weights_of_the_three_methods():
    scores = torch.tensor([-2.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    np.testing.assert_allclose(pf_ppo_weights(scores, "pow", 2.0), [4, 0, 1, 1], atol=2e-8)
    np.testing.assert_allclose(pf_ppo_weights(scores, "pow", 3.0), [8, 0, 1, 1], atol=2e-8)
    np.testing.assert_allclose(pf_ppo_weights(scores, "max_min", 2.0), [1, 0, 1, 1], atol=2e-8)
    random = pf_ppo_weights(scores, "max_random", 2.0)
    np.testing.assert_allclose(random, [0.1, 0.1, 0.4, 0.4], atol=2e-8)
    assert (pf_ppo_weights(torch.zeros(3), "pow", 2.0) > 0).all()
    with pytest.raises(ValueError, match="pow, max_min or max_random"):
        pf_ppo_weights(scores, "best", 2.0)


def test_resampling_is_reproducible_and_follows_the_weights():
    scores = torch.tensor([0.0, 3.0, 0.0, 1.0])
    rows = pf_ppo_rows(scores, "pow", 2.0, torch.Generator().manual_seed(5))
    again = pf_ppo_rows(scores, "pow", 2.0, torch.Generator().manual_seed(5))
    assert torch.equal(rows, again)
    assert rows.shape == (4,)
    many = pf_ppo_rows(scores.repeat(500), "pow", 2.0, torch.Generator().manual_seed(0)) % 4
    share = torch.bincount(many, minlength=4) / 2000
    np.testing.assert_allclose(share, [0, 0.9, 0, 0.1], atol=0.03)


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_no_rows_give_no_samples(method):
    assert pf_ppo_rows(torch.zeros(0), method, 2.0, torch.Generator()).tolist() == []
