"""The GPU kernel that rotates queries and keys, forward and backward."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_qkv(  # type: ignore[no-untyped-def]
    joined_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Computes `split_and_rotate` of rotary.py or, with BACKWARD, `join_gradients`."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = D // 2
    h = tl.arange(0, HEADS_PAD)[:, None]
    i = tl.arange(0, HALF_PAD)[None, :]
    in_half = i < half
    is_q = in_half & (h < H)
    is_k = in_half & (h >= H) & (h < H + KV)
    is_v = in_half & (h >= H + KV) & (h < H + 2 * KV)
    q = q_ptr + (token * H + h) * D + i
    k = k_ptr + (token * KV + h - H) * D + i
    v = v_ptr + (token * KV + h - H - KV) * D + i
    joined = joined_ptr + (token * (H + 2 * KV) + h) * D + i
    in_joined = in_half & (h < H + 2 * KV)
    if BACKWARD:
        a = tl.load(q, is_q, other=0.0) + tl.load(k, is_k, other=0.0)
        a += tl.load(v, is_v, other=0.0)
        b = tl.load(q + half, is_q, other=0.0) + tl.load(k + half, is_k, other=0.0)
        b += tl.load(v + half, is_v, other=0.0)
    else:
        a = tl.load(joined, in_joined, other=0.0)
        b = tl.load(joined + half, in_joined, other=0.0)
    angle_offset = token * D + i
    cos_a = tl.load(cos_ptr + angle_offset, in_half, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + angle_offset + half, in_half, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + angle_offset, in_half, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + angle_offset + half, in_half, other=0.0).to(tl.float32)
    a_float, b_float = a.to(tl.float32), b.to(tl.float32)
    if BACKWARD:
        first = a_float * cos_a + b_float * sin_b
        second = b_float * cos_b - a_float * sin_a
    else:
        first = a_float * cos_a - b_float * sin_a
        second = b_float * cos_b + a_float * sin_b
    first = tl.where(is_v, a, first.to(a.dtype))
    second = tl.where(is_v, b, second.to(b.dtype))
    if BACKWARD:
        tl.store(joined, first, in_joined)
        tl.store(joined + half, second, in_joined)
    else:
        tl.store(q, first, is_q)
        tl.store(q + half, second, is_q)
        tl.store(k, first, is_k)
        tl.store(k + half, second, is_k)
        tl.store(v, first, is_v)
        tl.store(v + half, second, is_v)


def split_and_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits qkv [N, (H + 2 KV) D] into queries, keys and values, and rotates queries and keys."""
    tokens, d = len(qkv), cos.shape[-1]
    heads = qkv.shape[1] // d - 2 * kv_heads
    q = qkv.new_empty(tokens, heads, d)
    k, v = (qkv.new_empty(tokens, kv_heads, d) for _ in range(2))
    _launch(qkv.contiguous(), q, k, v, cos, sin, backward=False)
    return q, k, v


def join_gradients(g_q: Tensor, g_k: Tensor, g_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the gradient of the input `qkv` of `split_and_rotate`."""
    g_q, g_k, g_v = (g.contiguous() for g in (g_q, g_k, g_v))
    heads = g_q.shape[1] + 2 * g_k.shape[1]
    joined = g_q.new_empty(len(g_q), heads * g_q.shape[2])
    _launch(joined, g_q, g_k, g_v, cos, sin, backward=True)
    return joined


def _launch(
    joined: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, backward: bool
) -> None:
    tokens, heads, d = q.shape
    kv = k.shape[1]
    k, v = (k, v) if kv else (q, q)  # an empty tensor has no address
    _rotate_qkv[(tokens,)](
        joined, q, k, v, cos.contiguous(), sin.contiguous(), H=heads, KV=kv, D=d,
        HEADS_PAD=triton.next_power_of_2(heads + 2 * kv), HALF_PAD=triton.next_power_of_2(d // 2),
        BACKWARD=backward, num_warps=4,
    )  # fmt: skip
