"""Attention over packed segments, against a float64 reference with one query at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.ops.attention import AttentionOptions
from hone.ops.segments import SegmentLayout

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def tokens_of(roots, children):
    """Returns, per packed token, the packed positions that it attends to, nearest last."""
    starts = [sum(roots[:i]) for i in range(len(roots))]
    visible = []
    for start, length in zip(starts, roots, strict=True):
        visible += [list(range(start, start + i + 1)) for i in range(length)]
    at = sum(roots)
    for parent, length in children:
        prompt = list(range(starts[parent], starts[parent] + roots[parent]))
        visible += [prompt + list(range(at, at + i + 1)) for i in range(length)]
        at += length
    return visible


def slow(q, k, v, visible, window):
    rows = []
    for i, positions in enumerate(visible):
        near = positions if window is None else positions[-window:]
        heads = []
        for h in range(HEADS):
            g = h * KV_HEADS // HEADS
            weights = torch.softmax(k[near, g] @ q[i, h] / math.sqrt(WIDTH), 0)
            heads.append(weights @ v[near, g])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def draw(tokens, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, n, WIDTH, generator=random, dtype=torch.float64, requires_grad=True)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    ]


def check(roots, children, window):
    layout = SegmentLayout(roots, children)
    visible = tokens_of(roots, children)
    ours, theirs = draw(len(visible)), draw(len(visible))
    out = layout.attend(*ours, AttentionOptions(0, WIDTH**-0.5, window))
    expected = slow(*theirs, visible, window)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn(
        out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, slow_one in zip(ours, theirs, strict=True):
        assert torch.isfinite(mine.grad).all()
        torch.testing.assert_close(mine.grad, slow_one.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 50])
@pytest.mark.parametrize(
    ("roots", "children"),
    [
        ([3, 3], []),
        ([1, 5, 2], []),
        ([4], [(0, 3), (0, 3)]),
        ([4, 2], [(0, 3), (1, 1), (0, 5), (1, 0)]),
        ([2, 3], [(1, 0), (0, 0)]),
        ([1], [(0, 1)]),
    ],
)
def test_attention_and_gradient_equal_the_slow_reference(roots, children, window):
    check(roots, children, window)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    roots=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    kids=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=5),
    window=st.none() | st.integers(1, 6),
)
def test_any_layout_equals_the_slow_reference(roots, kids, window):
    check(roots, [(p % len(roots), n) for p, n in kids], window)


def test_one_layout_serves_layers_with_different_windows():
    roots, children = [4, 2], [(0, 3), (1, 2)]
    layout = SegmentLayout(roots, children)
    visible = tokens_of(roots, children)
    q, k, v = draw(len(visible))
    for window in (2, None, 3, 2):
        out = layout.attend(q, k, v, AttentionOptions(0, WIDTH**-0.5, window))
        torch.testing.assert_close(out, slow(q, k, v, visible, window), rtol=1e-10, atol=1e-12)


def test_no_gradient_crosses_from_one_row_to_another():
    layout = SegmentLayout([3, 4], [(0, 2), (1, 3)])
    q, k, v = draw(12)
    out = layout.attend(q, k, v, AttentionOptions(0, 1.0))
    out[7:9].sum().backward()  # the first root's child
    for x in (q, k, v):
        assert (x.grad[3:7] == 0).all()
        assert (x.grad[9:] == 0).all()
    assert (k.grad[:3] != 0).any()
