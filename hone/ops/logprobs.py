"""Log-probabilities and entropies straight from hidden states, a chunk of tokens at a time.

The logits [tokens, vocabulary] never exist whole: forward keeps one number a token, backward makes each
chunk again. Everything is computed in float32 whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor

from hone.ops.autograd import Context
from hone.ops.wide_product import wide_product

_CHUNK_LOGITS = 2**24
"""Logits alive at once (64 MiB in float32): large enough for full matmul speed, small beside any model."""


class LogitRule(TypedDict):
    """How logits follow from the head's product."""

    temperature: float
    bias: Tensor | None
    softcap: float | None
    logit_scale: float


def linear_log_probs(
    hidden: Tensor,  # [M, d]
    weight: Tensor,  # [V, d]
    target: Tensor,  # [M]
    *,
    temperature: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy of softmax(logits / temperature), both [M] float32.

    Entropies are zero unless `with_entropy`: their sums cost a pass over the vocabulary.
    """
    if hidden.is_cuda and bias is None and softcap is None:
        from hone.ops.logprobs_fused import FusedLinearLogProbs

        factor = logit_scale / temperature
        return FusedLinearLogProbs.apply(hidden, weight, target, factor, with_entropy)
    return _LinearLogProbs.apply(
        hidden, weight, bias, target, temperature, softcap, logit_scale, with_entropy
    )


@torch.no_grad()
def linear_sum_pi_squared(
    hidden: Tensor,  # [M, d]
    weight: Tensor,  # [V, d]
    *,
    temperature: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """Σ p² of softmax(logits / temperature), [M] float32; without gradient, its reader needs none."""
    total = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    for part in _chunks(hidden.shape[0], weight.shape[0]):
        z, _ = _logits(hidden[part], weight, bias, softcap, logit_scale / temperature)
        total[part] = torch.softmax(z, -1).square().sum(-1)
    return total


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(8, _CHUNK_LOGITS // vocabulary)
    return [slice(i, min(i + size, tokens)) for i in range(0, tokens, size)]


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, factor: float
) -> tuple[Tensor, Tensor | None]:
    """Scaled logits in float32, and tanh of the capped ones (its derivative is needed backward)."""
    z = wide_product(hidden, weight)
    if bias is not None:
        z += bias
    if softcap is None:
        return (z if factor == 1.0 else z.mul_(factor)), None
    squashed = torch.tanh(z.div_(softcap))
    return squashed * (softcap * factor), squashed


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        temperature: float,
        softcap: float | None,
        logit_scale: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        log_probs = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        log_norm = torch.empty_like(log_probs)
        entropy = torch.zeros_like(log_probs)
        factor = logit_scale / temperature
        for part in _chunks(tokens, weight.shape[0]):
            z, _ = _logits(hidden[part], weight, bias, softcap, factor)
            norm = torch.logsumexp(z, -1)
            log_norm[part] = norm
            log_probs[part] = z.gather(-1, target[part, None]).squeeze(-1) - norm
            if with_entropy:
                p = torch.sub(z, norm[:, None]).exp_()
                entropy[part] = norm - torch.linalg.vecdot(p, z)
        ctx.save_for_backward(bias, hidden, weight, target, log_norm, entropy)
        ctx.factor, ctx.softcap = factor, softcap
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        bias, *saved = ctx.saved_tensors
        made = plain_backward(
            *saved,
            *grads,  # None where nothing depends on it
            factor=ctx.factor,
            with_weight=ctx.needs_input_grad[1],
            bias=bias,
            softcap=ctx.softcap,
        )
        return *made, None, None, None, None, None


def backward_on(device: torch.device) -> Callable[..., tuple[Tensor | None, ...]]:
    """The gradient of a plain head as a device computes it, for who made log-probs in another way."""
    if device.type == "cuda":
        from hone.ops import logprobs_fused

        return logprobs_fused.backward
    return plain_backward


def plain_backward(
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
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of hidden states, head and bias."""
    g_hidden = torch.empty_like(hidden)
    g_weight = None
    if with_weight:
        g_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    g_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
    for part in _chunks(hidden.shape[0], weight.shape[0]):
        z, squashed = _logits(hidden[part], weight, bias, softcap, factor)
        log_p = z.sub_(norm[part, None])
        p = log_p.exp()
        # d log p(target) / dz = onehot - p;   d entropy / dz = -p (log p + entropy)
        # In place: two tensors of a chunk's logits are alive, not five.
        if g_entropy is None:
            assert g_log_prob is not None
            g = p.mul_(-g_log_prob[part, None])
        else:
            g = log_p.add_(entropy[part, None]).mul_(-g_entropy[part, None])
            if g_log_prob is not None:
                g -= g_log_prob[part, None]
            g *= p
        if g_log_prob is not None:
            g.scatter_add_(-1, target[part, None], g_log_prob[part, None].to(g.dtype))
        g *= factor
        if squashed is not None:
            g *= 1 - squashed.square()
        if g_bias is not None:
            g_bias += g.sum(0)
        g = g.to(hidden.dtype)
        torch.mm(g, weight, out=g_hidden[part])
        if g_weight is None:
            continue
        if g.dtype == g_weight.dtype:  # no second tensor as large as the weight
            g_weight.addmm_(g.t(), hidden[part])
        else:
            g_weight += g.t() @ hidden[part]
    out_weight = g_weight.to(weight.dtype) if g_weight is not None else None
    out_bias = g_bias.to(bias.dtype) if g_bias is not None and bias is not None else None
    return g_hidden, out_weight, out_bias
