"""Totals of trajectories, in batches larger than one block."""

from __future__ import annotations

import numpy as np
import torch

from hone.algorithms.advantages.outcome import outcomes, row_sums

ROWS = 600
RANDOM = np.random.default_rng(0)
MASK = torch.from_numpy(RANDOM.uniform(size=(ROWS, 3)) < 0.5)
REWARDS = torch.from_numpy(RANDOM.normal(size=(ROWS, 3)))


def test_sums_cover_every_row_of_a_large_batch():
    expected = np.where(MASK, REWARDS, 0).sum(1)
    np.testing.assert_allclose(row_sums(REWARDS, MASK), expected)
    with_junk = torch.where(MASK, REWARDS, torch.nan)
    np.testing.assert_allclose(row_sums(with_junk, MASK), expected)


def test_a_value_a_trajectory_is_spread_over_every_row_of_a_large_batch():
    outcome = outcomes("test", REWARDS, MASK, [i % 7 for i in range(ROWS)], None)
    values = torch.arange(1.0, ROWS + 1).double()
    np.testing.assert_array_equal(outcome.broadcast(values), values[:, None] * MASK)
    np.testing.assert_array_equal(outcome.lengths, MASK.sum(1))


def test_rows_of_one_trajectory_add_up():
    outcome = outcomes("test", REWARDS[:4], MASK[:4], list("ppqq"), list("xxxy"))
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
    outcome = outcomes("test", REWARDS, MASK, [0] * ROWS, None)
    white = outcome.broadcast(outcome.whiten(outcome.scores))
    values = white[MASK]
    assert abs(values.mean().item()) < 1e-12
    np.testing.assert_allclose(values.var().item(), 1, rtol=1e-7)
