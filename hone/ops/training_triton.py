"""The GPU kernels of training; ops/decoder.py computes the norm, the rotation and the gate on a CPU."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.protocol.rows import to_device

_NORM_BACKWARD_PROGRAMS = 528
"""Number of programs of the norm's backward pass; each sums the weight gradient of a part of the rows."""
_GATE_BLOCK = 2048
_ADD_BLOCK = 4096


# Both kernels read logits [tokens, vocabulary] once; `logit_factor` is logit_scale / temperature.
@triton.jit
def logit_statistics(  # type: ignore[no-untyped-def]
    logits_ptr, target_ptr, log_prob_ptr, lse_ptr, entropy_ptr, logit_factor, vocab_size,
    BLOCK: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * vocab_size
    running_max = tl.full([BLOCK], float("-inf"), tl.float32)
    exp_sum = tl.zeros([BLOCK], tl.float32)
    weighted_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + i, i < vocab_size, other=float("-inf")).to(tl.float32) * logit_factor
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
    z = tl.load(row_ptr + target).to(tl.float32) * logit_factor
    tl.store(lse_ptr + row, lse)
    tl.store(log_prob_ptr + row, z - lse)
    if ENTROPY:
        tl.store(entropy_ptr + row, lse - tl.sum(weighted_sum * scale, 0) / exp_total)


@triton.jit
def logits_to_gradient(  # type: ignore[no-untyped-def]
    logits_ptr, out_ptr, target_ptr, lse_ptr, entropy_ptr, g_log_prob_ptr, g_entropy_ptr,
    logit_factor, vocab_size, BLOCK: tl.constexpr, LOG_PROB: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < vocab_size
    offsets = row * vocab_size + i
    z = tl.load(logits_ptr + offsets, mask, other=0.0)
    log_p = z.to(tl.float32) * logit_factor - tl.load(lse_ptr + row)
    p = tl.exp(log_p)
    g = tl.zeros([BLOCK], tl.float32)
    if LOG_PROB:
        is_target = tl.where(i == tl.load(target_ptr + row), 1.0, 0.0)
        g += tl.load(g_log_prob_ptr + row) * (is_target - p)
    if ENTROPY:
        g -= tl.load(g_entropy_ptr + row) * p * (log_p + tl.load(entropy_ptr + row))
    tl.store(out_ptr + offsets, (g * logit_factor).to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _rms_norm_forward(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, inverse_rms_ptr, eps,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, ADD_RESIDUAL: tl.constexpr,
    STORE_INVERSE_RMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    mask = column < WIDTH
    offsets = row * WIDTH + column
    x = tl.load(x_ptr + offsets, mask, other=0.0).to(tl.float32)
    if ADD_RESIDUAL:
        x += tl.load(residual_ptr + offsets, mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + offsets, rounded, mask)
        x = rounded.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    if STORE_INVERSE_RMS:
        tl.store(inverse_rms_ptr + row, inverse_rms)
    weight = tl.load(weight_ptr + column, mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, (x * inverse_rms * weight).to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _rms_norm_backward(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, inverse_rms_ptr, g_ptr, g_residual_ptr, g_x_ptr, g_weight_ptr, rows,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    i = tl.arange(0, WIDTH_PAD)
    mask = i < WIDTH
    weight = tl.load(weight_ptr + i, mask, other=0.0).to(tl.float32)
    g_weight = tl.zeros([WIDTH_PAD], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        offsets = tl.cast(row, tl.int64) * WIDTH + i
        inverse_rms = tl.load(inverse_rms_ptr + row)
        x = tl.load(x_ptr + offsets, mask, other=0.0).to(tl.float32) * inverse_rms
        g = tl.load(g_ptr + offsets, mask, other=0.0).to(tl.float32)
        g_weight += g * x
        g *= weight
        projection = tl.sum(g * x, 0) / WIDTH
        g = (g - x * projection) * inverse_rms
        if HAS_RESIDUAL:
            g += tl.load(g_residual_ptr + offsets, mask, other=0.0).to(tl.float32)
        tl.store(g_x_ptr + offsets, g.to(g_x_ptr.dtype.element_ty), mask)
    tl.store(g_weight_ptr + program * WIDTH + i, g_weight, mask)


def _norm_launch_options(width: int) -> dict[str, int]:
    padded_width = triton.next_power_of_2(width)
    num_warps = 4 if padded_width <= 2048 else 8
    return {"WIDTH": width, "WIDTH_PAD": padded_width, "num_warps": num_warps}


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the normalized rows [N, d] in the weight's dtype, and 1 / rms of each row [N]."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x, dtype=weight.dtype)
    inverse_rms = torch.empty(rows, dtype=torch.float32, device=x.device)
    _rms_norm_forward[(rows,)](
        x, x, weight, out, x, inverse_rms, eps,
        ADD_RESIDUAL=False, STORE_INVERSE_RMS=True, **_norm_launch_options(width),
    )  # fmt: skip
    return out, inverse_rms


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns `x + residual` normalized, in the weight's dtype, and the float32 sum (or x, if not summed)."""
    rows, width = x.shape
    out = torch.empty_like(x, dtype=weight.dtype)
    total = torch.empty_like(x, dtype=torch.float32) if residual is not None else x
    _rms_norm_forward[(rows,)](
        x, x if residual is None else residual, weight, out, total, x, eps,
        ADD_RESIDUAL=residual is not None, STORE_INVERSE_RMS=False, **_norm_launch_options(width),
    )  # fmt: skip
    return out, total


def rms_norm_backward(
    x: Tensor, weight: Tensor, inverse_rms: Tensor, g: Tensor, g_residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the weight; `g_residual` is added to the gradient of x."""
    x, g = x.contiguous(), g.contiguous()
    g_residual = None if g_residual is None else g_residual.contiguous()
    rows, width = x.shape
    programs = max(1, min(_NORM_BACKWARD_PROGRAMS, rows))
    g_x = torch.empty_like(x)
    g_weight_parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _rms_norm_backward[(programs,)](
        x, weight, inverse_rms, g, g if g_residual is None else g_residual, g_x, g_weight_parts,
        rows, HAS_RESIDUAL=g_residual is not None, **_norm_launch_options(width),
    )  # fmt: skip
    return g_x, g_weight_parts.sum(0).to(weight.dtype)


@triton.jit
def _rotate_qkv(  # type: ignore[no-untyped-def]
    qkv_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Computes `split_and_rotate` or, with BACKWARD, `join_gradients`: all tensors are then gradients."""
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
    qkv = qkv_ptr + (token * (H + 2 * KV) + h) * D + i
    in_qkv = in_half & (h < H + 2 * KV)
    if BACKWARD:
        a = tl.load(q, is_q, other=0.0) + tl.load(k, is_k, other=0.0)
        a += tl.load(v, is_v, other=0.0)
        b = tl.load(q + half, is_q, other=0.0) + tl.load(k + half, is_k, other=0.0)
        b += tl.load(v + half, is_v, other=0.0)
    else:
        a = tl.load(qkv, in_qkv, other=0.0)
        b = tl.load(qkv + half, in_qkv, other=0.0)
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
        tl.store(qkv, first, in_qkv)
        tl.store(qkv + half, second, in_qkv)
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
    _launch_rotation(qkv.contiguous(), q, k, v, cos, sin, backward=False)
    return q, k, v


def join_gradients(g_q: Tensor, g_k: Tensor, g_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the gradient of the input `qkv` of `split_and_rotate`."""
    g_q, g_k, g_v = (g.contiguous() for g in (g_q, g_k, g_v))
    heads = g_q.shape[1] + 2 * g_k.shape[1]
    g_qkv = g_q.new_empty(len(g_q), heads * g_q.shape[2])
    _launch_rotation(g_qkv, g_q, g_k, g_v, cos, sin, backward=True)
    return g_qkv


def _launch_rotation(
    qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, backward: bool
) -> None:
    tokens, heads, d = q.shape
    kv = k.shape[1]
    k, v = (k, v) if kv else (q, q)  # an empty tensor has no address
    _rotate_qkv[(tokens,)](
        qkv, q, k, v, cos.contiguous(), sin.contiguous(), H=heads, KV=kv, D=d,
        HEADS_PAD=triton.next_power_of_2(heads + 2 * kv), HALF_PAD=triton.next_power_of_2(d // 2),
        BACKWARD=backward, num_warps=4,
    )  # fmt: skip


@triton.jit
def _silu_gate_forward(gate_ptr, up_ptr, out_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    gate = tl.load(gate_ptr + i, mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + i, mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + i, out.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _silu_gate_backward(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, g_ptr, g_gate_ptr, g_up_ptr, out_ptr, count, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    gate = tl.load(gate_ptr + i, mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + i, mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + i, mask, other=0.0)
    s = tl.sigmoid(gate)
    dtype = g.dtype
    g = g.to(tl.float32)
    tl.store(out_ptr + i, (gate * s * up).to(dtype), mask)
    tl.store(g_up_ptr + i, (g * gate * s).to(dtype), mask)
    tl.store(g_gate_ptr + i, (g * up * s * (1.0 + gate * (1.0 - s))).to(dtype), mask)


def silu_gate_forward(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    grid = (triton.cdiv(gate.numel(), _GATE_BLOCK),)
    _silu_gate_forward[grid](gate, up, out, gate.numel(), BLOCK=_GATE_BLOCK, num_warps=8)
    return out


def silu_gate_backward(gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns both gradients, and silu(gate) · up, because recomputing it is cheaper than saving it."""
    gate, up, g = gate.contiguous(), up.contiguous(), g.contiguous()
    g_gate, g_up, out = (torch.empty_like(gate) for _ in range(3))
    grid = (triton.cdiv(gate.numel(), _GATE_BLOCK),)
    _silu_gate_backward[grid](
        gate, up, g, g_gate, g_up, out, gate.numel(), BLOCK=_GATE_BLOCK, num_warps=8
    )
    return g_gate, g_up, out


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, source_ptr, k_out_ptr, v_out_ptr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH_PAD)
    mask = i < WIDTH
    source = tl.load(source_ptr + row).to(tl.int64) * WIDTH
    tl.store(k_out_ptr + row * WIDTH + i, tl.load(k_ptr + source + i, mask), mask)
    tl.store(v_out_ptr + row * WIDTH + i, tl.load(v_ptr + source + i, mask), mask)


@triton.jit
def _sum_copies(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, key_order_ptr, token_offset_ptr, k_out_ptr, v_out_ptr,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH_PAD)
    mask = i < WIDTH
    k = tl.zeros([WIDTH_PAD], tl.float32)
    v = tl.zeros([WIDTH_PAD], tl.float32)
    for copy in range(tl.load(token_offset_ptr + token), tl.load(token_offset_ptr + token + 1)):
        offsets = tl.load(key_order_ptr + copy).to(tl.int64) * WIDTH + i
        k += tl.load(k_ptr + offsets, mask, other=0.0).to(tl.float32)
        v += tl.load(v_ptr + offsets, mask, other=0.0).to(tl.float32)
    tl.store(k_out_ptr + token * WIDTH + i, k.to(k_out_ptr.dtype.element_ty), mask)
    tl.store(v_out_ptr + token * WIDTH + i, v.to(v_out_ptr.dtype.element_ty), mask)


def gather(k: Tensor, v: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    width = k[0].numel()
    outs = [torch.empty(len(source), *k.shape[1:], dtype=k.dtype, device=k.device) for _ in "kv"]
    _gather[(len(source),)](
        k, v, source, *outs, WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width), num_warps=1
    )
    return outs[0], outs[1]


def sum_copies(
    g_k: Tensor, g_v: Tensor, key_order: Tensor, token_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    width, tokens = g_k[0].numel(), len(token_offsets) - 1
    outs = [torch.empty(tokens, *g.shape[1:], dtype=g.dtype, device=g.device) for g in (g_k, g_v)]
    _sum_copies[(tokens,)](
        g_k, g_v, key_order, token_offsets, *outs,
        WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return outs[0], outs[1]


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    any_part_ptr, address_ptr, num_elements_ptr, tensor_index_ptr, first_element_ptr, num_tensors,
    BLOCK: tl.constexpr,  # `any_part_ptr` points to any of the parts; only its dtype is read
):  # fmt: skip
    program = tl.program_id(0)
    tensor_index = tl.load(tensor_index_ptr + program)
    first_element = tl.load(first_element_ptr + program)
    num_elements = tl.load(num_elements_ptr + tensor_index)
    total = tl.load(address_ptr + tensor_index).to(tl.pointer_type(tl.float32))
    part = tl.load(address_ptr + num_tensors + tensor_index).to(
        tl.pointer_type(any_part_ptr.dtype.element_ty)
    )
    total, part = tl.multiple_of(total, 16), tl.multiple_of(part, 16)
    i = tl.multiple_of(first_element, BLOCK) + tl.arange(0, BLOCK)
    mask = i < num_elements
    value = tl.load(total + i, mask, other=0.0) + tl.load(part + i, mask, other=0.0).to(tl.float32)
    tl.store(total + i, value, mask)


def add_all(sums: list[Tensor], parts: list[Tensor]) -> None:
    """Computes sums[i] += parts[i] for all i in one launch."""
    device = sums[0].device
    sizes = tuple(total.numel() for total in sums)
    num_elements, tensor_index, first_element = _program_table(sizes, device)
    addresses = to_device(torch.tensor([t.data_ptr() for t in (*sums, *parts)]), device)
    _add[(len(tensor_index),)](
        parts[0], addresses, num_elements, tensor_index, first_element, len(sums),
        BLOCK=_ADD_BLOCK, num_warps=4,
    )  # fmt: skip


@functools.lru_cache(maxsize=8)
def _program_table(
    element_counts: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the number of elements per tensor, and each program's tensor index and first element."""
    num_elements = torch.tensor(element_counts)
    blocks = -(-num_elements // _ADD_BLOCK)
    tensor_index = torch.arange(len(element_counts)).repeat_interleave(blocks)
    blocks_before = (blocks.cumsum(0) - blocks).repeat_interleave(blocks)
    first_element = (torch.arange(len(tensor_index)) - blocks_before) * _ADD_BLOCK
    return num_elements.to(device), tensor_index.to(device), first_element.to(device)
