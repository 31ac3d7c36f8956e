"""compute_entropy_loss, which takes logits as in verl."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hone.verl.core_algos import compute_entropy_loss


def slow_entropy(logits: np.ndarray, mask: np.ndarray) -> float:
    total, count = 0.0, 0
    for i, t in zip(*np.nonzero(mask), strict=True):
        weights = [math.exp(z) for z in logits[i, t]]
        total -= sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)
        count += 1
    return total / count


def test_equals_the_slow_reference_also_for_a_cube() -> None:
    """[5, 5, 5] logits also broadcast against a [5, 5] mask, which must not be confused."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(5, 5, 5))
    mask = random.uniform(size=(5, 5)) < 0.6
    actual = compute_entropy_loss(torch.from_numpy(logits), torch.from_numpy(mask))
    assert actual.item() == pytest.approx(slow_entropy(logits, mask), rel=1e-12)


def test_by_hand_and_aggregated_like_the_policy_loss() -> None:
    logits = torch.zeros(2, 2, 4, dtype=torch.float64)
    logits[0, 1, 1:] = -torch.inf  # certain: entropy 0
    logits[1, 1] = torch.nan  # outside the mask
    mask = torch.tensor([[1, 1], [1, 0]])
    assert compute_entropy_loss(logits, mask).item() == pytest.approx(2 * math.log(4) / 3)
    mean = compute_entropy_loss(logits, mask, "seq-mean-token-mean")
    assert mean.item() == pytest.approx((math.log(4) / 2 + math.log(4)) / 2)
    scaled = compute_entropy_loss(logits, mask, "seq-mean-token-sum-norm", loss_scale_factor=9)
    assert scaled.item() == pytest.approx(math.log(4) / 9)


def test_entropies_in_place_of_logits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"takes logits \[B, T, V\].*agg_loss"):
        compute_entropy_loss(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match="takes logits"):
        compute_entropy_loss(torch.ones(2, 3, 4), torch.ones(3, 4))
