"""The GPU kernels that logprobs.py launches; each passes once over logits [tokens, vocabulary]."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def logit_statistics(  # type: ignore[no-untyped-def]
    logits_ptr, target_ptr, log_prob_ptr, lse_ptr, entropy_ptr, factor, vocab_size,
    BLOCK: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * vocab_size
    running_max = tl.full([BLOCK], float("-inf"), tl.float32)
    exp_sum = tl.zeros([BLOCK], tl.float32)
    weighted_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + i, i < vocab_size, other=float("-inf")).to(tl.float32) * factor
        new_max = tl.maximum(running_max, z)
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp(running_max - finite_max)
        exp_z = tl.exp(z - finite_max)
        exp_sum = exp_sum * rescale + exp_z
        if ENTROPY:
            weighted_sum = weighted_sum * rescale + tl.where(exp_z > 0, exp_z * z, 0.0)
        running_max = new_max
    row_max = tl.max(running_max, 0)
    scale = tl.exp(running_max - row_max)
    exp_total = tl.sum(exp_sum * scale, 0)
    lse = row_max + tl.log(exp_total)
    target = tl.load(target_ptr + row)
    z = tl.load(row_ptr + target).to(tl.float32) * factor
    tl.store(lse_ptr + row, lse)
    tl.store(log_prob_ptr + row, z - lse)
    if ENTROPY:
        tl.store(entropy_ptr + row, lse - tl.sum(weighted_sum * scale, 0) / exp_total)


@triton.jit
def logits_to_gradient(  # type: ignore[no-untyped-def]
    logits_ptr, out_ptr, target_ptr, lse_ptr, entropy_ptr, g_log_prob_ptr, g_entropy_ptr, factor,
    vocab_size,
    BLOCK: tl.constexpr, LOG_PROB: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < vocab_size
    offsets = row * vocab_size + i
    z = tl.load(logits_ptr + offsets, mask, other=0.0)
    log_p = z.to(tl.float32) * factor - tl.load(lse_ptr + row)
    p = tl.exp(log_p)
    g = tl.zeros([BLOCK], tl.float32)
    if LOG_PROB:
        is_target = tl.where(i == tl.load(target_ptr + row), 1.0, 0.0)
        g += tl.load(g_log_prob_ptr + row) * (is_target - p)
    if ENTROPY:
        g -= tl.load(g_entropy_ptr + row) * p * (log_p + tl.load(entropy_ptr + row))
    tl.store(out_ptr + offsets, (g * factor).to(out_ptr.dtype.element_ty), mask)
