"""Causal attention over sequences laid end to end, by torch's own variable-length kernel (GPU, 16 bit)."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor


@functools.cache
def _kernel() -> tuple[Any, bool]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def varlen_attention(
    q: Tensor,  # [N, H, D]
    k: Tensor,  # [M, KV, D]
    v: Tensor,  # [M, KV, D]
    cu_q: Tensor,  # [S + 1] int32
    cu_k: Tensor,  # [S + 1] int32
    max_q: int,
    max_k: int,
    *,
    scaling: float,
    window: int | None,
) -> Tensor:  # [N, H, D]
    """The last query of each sequence stands at its last key."""
    varlen_attn, says_gqa = _kernel()
    left = window - 1 if window is not None else -1
    # Before it had the switch, the kernel took fewer key heads than query heads without being told.
    extra = {"enable_gqa": q.shape[1] != k.shape[1]} if says_gqa else {}
    return varlen_attn(
        q, k, v, cu_q, cu_k, max_q, max_k, scale=scaling, window_size=(left, 0), **extra
    )
