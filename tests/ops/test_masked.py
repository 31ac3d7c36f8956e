"""Masked statistics against numpy on the unmasked entries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.ops.masked import (
    count_unmasked,
    last_true_index,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    split_at_response,
    zero_outside_mask,
)


@st.composite
def masked(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    cells = rows * width
    values = draw(st.lists(st.floats(-9, 9), min_size=cells, max_size=cells))
    mask = draw(st.lists(st.booleans(), min_size=cells, max_size=cells))
    x, m = np.reshape(values, (rows, width)), np.reshape(mask, (rows, width))
    return torch.from_numpy(np.where(m, x, np.nan)), torch.from_numpy(m)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(masked())
def test_equal_numpy_on_the_kept_entries(data):
    x, mask = data
    kept = x[mask].numpy()
    assert count_unmasked(mask).item() == len(kept)
    assert masked_sum(x, mask).item() == pytest.approx(kept.sum(), abs=1e-12)
    assert masked_mean(x, mask).item() == pytest.approx(kept.mean() if len(kept) else 0, abs=1e-12)
    variance = kept.var(ddof=1) if len(kept) > 1 else 0
    assert masked_var(x, mask).item() == pytest.approx(variance, abs=1e-12)
    biased = kept.var() if len(kept) > 1 else 0
    assert masked_var(x, mask, unbiased=False).item() == pytest.approx(biased, abs=1e-12)
    for row in range(len(x)):
        mine = x[row][mask[row]].numpy()
        assert masked_sum(x, mask, -1)[row].item() == pytest.approx(mine.sum(), abs=1e-12)
        mean = mine.mean() if len(mine) else 0
        assert masked_mean(x, mask, -1)[row].item() == pytest.approx(mean, abs=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(masked())
def test_whitening_equals_numpy_and_is_zero_outside(data):
    x, mask = data
    white = masked_whiten(x, mask)
    assert (white[~mask] == 0).all()
    kept = x[mask].numpy()
    if len(kept):
        std = np.sqrt((kept.var(ddof=1) if len(kept) > 1 else 0) + 1e-8)
        expected = (kept - kept.mean()) / std
        np.testing.assert_allclose(white[mask], expected, atol=1e-9)
        shifted = masked_whiten(x, mask, shift_mean=False)
        np.testing.assert_allclose(shifted[mask], expected + kept.mean(), atol=1e-9)
        assert (shifted[~mask] == 0).all()


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_neither_value_nor_gradient_sees_what_is_outside(junk):
    x = torch.tensor([[1.0, junk], [3.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[1, 0], [1, 1]])
    total = masked_mean(x, mask) + masked_whiten(x, mask).pow(3).sum()
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(x.grad).all()
    assert x.grad[0, 1] == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.uint8])
def test_any_mask_dtype_reads_as_a_boolean(dtype):
    x = torch.tensor([[1.0, 2.0, 4.0]])
    mask = torch.tensor([[1, 0, 1]], dtype=dtype)
    assert masked_sum(x, mask).item() == 5
    assert masked_mean(x, mask).item() == 2.5
    assert count_unmasked(mask, -1).tolist() == [2]
    assert zero_outside_mask(x, mask).tolist() == [[1, 0, 4]]


def test_integers_stay_integers():
    assert zero_outside_mask(torch.tensor([1, 2]), torch.tensor([1, 0])).dtype == torch.int64


def test_a_mask_may_be_narrower_and_broadcast():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert masked_mean(x, torch.tensor([[1], [0]])).item() == 1.5


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_the_last_true_column_of_a_row_is_found_and_minus_one_where_there_is_none(
    dtype: torch.dtype,
) -> None:
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 1]]).to(dtype)
    assert last_true_index(mask).tolist() == [2, -1, 0, 3]


def test_a_mask_is_split_where_the_response_begins() -> None:
    mask = torch.arange(10).reshape(2, 5)
    prompt, response = split_at_response(mask, torch.zeros(2, 2))
    assert prompt.tolist() == [[0, 1, 2], [5, 6, 7]]
    assert response.tolist() == [[3, 4], [8, 9]]


def test_whitening_is_over_policy_tokens_and_zero_elsewhere():
    advantages = torch.tensor([[1.0, 3.0, torch.nan]])
    white = masked_whiten(advantages, torch.tensor([[1, 1, 0]]))
    np.testing.assert_allclose(white, [[-np.sqrt(0.5), np.sqrt(0.5), 0]], rtol=1e-6)
