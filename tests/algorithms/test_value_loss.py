"""The critic's loss by hand, and the law that micro-batches do not scale it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.algorithms.aggregation import MODES, BatchCounts, counted
from hone.algorithms.entropy import compute_entropy_loss
from hone.algorithms.value_loss import compute_value_loss


def test_the_worse_of_clipped_and_unclipped_counts():
    vpreds = torch.tensor([[2.0, 0.0, 0.2]], dtype=torch.float64, requires_grad=True)
    values = torch.zeros(1, 3, dtype=torch.float64)
    returns = torch.tensor([[2.0, 1.0, 1.0]], dtype=torch.float64)
    loss, clipfrac = compute_value_loss(vpreds, returns, values, torch.ones(1, 3), 0.5)
    # 2.0 is clipped to 0.5 and then is 1.5 off; the others stay in range
    assert loss.item() == pytest.approx(0.5 * (1.5**2 + 1 + 0.8**2) / 3)
    assert clipfrac.item() == pytest.approx(1 / 3)
    loss.backward()
    np.testing.assert_allclose(vpreds.grad, [[0, -1 / 3, -0.8 / 3]])


def test_clipping_works_on_both_sides_of_the_old_value():
    returns, values = torch.tensor([[-2.0]]), torch.tensor([[1.0]])
    loss, clipfrac = compute_value_loss(
        torch.tensor([[-2.0]]), returns, values, torch.ones(1, 1), 0.5
    )
    assert loss.item() == pytest.approx(0.5 * 2.5**2)
    assert clipfrac == 1
    inside, none = compute_value_loss(torch.tensor([[0.6]]), returns, values, torch.ones(1, 1), 0.5)
    assert inside.item() == pytest.approx(0.5 * 2.6**2)
    assert none == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("junk", [0.0, np.nan, np.inf])
def test_micro_batches_sum_to_the_mini_batch(mode, junk):
    random = np.random.default_rng(0)
    mask = random.uniform(size=(6, 5)) < 0.7
    vpreds, returns, values = (
        torch.from_numpy(np.where(mask, random.normal(size=mask.shape), junk)) for _ in range(3)
    )
    vpreds.requires_grad_()
    mask = torch.from_numpy(mask)
    whole, _ = compute_value_loss(vpreds, returns, values, mask, 0.5, mode)
    (gradient,) = torch.autograd.grad(whole, vpreds)
    with counted(BatchCounts.of(mask)):
        shares = sum(
            compute_value_loss(
                vpreds[i : i + 2], returns[i : i + 2], values[i : i + 2], mask[i : i + 2], 0.5, mode
            )[0]
            for i in range(0, 6, 2)
        )
    (summed,) = torch.autograd.grad(shares, vpreds)
    assert shares.item() == pytest.approx(whole.item())
    torch.testing.assert_close(summed, gradient)
    assert torch.isfinite(gradient).all()


def test_entropy_is_aggregated_like_the_policy_loss():
    entropys = torch.tensor([[1.0, 3.0], [5.0, torch.nan]])
    mask = torch.tensor([[1, 1], [1, 0]])
    assert compute_entropy_loss(entropys, mask).item() == 3
    assert compute_entropy_loss(entropys, mask, "seq-mean-token-mean").item() == 3.5
    mode = "seq-mean-token-sum-norm"
    assert compute_entropy_loss(entropys, mask, mode, loss_scale_factor=9).item() == 0.5
