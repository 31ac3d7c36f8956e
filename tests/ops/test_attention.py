"""Attention with soft caps and sinks, against a float64 reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hone.ops.attention import AttentionOptions, padded_attention
from hone.ops.segments import SegmentLayout

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
    for got, right in zip(
        grads, torch.autograd.grad(expected, exact, direction.double()), strict=True
    ):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-5)


def test_without_a_bias_it_is_causal() -> None:
    q, k, v = (x.detach() for x in draw(6, False))
    padded = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = padded_attention(*padded, None, AttentionOptions(0, SCALING, softcap=2.0))
    expected = naive(q, k, v, torch.ones(6, 6).tril(), 2.0, None)
    torch.testing.assert_close(out[0].transpose(0, 1), expected, rtol=1e-5, atol=1e-5)
