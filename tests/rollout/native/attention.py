"""Attention of one sequence in float64, query by query: what every layout must compute."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hone.ops.attention import AttentionOptions

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SINKS = torch.tensor([0.3, -0.2, 1.5, 0.0])
OPTIONS: list[Any] = [
    pytest.param(AttentionOptions(0, 0.3), id="plain"),
    pytest.param(AttentionOptions(0, 0.3, window=3), id="window"),
    pytest.param(AttentionOptions(0, 0.3, softcap=2.0), id="softcap"),
    pytest.param(AttentionOptions(0, 0.3, window=4, sinks=SINKS), id="window-sinks"),
]


def qkv(tokens: int) -> tuple[Tensor, Tensor, Tensor]:  # [N, H, D], [N, KV, D], [N, KV, D]
    return (
        torch.randn(tokens, HEADS, HEAD_DIM),
        *(torch.randn(tokens, KV_HEADS, HEAD_DIM) for _ in "kv"),
    )


def reference(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Causal attention of the last `len(q)` tokens of a sequence with keys and values [M, KV, D]."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    first = len(k) - len(q)
    for i, heads in enumerate(q.double()):
        position = first + i
        begin = 0 if options.window is None else max(0, position - options.window + 1)
        for head, query in enumerate(heads):
            kv_head = head // (q.shape[1] // k.shape[1])
            scores = []
            for key in k[begin : position + 1, kv_head].double():
                score = float(query @ key) * options.scaling
                cap = options.softcap
                scores.append(score if cap is None else math.tanh(score / cap) * cap)
            weights = [math.exp(score) for score in scores]
            total = sum(weights)
            if options.sinks is not None:
                total += math.exp(options.sinks[head])
            values = v[begin : position + 1, kv_head].double()
            for weight, value in zip(weights, values, strict=True):
                out[i, head] += weight / total * value
    return out


def assert_close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
