"""The critic's loss by hand, and its independence of micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.algorithms.policy_losses.policy_loss import LOSS_AGG_MODES, BatchCounts, batch_counts
from hone.algorithms.value_loss import compute_value_loss


def test_the_loss_is_the_larger_of_clipped_and_unclipped():
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


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
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
    with batch_counts(BatchCounts.from_mask(mask)):
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


def test_the_counts_of_the_mini_batch_can_be_arguments():
    """½·(1 + 4) over 10 tokens, or over 4 sequences, on one of 2 ranks whose gradients are averaged."""
    vpreds, zero = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)
    mask = torch.ones(1, 2)
    loss, _ = compute_value_loss(vpreds, zero, vpreds, mask, 0.5, "token-mean", 2, 10)
    assert loss.item() == pytest.approx(2.5 / 10 * 2)
    loss, _ = compute_value_loss(
        vpreds, zero, vpreds, mask, 0.5, "seq-mean-token-sum", dp_size=2, global_batch_size=4
    )
    assert loss.item() == pytest.approx(2.5 / 4 * 2)
    mode = "seq-mean-token-sum-norm"
    loss, _ = compute_value_loss(vpreds, zero, vpreds, mask, 0.5, mode, 1, None, 4, 5.0)
    assert loss.item() == pytest.approx(2.5 / 4 / 5)
    with pytest.raises(ValueError, match="no batch_num_tokens"):
        compute_value_loss(vpreds, zero, vpreds, mask, 0.5, dp_size=2)
