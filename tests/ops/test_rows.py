"""Rows: masked statistics and groups against numpy; micro-batches; packed rows and unpacking."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.ops.rows import (
    Groups,
    MicroBatchRule,
    count_unmasked,
    factorise,
    factorise_pairs,
    last_true_index,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    pack_rows,
    shared_prompt_lengths,
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
def test_masked_statistics_equal_numpy_on_the_unmasked_entries(data):
    x, mask = data
    unmasked = x[mask].numpy()
    assert count_unmasked(mask).item() == len(unmasked)
    assert masked_sum(x, mask).item() == pytest.approx(unmasked.sum(), abs=1e-12)
    assert masked_mean(x, mask).item() == pytest.approx(
        unmasked.mean() if len(unmasked) else 0, abs=1e-12
    )
    variance = unmasked.var(ddof=1) if len(unmasked) > 1 else 0
    assert masked_var(x, mask).item() == pytest.approx(variance, abs=1e-12)
    biased = unmasked.var() if len(unmasked) > 1 else 0
    assert masked_var(x, mask, unbiased=False).item() == pytest.approx(biased, abs=1e-12)
    for row in range(len(x)):
        row_values = x[row][mask[row]].numpy()
        assert masked_sum(x, mask, -1)[row].item() == pytest.approx(row_values.sum(), abs=1e-12)
        mean = row_values.mean() if len(row_values) else 0
        assert masked_mean(x, mask, -1)[row].item() == pytest.approx(mean, abs=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(masked())
def test_whitening_equals_numpy_and_is_zero_outside(data):
    x, mask = data
    white = masked_whiten(x, mask)
    assert (white[~mask] == 0).all()
    unmasked = x[mask].numpy()
    if len(unmasked):
        std = np.sqrt((unmasked.var(ddof=1) if len(unmasked) > 1 else 0) + 1e-8)
        expected = (unmasked - unmasked.mean()) / std
        np.testing.assert_allclose(white[mask], expected, atol=1e-9)
        shifted = masked_whiten(x, mask, shift_mean=False)
        np.testing.assert_allclose(shifted[mask], expected + unmasked.mean(), atol=1e-9)
        assert (shifted[~mask] == 0).all()


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_masked_entries_change_neither_values_nor_gradients(junk):
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


def test_masked_integers_stay_integers():
    assert zero_outside_mask(torch.tensor([1, 2]), torch.tensor([1, 0])).dtype == torch.int64


def test_a_mask_may_be_narrower_and_broadcast():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert masked_mean(x, torch.tensor([[1], [0]])).item() == 1.5


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_the_last_true_index_of_a_row_is_minus_one_if_all_are_false(
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


labels = st.sampled_from(["a", "b", 1, 2, "1", ("x", 2), None, 3.5])
members = st.lists(st.tuples(labels, st.floats(-100, 100)), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(members)
def test_statistics_of_groups_equal_numpy(pairs):
    names = [name for name, _ in pairs]
    x = torch.tensor([value for _, value in pairs], dtype=torch.float64)
    groups = Groups.of(names)
    by_name = defaultdict(list)
    for name, value in pairs:
        by_name[name].append(value)
    assert groups.count == len(by_name)
    for i, (name, _) in enumerate(pairs):
        group_values = np.array(by_name[name])
        g = groups.ids[i]
        assert groups.sizes[g] == len(group_values)
        assert groups.is_singleton[i] == (len(group_values) == 1)
        assert groups.sum(x)[g].item() == pytest.approx(group_values.sum(), abs=1e-9)
        assert groups.mean(x)[g].item() == pytest.approx(group_values.mean(), abs=1e-9)
        assert groups.max(x)[g].item() == group_values.max()
        assert groups.min(x)[g].item() == group_values.min()
        spread = group_values.std(ddof=1) if len(group_values) > 1 else 0
        assert groups.std(x)[g].item() == pytest.approx(spread, abs=1e-9)


def test_labels_are_equal_as_in_python():
    assert factorise(["1", 1, "a", "1"]).tolist() == [0, 1, 2, 0]
    assert len(set(factorise(np.array(["x", "y", "x"], dtype=object)))) == 2


def test_pairs_are_equal_only_if_both_elements_are_equal():
    a, b = np.array([0, 2, 0, 1, 2, 0]), np.array([1, 0, 1, 0, 0, 2])
    ids, first = factorise_pairs(a, b)
    assert ids[0] == ids[2]
    assert ids[1] == ids[4]
    assert len(set(ids.tolist())) == len(first) == 4
    assert [(a[row], b[row]) for row in first[ids]] == list(zip(a, b, strict=True))
    assert factorise_pairs(a[:0], b[:0])[0].tolist() == []


@pytest.mark.parametrize("as_labels", [np.array, torch.tensor, list])
def test_numeric_labels_may_be_in_any_container(as_labels):
    ids = factorise(as_labels([7, -1, 7, 3]))
    assert ids.dtype == np.int64
    assert ids[0] == ids[2]
    assert len(set(ids.tolist())) == 3


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-30, 12345.678])
@pytest.mark.parametrize("size", [3, 7, 10])
def test_equal_values_of_a_group_have_deviation_0(value, size):
    groups = Groups.of(["g"] * size)
    x = torch.full((size,), value)
    assert (x.double() - groups.mean(x)[groups.ids] == 0).all()
    assert groups.std(x)[0] == 0


def test_a_weighted_mean_without_weight_is_the_maximum():
    groups = Groups.of(["a", "a", "b"])
    x = torch.tensor([1.0, 4.0, 9.0])
    mean = groups.mean(x, torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64))
    assert mean[groups.ids].tolist() == [2, 2, 9]


def test_sums_of_matrices_add_rows():
    groups = Groups.of(["a", "b", "a"])
    total = groups.sum(torch.tensor([[1.0, 2], [3, 4], [5, 6]]))
    assert total[groups.ids[0]].tolist() == [6, 8]


def test_an_empty_batch_has_no_groups():
    assert Groups.of([]).count == 0


PAD = 0


def padded(rows, prompt_width=None, response_width=None):
    """Returns the four tensors of `pack_rows` for [(prompt, response, mask)]."""
    width = prompt_width or max(len(p) for p, _, _ in rows)
    length = response_width or max(len(r) for _, r, _ in rows)
    prompts = torch.full((len(rows), width), PAD)
    responses = torch.full((len(rows), length), PAD)
    attention = torch.zeros(len(rows), width + length, dtype=torch.int64)
    mask = torch.zeros(len(rows), length, dtype=torch.int64)
    for i, (prompt, response, row_mask) in enumerate(rows):
        prompts[i, width - len(prompt) :] = torch.tensor(prompt)
        responses[i, : len(response)] = torch.tensor(response, dtype=torch.int64)
        attention[i, width - len(prompt) : width + len(response)] = 1
        mask[i, : len(response)] = torch.tensor(row_mask, dtype=torch.int64)
    return prompts, responses, attention, mask


ROWS = [
    ([1, 2, 3], [10, 11, 12], [1, 1, 1]),
    ([1, 2, 3], [20, 21], [1, 1]),
    ([4], [30, 31, 32, 33], [1, 0, 0, 1]),
]


def test_a_shared_prompt_is_packed_once_and_last_tokens_are_not_packed():
    packed = pack_rows(*padded(ROWS), share_prompts=True)
    assert packed.input_ids.tolist() == [1, 2, 3, 4, 10, 11, 20, 30, 31, 32]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 3, 4, 3, 1, 2, 3]


def test_whole_rows_follow_each_other():
    packed = pack_rows(*padded(ROWS), share_prompts=False)
    assert packed.input_ids.tolist() == [1, 2, 3, 10, 11, 1, 2, 3, 20, 4, 30, 31, 32]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("share", [False, True])
def test_only_tokens_the_policy_wrote_are_targets(share):
    packed = pack_rows(*padded(ROWS), share_prompts=share)
    assert packed.target.tolist() == [10, 11, 12, 20, 21, 30, 33]
    predecessors = packed.input_ids[packed.predicting_position].tolist()
    assert predecessors == [3, 10, 11, 3, 20, 4, 32]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), share=st.booleans())
def test_every_target_is_predicted_by_the_token_before_it_at_its_position(data, share):
    """With unique token ids, the original rows can be read from the pack."""
    count = data.draw(st.integers(1, 5))
    fresh = iter(range(1, 1000))
    prompts = [[next(fresh) for _ in range(data.draw(st.integers(1, 4)))] for _ in range(2)]
    rows = []
    for _ in range(count):
        length = data.draw(st.integers(0, 5))
        mask = data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
        prompt = prompts[data.draw(st.integers(0, 1))]
        rows.append((prompt, [next(fresh) for _ in range(length)], mask))
    extra = data.draw(st.integers(0, 2))
    widest = max(1, max(len(r) for _, r, _ in rows)) + extra
    tensors = padded(rows, max(len(p) for p, _, _ in rows) + extra, widest)
    packed = pack_rows(*tensors, share_prompts=share)
    expected = [
        (i, c, response[c], ([*prompt, *response])[len(prompt) + c - 1], len(prompt) + c - 1)
        for i, (prompt, response, mask) in enumerate(rows)
        for c in range(len(response))
        if mask[c]
    ]
    actual = zip(
        packed.row.tolist(),
        packed.response_position.tolist(),
        packed.target.tolist(),
        packed.input_ids[packed.predicting_position].tolist(),
        packed.position_ids[packed.predicting_position].tolist(),
        strict=True,
    )
    assert list(actual) == expected
    distinct = {tuple(p) for p, _, _ in rows} if share else [p for p, _, _ in rows]
    assert len(packed.input_ids) == sum(map(len, distinct)) + sum(
        max(len(r) - 1, 0) for _, r, _ in rows
    )


def test_unpack_puts_values_back_and_leaves_zero_elsewhere():
    packed = pack_rows(*padded(ROWS, response_width=6), share_prompts=True)
    values = torch.arange(1.0, 8.0, requires_grad=True)
    out = packed.unpack(values)
    assert out.tolist() == [
        [1, 2, 3, 0, 0, 0],
        [4, 5, 0, 0, 0, 0],
        [6, 0, 0, 7, 0, 0],
    ]
    (out * torch.arange(18.0).view(3, 6)).sum().backward()
    assert values.grad.tolist() == [0, 1, 2, 6, 7, 12, 15]


def test_packed_positions_hold_the_place_of_each_token_that_is_packed():
    packed = pack_rows(*padded(ROWS, 5, 6), share_prompts=True, with_packed_positions=True)
    assert packed.packed_positions is not None
    (prompts, responses, *_), places = padded(ROWS, 5, 6), packed.packed_positions
    tokens = np.concatenate([prompts, responses], 1)
    is_packed = np.asarray(places) >= 0
    np.testing.assert_array_equal(
        np.asarray(packed.input_ids)[places[is_packed]], tokens[is_packed]
    )
    assert is_packed.sum(1).tolist() == [len(p) + max(len(r) - 1, 0) for p, r, _ in ROWS]


def test_padding_does_not_change_packed_rows():
    narrow = pack_rows(*padded(ROWS), share_prompts=True)
    wide = pack_rows(*padded(ROWS, 9, 11), share_prompts=True)
    for name in (
        "input_ids",
        "position_ids",
        "predicting_position",
        "target",
        "row",
        "response_position",
    ):
        np.testing.assert_array_equal(getattr(narrow, name), getattr(wide, name))


def test_an_empty_prompt_is_refused():
    prompts, responses, attention, mask = padded(ROWS)
    attention[1, :3] = 0
    with pytest.raises(ValueError, match="empty prompt"):
        pack_rows(prompts, responses, attention, mask, share_prompts=True)


def test_a_row_shares_its_prompt_with_an_equal_one_before_it() -> None:
    prompts = torch.tensor([[0, 5, 6], [0, 5, 6], [0, 5, 6], [4, 5, 6]])
    attention_mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]])
    assert shared_prompt_lengths(prompts, attention_mask) == [0, 2, 0, 0]


def test_an_empty_batch_shares_nothing() -> None:
    assert shared_prompt_lengths(torch.zeros(0, 3), torch.zeros(0, 5)) == []


def test_micro_batches_by_rows():
    assert MicroBatchRule(rows=3, tokens=1).split([9] * 7) == [[0, 1, 2], [3, 4, 5], [6]]


def test_micro_batches_by_tokens_are_filled_in_order():
    rule = MicroBatchRule(rows=None, tokens=10)
    assert rule.split([4, 6, 1, 10, 3, 3, 3, 3]) == [[0, 1], [2], [3], [4, 5, 6], [7]]


def test_the_error_of_a_row_beyond_the_budget_names_a_sufficient_budget():
    with pytest.raises(ValueError, match=r"11 tokens.*budget of 10.*at least 11"):
        MicroBatchRule(rows=None, tokens=10).split([3, 11])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 10), max_size=20),
    rows=st.none() | st.integers(1, 5),
    min_micro_batches=st.integers(1, 12),
)
def test_every_row_once_in_order_within_bounds_and_enough_parts(lengths, rows, min_micro_batches):
    parts = MicroBatchRule(rows=rows, tokens=12).split(
        lengths, [0] * len(lengths), min_micro_batches=min_micro_batches
    )
    assert [row for part in parts for row in part] == list(range(len(lengths)))
    assert len(parts) >= min_micro_batches
    for part in parts:
        assert len(part) <= (rows or len(lengths))
        assert rows is not None or sum(lengths[r] for r in part) <= 12


def test_the_largest_part_is_halved_until_there_are_enough():
    assert MicroBatchRule(rows=9, tokens=0).split([1] * 4, min_micro_batches=2) == [[0, 1], [2, 3]]


def test_a_rank_with_too_few_rows_gets_empty_parts():
    parts = MicroBatchRule(rows=2, tokens=0).split([5, 5], min_micro_batches=4)
    assert sorted(parts) == [[], [], [0], [1]]


def test_a_prompt_shared_with_the_row_before_is_counted_once_per_part() -> None:
    rule = MicroBatchRule(rows=None, tokens=12)
    # Prompts of 5: the second and third row cost 2 more each; the fourth begins a part and costs all.
    assert rule.split([7, 7, 7, 7, 7], [0, 5, 5, 5, 0]) == [[0, 1, 2], [3], [4]]


def test_pairs_stay_together_and_their_shared_prompt_is_counted_once() -> None:
    rule = MicroBatchRule(rows=None, tokens=20, rows_per_unit=2)
    lengths, shared = [7, 9, 5, 5, 8, 8], [0, 5, 0, 0, 0, 0]
    assert rule.split(lengths, shared) == [[0, 1], [2, 3], [4, 5]]
    assert rule.split(lengths[:4], shared[:4], min_micro_batches=2) == [[0, 1], [2, 3]]
    assert MicroBatchRule(rows=4, tokens=0, rows_per_unit=2).split([1] * 6) == [
        [0, 1, 2, 3],
        [4, 5],
    ]
    assert MicroBatchRule(rows=1, tokens=0, rows_per_unit=2).split([1] * 4) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="21 tokens"):
        rule.split([11, 10], [0, 0])
