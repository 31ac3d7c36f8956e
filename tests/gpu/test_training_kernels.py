"""The training kernels against plain torch: log-probs, entropies and gates, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hone.ops import logprobs, logprobs_fused
from hone.ops.varlen import varlen_attention

from .device import DEVICE, needs_gpu, needs_kernels, relative_error


@pytest.mark.parametrize("vocabulary", [100, 5000, 9001])
@pytest.mark.parametrize("read", ["log_probs", "entropy", "both"])
@pytest.mark.parametrize("chunk_bytes", [2**29, 2**10])
class TestLogProbs:
    pytestmark = needs_kernels

    def test_values_and_gradients_equal_the_plain_path(
        self, vocabulary: int, read: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logprobs_fused, "_CHUNK_BYTES", chunk_bytes)
        hidden = torch.randn(300, 48, device=DEVICE)
        weight = torch.randn(vocabulary, 48, device=DEVICE) * 0.3
        target = torch.randint(0, vocabulary, (300,), device=DEVICE)
        pull = torch.randn(2, 300, device=DEVICE)
        results = []
        for apply in (
            lambda h, w: logprobs_fused.FusedLinearLogProbs.apply(h, w, target, 1 / 0.7, True),
            lambda h, w: logprobs._LinearLogProbs.apply(h, w, None, target, 0.7, None, 1.0, True),
        ):
            h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            outs = apply(h, w)
            wanted = {"log_probs": [0], "entropy": [1], "both": [0, 1]}[read]
            sum((outs[i] * pull[i]).sum() for i in wanted).backward()
            results.append([outs[0], outs[1], h.grad, w.grad])
        for ours, plain in zip(*results, strict=True):
            assert relative_error(ours, plain) < 1e-4


class TestGate:
    pytestmark = needs_kernels

    def test_gate_and_gradients_equal_plain_torch(self) -> None:
        from hone.ops import gated_triton

        gate, up, g = torch.randn(3, 5, 1111, device=DEVICE)
        a, b = gate.clone().requires_grad_(), up.clone().requires_grad_()
        plain = F.silu(a) * b
        plain.backward(g)
        assert relative_error(gated_triton.silu_gate_forward(gate, up), plain) < 1e-5
        for ours, wanted in zip(
            gated_triton.silu_gate_backward(gate, up, g), (a.grad, b.grad), strict=True
        ):
            assert relative_error(ours, wanted) < 1e-5


@pytest.mark.parametrize("window", [None, 7])
class TestVarlen:
    pytestmark = needs_gpu

    def test_grouped_heads_and_gradients_equal_dense_attention(self, window: int | None) -> None:
        lengths = [5, 64, 33]
        q = torch.randn(sum(lengths), 14, 64, device=DEVICE)
        k, v = torch.randn(2, sum(lengths), 2, 64, device=DEVICE)
        pull = torch.randn_like(q)
        cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
        half = [x.bfloat16().requires_grad_() for x in (q, k, v)]
        out = varlen_attention(*half, cu, cu, 64, 64, scaling=0.125, window=window)
        out.backward(pull.bfloat16())
        full = [x.detach().float().requires_grad_() for x in half]
        pieces = zip(*(x.split(lengths) for x in full), strict=True)
        dense = torch.cat([_dense(*piece, window) for piece in pieces])
        dense.backward(pull)
        assert relative_error(out, dense) < 1e-2
        for ours, wanted in zip(half, full, strict=True):
            assert relative_error(ours.grad, wanted.grad) < 2e-2


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    at = torch.arange(len(q), device=q.device)
    seen = at[:, None] >= at
    if window is not None:
        seen &= at[:, None] - at < window
    return F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=seen, scale=0.125, enable_gqa=True
    )[0].transpose(0, 1)
