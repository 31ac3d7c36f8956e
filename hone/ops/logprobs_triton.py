"""GPU kernels of logprobs.py: one forward and one backward pass over the logits.

The reference is the plain path of logprobs.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    logits_ptr, target_ptr, log_prob_ptr, norm_ptr, entropy_ptr, factor, vocabulary,
    BLOCK: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * vocabulary
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        z = tl.load(start + i, i < vocabulary, other=float("-inf")).to(tl.float32) * factor
        new = tl.maximum(top, z)
        safe = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp(top - safe)
        e = tl.exp(z - safe)
        mass = mass * shrink + e
        if ENTROPY:
            weighted = weighted * shrink + tl.where(e > 0, e * z, 0.0)
        top = new
    whole = tl.max(top, 0)
    scale = tl.exp(top - whole)
    total = tl.sum(mass * scale, 0)
    norm = whole + tl.log(total)
    target = tl.load(target_ptr + row)
    z = tl.load(start + target).to(tl.float32) * factor
    tl.store(norm_ptr + row, norm)
    tl.store(log_prob_ptr + row, z - norm)
    if ENTROPY:
        tl.store(entropy_ptr + row, norm - tl.sum(weighted * scale, 0) / total)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    logits_ptr, out_ptr, target_ptr, norm_ptr, entropy_ptr, g_log_prob_ptr, g_entropy_ptr, factor,
    vocabulary,
    BLOCK: tl.constexpr, LOG_PROB: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = i < vocabulary
    at = row * vocabulary + i
    z = tl.load(logits_ptr + at, real, other=0.0)
    log_p = z.to(tl.float32) * factor - tl.load(norm_ptr + row)
    p = tl.exp(log_p)
    g = tl.zeros([BLOCK], tl.float32)
    if LOG_PROB:
        hit = tl.where(i == tl.load(target_ptr + row), 1.0, 0.0)
        g += tl.load(g_log_prob_ptr + row) * (hit - p)
    if ENTROPY:
        g -= tl.load(g_entropy_ptr + row) * p * (log_p + tl.load(entropy_ptr + row))
    tl.store(out_ptr + at, (g * factor).to(out_ptr.dtype.element_ty), real)


def logit_statistics(
    logits: Tensor,  # [M, V]
    target: Tensor,  # [M]
    factor: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log p(target), log-norm and entropy of softmax(logits · factor), each [M] float32."""
    rows, vocabulary = logits.shape
    log_prob, norm, entropy = torch.zeros(3, rows, dtype=torch.float32, device=logits.device)
    _forward[(rows,)](
        logits, target, log_prob, norm, entropy, factor, vocabulary,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)), ENTROPY=with_entropy, num_warps=8,
    )  # fmt: skip
    return log_prob, norm, entropy


def logits_to_gradient(
    logits: Tensor,  # [M, V]
    target: Tensor,
    norm: Tensor,
    entropy: Tensor,
    g_log_prob: Tensor | None,
    g_entropy: Tensor | None,
    factor: float,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the gradient of the logits, in place if `dtype` is that of the logits."""
    rows, vocabulary = logits.shape
    out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    _backward[(rows, triton.cdiv(vocabulary, block))](
        logits, out, target, norm, entropy,
        g_log_prob if g_log_prob is not None else norm,
        g_entropy if g_entropy is not None else norm,
        factor, vocabulary, BLOCK=block,
        LOG_PROB=g_log_prob is not None, ENTROPY=g_entropy is not None, num_warps=4,
    )  # fmt: skip
    return out
