"""Group statistics against a dictionary and numpy."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.ops.groups import Groups, factorise, factorise_pairs

labels = st.sampled_from(["a", "b", 1, 2, "1", ("x", 2), None, 3.5])
members = st.lists(st.tuples(labels, st.floats(-100, 100)), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(members)
def test_statistics_equal_numpy_a_group_at_a_time(pairs):
    names = [name for name, _ in pairs]
    x = torch.tensor([value for _, value in pairs], dtype=torch.float64)
    groups = Groups.of(names)
    by_name = defaultdict(list)
    for name, value in pairs:
        by_name[name].append(value)
    assert groups.count == len(by_name)
    for i, (name, _) in enumerate(pairs):
        mine = np.array(by_name[name])
        g = groups.ids[i]
        assert groups.sizes[g] == len(mine)
        assert groups.is_singleton[i] == (len(mine) == 1)
        assert groups.sum(x)[g].item() == pytest.approx(mine.sum(), abs=1e-9)
        assert groups.mean(x)[g].item() == pytest.approx(mine.mean(), abs=1e-9)
        assert groups.max(x)[g].item() == mine.max()
        assert groups.min(x)[g].item() == mine.min()
        spread = mine.std(ddof=1) if len(mine) > 1 else 0
        assert groups.std(x)[g].item() == pytest.approx(spread, abs=1e-9)


def test_labels_are_equal_only_where_python_says_so():
    assert factorise(["1", 1, "a", "1"]).tolist() == [0, 1, 2, 0]
    assert len(set(factorise(np.array(["x", "y", "x"], dtype=object)))) == 2


def test_pairs_are_equal_only_where_both_parts_are():
    a, b = np.array([0, 2, 0, 1, 2, 0]), np.array([1, 0, 1, 0, 0, 2])
    ids, first = factorise_pairs(a, b)
    assert ids[0] == ids[2]
    assert ids[1] == ids[4]
    assert len(set(ids.tolist())) == len(first) == 4
    assert [(a[row], b[row]) for row in first[ids]] == list(zip(a, b, strict=True))
    assert factorise_pairs(a[:0], b[:0])[0].tolist() == []


@pytest.mark.parametrize("as_labels", [np.array, torch.tensor, list])
def test_numbers_in_any_container(as_labels):
    ids = factorise(as_labels([7, -1, 7, 3]))
    assert ids.dtype == np.int64
    assert ids[0] == ids[2]
    assert len(set(ids.tolist())) == 3


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-30, 12345.678])
@pytest.mark.parametrize("size", [3, 7, 10])
def test_equal_members_deviate_by_exactly_nothing(value, size):
    groups = Groups.of(["g"] * size)
    x = torch.full((size,), value)
    assert (x.double() - groups.mean(x)[groups.ids] == 0).all()
    assert groups.std(x)[0] == 0


def test_a_weighted_mean_and_its_empty_case():
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
