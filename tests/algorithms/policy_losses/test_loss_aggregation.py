"""Aggregation: the five modes by hand, and shares that sum to the loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.algorithms.policy_losses.policy_loss import (
    LOSS_AGG_MODES,
    BatchCounts,
    agg_loss,
    batch_counts,
)

LOSS = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [64.0, 0, 0]], dtype=torch.float64)
MASK = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 0, 0]])
BY_HAND = {
    "token-mean": 61 / 5,
    "token-sum": 61,
    "seq-mean-token-sum": (5 + 56) / 2,
    "seq-mean-token-mean": (5 / 2 + 56 / 3) / 2,
    "seq-mean-token-sum-norm": (5 + 56) / 2 / 3,
}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_modes_by_hand_with_an_empty_row(mode):
    assert agg_loss(LOSS, MASK, mode).item() == pytest.approx(BY_HAND[mode])


def test_the_norm_divides_by_batch_and_by_the_configured_length():
    mode = "seq-mean-token-sum-norm"
    assert agg_loss(LOSS, MASK, mode, loss_scale_factor=10).item() == pytest.approx(61 / 2 / 10)
    with batch_counts(BatchCounts(5, 2, width=4)):
        assert agg_loss(LOSS, MASK, mode).item() == pytest.approx(61 / 2 / 4)
        assert agg_loss(LOSS, MASK, mode, loss_scale_factor=10).item() == pytest.approx(61 / 20)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_explicit_counts_override_the_context_and_the_context_overrides_the_mask(mode):
    def parts(tokens, rows):
        return {
            "token-mean": 61 / tokens,
            "token-sum": 61,
            "seq-mean-token-sum": 61 / rows,
            "seq-mean-token-mean": (5 / 2 + 56 / 3) / rows,
            "seq-mean-token-sum-norm": 61 / rows / 3,
        }[mode]

    explicit = {"batch_num_tokens": 100, "global_batch_size": 50}
    with batch_counts(BatchCounts(tokens=10, sequences=7)):
        assert agg_loss(LOSS, MASK, mode).item() == pytest.approx(parts(10, 7))
        assert agg_loss(LOSS, MASK, mode, **explicit).item() == pytest.approx(parts(100, 50))
    assert agg_loss(LOSS, MASK, mode).item() == pytest.approx(BY_HAND[mode])


def test_counts_nest_and_are_reset_after_an_error():
    with batch_counts(BatchCounts(1, 1)):
        with pytest.raises(ValueError, match="unknown"), batch_counts(BatchCounts(2, 2)):
            agg_loss(LOSS, MASK, "no such mode")
        outer = agg_loss(LOSS, MASK, "token-mean")
        with batch_counts(BatchCounts(2, 2)):
            assert agg_loss(LOSS, MASK, "token-mean").item() == pytest.approx(outer.item() / 2)
        assert agg_loss(LOSS, MASK, "token-mean").item() == outer.item()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_dp_size_compensates_an_average_over_ranks(mode):
    counts = {"batch_num_tokens": 5, "global_batch_size": 2}
    one = agg_loss(LOSS, MASK, mode, **counts)
    assert agg_loss(LOSS, MASK, mode, dp_size=4, **counts).item() == pytest.approx(4 * one.item())
    tensors = {key: torch.tensor(float(value)) for key, value in counts.items()}
    assert agg_loss(LOSS, MASK, mode, **tensors).item() == pytest.approx(one.item())


@pytest.mark.parametrize("mode", sorted(set(LOSS_AGG_MODES) - {"token-sum"}))
def test_dp_size_without_counts_is_refused(mode):
    with pytest.raises(ValueError, match="dp_size=2 but no"):
        agg_loss(LOSS, MASK, mode, dp_size=2)
    with batch_counts(BatchCounts.from_mask(MASK)):
        assert agg_loss(LOSS, MASK, mode, dp_size=2).item() == pytest.approx(2 * BY_HAND[mode])


def test_an_unknown_mode_names_the_known_ones():
    with pytest.raises(ValueError, match="token-mean, token-sum, seq-mean-token-sum"):
        agg_loss(LOSS, MASK, "mean")


def test_counts_of_a_mask():
    assert BatchCounts.from_mask(MASK, width=9) == BatchCounts(tokens=5, sequences=2, width=9)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_an_empty_mask_gives_zero_and_no_nan_gradient(mode):
    loss = torch.full((2, 2), math.nan, requires_grad=True)
    total = agg_loss(loss, torch.zeros(2, 2), mode)
    total.backward()
    assert total.item() == 0
    assert (loss.grad == 0).all()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.integers(1, 8), st.integers(1, 5), st.integers(0, 999), st.sampled_from(LOSS_AGG_MODES),
    st.integers(1, 8),
)  # fmt: skip
def test_shares_of_any_split_sum_to_the_loss(rows, width, seed, mode, size):
    random = np.random.default_rng(seed)
    mask = torch.from_numpy(random.uniform(size=(rows, width)) < 0.6)
    loss = torch.from_numpy(np.where(mask, random.normal(size=(rows, width)), np.nan))
    whole = agg_loss(loss, mask, mode).item()
    with batch_counts(BatchCounts.from_mask(mask)):
        shares = [
            agg_loss(loss[i : i + size], mask[i : i + size], mode).item()
            for i in range(0, rows, size)
        ]
    assert math.fsum(shares) == pytest.approx(whole, rel=1e-12, abs=1e-12)


def test_a_mask_without_columns_gives_zero_and_a_divisor_of_zero_is_refused():
    mode = "seq-mean-token-sum-norm"
    assert agg_loss(torch.zeros(2, 0), torch.zeros(2, 0), mode).item() == 0
    for width in (0.0, -1.0):
        with pytest.raises(ValueError, match=f"loss_scale_factor={width} divides"):
            agg_loss(torch.ones(1, 1), torch.ones(1, 1), mode, loss_scale_factor=width)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_mask_of_weights_is_refused_not_rounded(mode):
    with pytest.raises(ValueError, match="other than 0 and 1"):
        agg_loss(torch.ones(1, 2), torch.tensor([[1.0, 0.5]]), mode)
    assert agg_loss(torch.ones(1, 2), torch.tensor([[1.0, 0.0]]), mode).item() > 0
