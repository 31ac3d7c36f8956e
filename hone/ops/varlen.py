"""Causal attention over concatenated 16-bit sequences on a GPU, with torch's varlen kernel.

If a flash-attn package that supports this GPU is installed, its kernel is used instead.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_PACKAGES = (("flash_attn_interface", 9), ("flash_attn.cute", 9), ("flash_attn", 8))
"""Modules with `flash_attn_varlen_func`, fastest first, and the major capability they need."""


def fits_varlen(q: Tensor) -> bool:
    """Returns whether the kernel supports the device, dtype and head dimension of q [N, H, D]."""
    return q.is_cuda and q.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


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
    """Returns causal attention; the last query of a sequence has the position of its last key."""
    attend = _package_kernel() or _torch_attention
    return attend(q, k, v, cu_q, cu_k, max_q, max_k, scaling, window)


def _torch_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    scaling: float, window: int | None,
) -> Tensor:  # fmt: skip
    # The operator behind torch.nn.attention.varlen, whose wrapper takes much host time.
    return torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, window is None, False,
        scale=scaling, window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )[0]  # fmt: skip


@functools.cache
def _package_kernel() -> Callable[..., Tensor] | None:
    """Returns the kernel of an installed package, or None."""
    major, _ = torch.cuda.get_device_capability()
    for name, min_capability in _PACKAGES:
        if major < min_capability:
            continue
        try:
            kernel = importlib.import_module(name).flash_attn_varlen_func
        except ModuleNotFoundError:
            continue
        except (ImportError, OSError, AttributeError) as error:
            # The package was built for another torch version, or another package has this name.
            logger.warning("%s is installed but cannot be used here: %s", name, error)
            continue
        logger.info("attention over packed rows uses %s", name)
        return functools.partial(_package_attention, kernel)
    return None


def _package_attention(
    kernel: Callable[..., Tensor | tuple[Tensor, ...]],
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    scaling: float, window: int | None,
) -> Tensor:  # fmt: skip
    out = kernel(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
        softmax_scale=scaling, causal=True,
        **({} if window is None else {"window_size": (window - 1, 0)}),
    )  # fmt: skip
    return out[0] if isinstance(out, tuple) else out
