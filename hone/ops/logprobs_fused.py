"""`linear_log_probs` on a GPU: matrix products by the library, one kernel over each chunk of logits.

Logits are kept in the model's dtype and read once; sums are in float32. Plain heads only (no bias, no cap).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_BYTES = 2**29
"""Logits alive at once: large enough for full matmul speed, small beside the activations of a pass."""


def chunks(tokens: int, vocabulary: int, itemsize: int) -> list[slice]:
    size = max(128, _CHUNK_BYTES // (vocabulary * itemsize) // 128 * 128)
    return [slice(i, min(i + size, tokens)) for i in range(0, tokens, size)]


class FusedLinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, factor: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        from hone.ops.logprobs_triton import logit_statistics

        parts = chunks(hidden.shape[0], weight.shape[0], hidden.itemsize)
        made = [
            logit_statistics(hidden[part] @ weight.t(), target[part], factor, with_entropy)
            for part in parts
        ]
        empty = hidden.new_zeros(0, dtype=torch.float32)
        log_probs, norm, entropy = (
            torch.cat(column) if made else empty
            for column in (zip(*made, strict=True) if made else ((), (), ()))
        )
        ctx.save_for_backward(hidden, weight, target, norm, entropy)
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from hone.ops.logprobs_triton import logits_to_gradient_

        g_log_prob, g_entropy = (g.contiguous() if g is not None else None for g in grads)
        hidden, weight, target, norm, entropy = ctx.saved_tensors
        g_hidden = torch.empty_like(hidden)
        g_weight: Tensor | None = None
        for part in chunks(hidden.shape[0], weight.shape[0], hidden.itemsize):
            g = hidden[part] @ weight.t()
            logits_to_gradient_(
                g,
                target[part],
                norm[part],
                entropy[part],
                g_log_prob[part] if g_log_prob is not None else None,
                g_entropy[part] if g_entropy is not None else None,
                ctx.factor,
            )
            torch.mm(g, weight, out=g_hidden[part])
            if ctx.needs_input_grad[1]:
                product = g.t() @ hidden[part]
                g_weight = product.float() if g_weight is None else g_weight.add_(product)
        if ctx.needs_input_grad[1] and g_weight is None:
            g_weight = torch.zeros_like(weight)
        out = g_weight.to(weight.dtype) if g_weight is not None else None
        return g_hidden, out, None, None, None
