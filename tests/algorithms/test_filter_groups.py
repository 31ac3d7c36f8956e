"""The filters of groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.algorithms.filter_groups import interquartile, keep_informative, remove_extreme


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
    with pytest.raises(ValueError, match="for 1 labels"):
        keep_informative([1.0, 2.0], ["a"])
