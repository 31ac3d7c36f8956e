"""`linear_log_probs` on a GPU: matrix products by the library, one kernel over each chunk of logits.

Logits are float32 and read once. Plain heads only (no bias, no cap).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.ops.autograd import Context
from hone.ops.wide_product import add_product, wide_product

_CHUNK_BYTES = 2**29
"""Logits alive at once: large enough for full matmul speed, small beside the activations of a pass."""


def chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(128, _CHUNK_BYTES // (vocabulary * 4) // 128 * 128)
    return [slice(i, min(i + size, tokens)) for i in range(0, tokens, size)]


class FusedLinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        factor: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        from hone.ops.logprobs_triton import logit_statistics

        parts = chunks(hidden.shape[0], weight.shape[0])
        made = [
            logit_statistics(wide_product(hidden[part], weight), target[part], factor, with_entropy)
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
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g_hidden, g_weight = backward(
            *ctx.saved_tensors, *grads, factor=ctx.factor, with_weight=ctx.needs_input_grad[1]
        )
        return g_hidden, g_weight, None, None, None


def backward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    norm: Tensor,
    entropy: Tensor,
    g_log_prob: Tensor | None,
    g_entropy: Tensor | None,
    *,
    factor: float,
    with_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of hidden states and, if asked for, of the head."""
    from hone.ops.logprobs_triton import logits_to_gradient

    g_log_prob = g_log_prob.contiguous() if g_log_prob is not None else None
    g_entropy = g_entropy.contiguous() if g_entropy is not None else None
    g_hidden = torch.empty_like(hidden)
    g_weight: Tensor | None = None
    for part in chunks(hidden.shape[0], weight.shape[0]):
        g = logits_to_gradient(
            wide_product(hidden[part], weight),
            target[part],
            norm[part],
            entropy[part],
            g_log_prob[part] if g_log_prob is not None else None,
            g_entropy[part] if g_entropy is not None else None,
            factor,
            hidden.dtype,
        )
        torch.mm(g, weight, out=g_hidden[part])
        if not with_weight:
            continue
        if g_weight is None:
            g_weight = wide_product(g.t(), hidden[part].t())
        else:
            add_product(g_weight, g.t(), hidden[part])
    if with_weight and g_weight is None:
        g_weight = torch.zeros_like(weight)
    return g_hidden, g_weight.to(weight.dtype) if g_weight is not None else None
