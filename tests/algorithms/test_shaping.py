"""PF-PPO resampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.algorithms.shaping import pf_ppo_rows, pf_ppo_weights


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
