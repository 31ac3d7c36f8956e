"""Packed segments, soft caps and sinks against float64 references; the kernel of a package, or torch's."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hone.ops import attention
from hone.ops.attention import (
    AttentionOptions,
    SegmentLayout,
    VarlenIndices,
    padded_attention,
    varlen_attention,
)

HEADS, WIDTH, SCALING = 3, 8, 0.7
KINDS = [(2.0, False), (None, True), (1.5, True)]


def naive(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """The reference: one query head at a time over keys [M, H, D]; `visible` is [L, M]."""
    out = torch.zeros_like(q)
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h].T * SCALING
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weight = scores.exp() * visible
        total = weight.sum(1, keepdim=True) + (0 if sinks is None else sinks[h].exp())
        out[:, h] = weight / total @ v[:, h]
    return out


def draw(tokens: int, with_sinks: bool) -> tuple[Tensor, ...]:
    sinks = (torch.randn(HEADS).requires_grad_(),) if with_sinks else ()
    return *(torch.randn(tokens, HEADS, WIDTH).requires_grad_() for _ in "qkv"), *sinks


@pytest.mark.parametrize(("softcap", "with_sinks"), KINDS)
@pytest.mark.parametrize("window", [None, 3])
def test_values_and_gradients_over_packed_segments(
    softcap: float | None, with_sinks: bool, window: int | None
) -> None:
    """Two prompts, one with two responses: a response attends to its prompt and itself."""
    layout = SegmentLayout([4, 2], [(0, 3), (0, 5)])
    position = torch.tensor([0, 1, 2, 3, 0, 1, 4, 5, 6, 4, 5, 6, 7, 8])
    root = torch.tensor([0] * 4 + [1] * 2 + [0] * 8)
    segment = torch.tensor([0] * 4 + [1] * 2 + [2] * 3 + [3] * 5)
    distance = position[:, None] - position
    visible = (
        (root[:, None] == root) & ((segment[:, None] == segment) | (segment < 2)) & (distance >= 0)
    )
    if window is not None:
        visible &= distance < window
    inputs = draw(14, with_sinks)
    sinks = inputs[3] if with_sinks else None
    out = layout.attend(*inputs[:3], AttentionOptions(0, SCALING, window, softcap, sinks))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = naive(*exact[:3], visible, softcap, exact[3] if with_sinks else None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, direction)
    for actual, right in zip(
        grads, torch.autograd.grad(expected, exact, direction.double()), strict=True
    ):
        torch.testing.assert_close(actual.double(), right, rtol=1e-4, atol=1e-5)


def test_padded_attention_without_a_bias_is_causal() -> None:
    q, k, v = (x.detach() for x in draw(6, False))
    padded = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = padded_attention(*padded, None, AttentionOptions(0, SCALING, softcap=2.0))
    expected = naive(q, k, v, torch.ones(6, 6).tril(), 2.0, None)
    torch.testing.assert_close(out[0].transpose(0, 1), expected, rtol=1e-5, atol=1e-5)


LENGTHS = [5, 9]


@pytest.fixture(autouse=True)
def fresh_kernel_choice() -> Iterator[None]:
    attention._package_kernel.cache_clear()
    yield
    attention._package_kernel.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, name: str, capability: int = 9) -> list[str]:
    """A package with flash-attn's names whose kernel is plain torch."""
    used: list[str] = []

    def kernel(
        q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
        max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: Any = (-1, -1),
    ) -> Any:  # fmt: skip
        assert causal
        assert (max_seqlen_q, max_seqlen_k) == (9, 9)
        used.append(name)
        pieces = zip(*(x.split(cu_seqlens_q.diff().tolist()) for x in (q, k, v)), strict=True)
        return torch.cat([dense(*piece, softmax_scale, window_size[0]) for piece in pieces])

    module = ModuleType(name)
    module.flash_attn_varlen_func = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
    return used


def dense(q: Any, k: Any, v: Any, scaling: float, left: int) -> torch.Tensor:
    position = torch.arange(len(q))
    visible = position[:, None] >= position
    if left >= 0:
        visible &= position[:, None] - position <= left
    return F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        attn_mask=visible, scale=scaling, enable_gqa=True,
    )[0].transpose(0, 1)  # fmt: skip


def attend(window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(sum(LENGTHS), 4, 8)
    k, v = torch.randn(2, sum(LENGTHS), 2, 8)
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    left = -1 if window is None else window - 1
    pieces = zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)
    expected = torch.cat([dense(*piece, 0.3, left) for piece in pieces])
    return varlen_attention(q, k, v, cu, cu, 9, 9, scaling=0.3, window=window), expected


@pytest.mark.parametrize("name", ["flash_attn_interface", "flash_attn"])
@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_of_an_installed_package_is_used(
    monkeypatch: pytest.MonkeyPatch, name: str, window: int | None
) -> None:
    used = install(monkeypatch, name)
    actual, expected = attend(window)
    assert used == [name]
    torch.testing.assert_close(actual, expected)


def test_a_package_for_newer_gpus_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = install(monkeypatch, "flash_attn_interface", capability=8)
    older = install(monkeypatch, "flash_attn", capability=8)
    attend()
    assert (newer, older) == ([], ["flash_attn"])


def test_a_package_that_does_not_load_is_logged_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    used = install(monkeypatch, "flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("empty"))
    with caplog.at_level(logging.WARNING):
        attend()
    assert used == ["flash_attn"]
    assert "flash_attn_interface is installed but cannot be used here" in caplog.text


def test_without_a_package_the_kernel_of_torch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for name, _ in attention._PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    assert attention._package_kernel() is None


QUERY_HEADS, KV_HEADS = 4, 2


def tokens_of(roots, children):
    """Returns, per packed token, the packed positions that it attends to, nearest last."""
    starts = [sum(roots[:i]) for i in range(len(roots))]
    visible = []
    for start, length in zip(starts, roots, strict=True):
        visible += [list(range(start, start + i + 1)) for i in range(length)]
    start = sum(roots)
    for parent, length in children:
        prompt = list(range(starts[parent], starts[parent] + roots[parent]))
        visible += [prompt + list(range(start, start + i + 1)) for i in range(length)]
        start += length
    return visible


def slow_segments(q, k, v, visible, window):
    rows = []
    for i, positions in enumerate(visible):
        near = positions if window is None else positions[-window:]
        heads = []
        for h in range(QUERY_HEADS):
            g = h * KV_HEADS // QUERY_HEADS
            weights = torch.softmax(k[near, g] @ q[i, h] / math.sqrt(WIDTH), 0)
            heads.append(weights @ v[near, g])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def draw_heads(tokens, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, n, WIDTH, generator=random, dtype=torch.float64, requires_grad=True)
        for n in (QUERY_HEADS, KV_HEADS, KV_HEADS)
    ]


def check_segments(roots, children, window):
    layout = SegmentLayout(roots, children)
    visible = tokens_of(roots, children)
    ours, theirs = draw_heads(len(visible)), draw_heads(len(visible))
    out = layout.attend(*ours, AttentionOptions(0, WIDTH**-0.5, window))
    expected = slow_segments(*theirs, visible, window)
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
    check_segments(roots, children, window)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    roots=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    kids=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=5),
    window=st.none() | st.integers(1, 6),
)
def test_any_layout_equals_the_slow_reference(roots, kids, window):
    check_segments(roots, [(p % len(roots), n) for p, n in kids], window)


def test_one_layout_serves_layers_with_different_windows():
    roots, children = [4, 2], [(0, 3), (1, 2)]
    layout = SegmentLayout(roots, children)
    visible = tokens_of(roots, children)
    q, k, v = draw_heads(len(visible))
    for window in (2, None, 3, 2):
        out = layout.attend(q, k, v, AttentionOptions(0, WIDTH**-0.5, window))
        torch.testing.assert_close(
            out, slow_segments(q, k, v, visible, window), rtol=1e-10, atol=1e-12
        )


def test_no_gradient_crosses_from_one_row_to_another():
    layout = SegmentLayout([3, 4], [(0, 2), (1, 3)])
    q, k, v = draw_heads(12)
    out = layout.attend(q, k, v, AttentionOptions(0, 1.0))
    out[7:9].sum().backward()  # the first root's child
    for x in (q, k, v):
        assert (x.grad[3:7] == 0).all()
        assert (x.grad[9:] == 0).all()
    assert (k.grad[:3] != 0).any()


CPU = torch.device("cpu")


def test_each_response_attends_to_its_prompt_and_itself() -> None:
    keys = VarlenIndices.build([2, 3], [(1, 2), (0, 1), (1, 0)], CPU)
    assert keys.cu_queries.tolist() == [0, 2, 5, 7, 8]
    assert keys.cu_keys.tolist() == [0, 2, 5, 10, 13]
    assert (keys.max_queries, keys.max_keys) == (3, 5)
    k = torch.arange(8.0).view(8, 1, 1)
    repeated, _ = keys.repeat(k, k)
    assert repeated.flatten().tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 0, 1, 7]


def test_without_children_keys_are_not_copied() -> None:
    keys = VarlenIndices.build([2, 3], [(0, 0)], CPU)
    k = torch.randn(5, 2, 4)
    repeated = keys.repeat(k, k)
    assert repeated[0] is k
    assert repeated[1] is k


def test_a_gradient_is_the_sum_over_all_copies() -> None:
    keys = VarlenIndices.build([2, 3], [(1, 2), (0, 1), (1, 4)], CPU)
    k, v = torch.randn(2, 12, 2, 4, dtype=torch.float64)
    mine = [x.clone().requires_grad_() for x in (k, v)]
    plain = [x.clone().requires_grad_() for x in (k, v)]
    repeated = keys.repeat(*mine)
    output_gradient = torch.randn(2, *repeated[0].shape, dtype=torch.float64)
    assert keys.source is not None
    for ours, theirs, g in zip(repeated, plain, output_gradient, strict=True):
        ours.backward(g, retain_graph=True)
        theirs[keys.source.long()].backward(g)
    for ours, theirs in zip(mine, plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_copies_are_listed_by_token() -> None:
    keys = VarlenIndices.build([2], [(0, 1), (0, 2)], CPU)
    assert keys.source is not None
    assert keys.key_order is not None
    assert keys.token_offsets is not None
    for token in range(5):
        key_order = keys.key_order[keys.token_offsets[token] : keys.token_offsets[token + 1]]
        assert key_order.tolist() == (keys.source == token).nonzero().flatten().tolist()
