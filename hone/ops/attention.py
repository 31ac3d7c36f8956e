"""Attention over padded or concatenated sequences, and functions that all attention layouts share.

Fused kernels support neither soft caps nor sinks. Attention with either is computed in float32, one
sequence at a time, and the backward pass recomputes the attention scores, so that only the scores of one
sequence are in memory.

In shapes, H is the number of query heads, KV of key-value heads, L of queries, M of keys, N of concatenated
tokens and S of their sequences; D is the head dimension.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger(__name__)

_PACKAGES = (("flash_attn_interface", 9), ("flash_attn.cute", 9), ("flash_attn", 8))
"""Modules with `flash_attn_varlen_func`, fastest first, and the major compute capability each one needs."""


class AttentionOptions(NamedTuple):
    """The attention options of one layer."""

    layer: int  # index of the layer
    scaling: float  # of the attention scores
    window: int | None = None  # of sliding-window attention
    softcap: float | None = None
    sinks: Tensor | None = None  # [H] logits

    @property
    def needs_scores(self) -> bool:
        """Whether attention must materialize its scores, because fused kernels do not support the options."""
        return self.softcap is not None or self.sinks is not None


def padded_attention(
    q: Tensor,  # [B, H, L, D]
    k: Tensor,  # [B, H, M, D]
    v: Tensor,  # [B, H, M, D]
    bias: Tensor | None,  # [L, M] or [B, 1, L, M], -inf where a key is masked; None: causal
    options: AttentionOptions,
) -> Tensor:  # [B, H, L, D]
    """Returns softmax(softcap(scaling · q · kᵀ) + bias) · v.

    A sink adds a term to the denominator of every softmax of its head.
    """
    if not options.needs_scores:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=bias is None, scale=options.scaling
        )
    if bias is None:
        bias = q.new_full((q.shape[2], k.shape[2]), float("-inf")).triu(1)
    use_checkpoint = torch.is_grad_enabled() and q.requires_grad
    out = []
    for i in range(len(q)):
        inputs = (q[i], k[i], v[i], bias if bias.dim() == 2 else bias[i, 0], options)
        out.append(
            checkpoint(_attend, *inputs, use_reentrant=False)
            if use_checkpoint
            else _attend(*inputs)
        )
    return torch.stack(out)


def _attend(
    q: Tensor,  # [H, L, D]
    k: Tensor,
    v: Tensor,
    bias: Tensor,  # [L, M]
    options: AttentionOptions,
) -> Tensor:
    scores = soft_cap(
        torch.matmul(q.float(), k.float().transpose(1, 2)) * options.scaling, options.softcap
    )
    sinks = None if options.sinks is None else options.sinks[:, None, None]
    return torch.matmul(softmax_with_sinks(scores + bias, sinks).to(v.dtype), v)


def soft_cap(scores: Tensor, softcap: float | None) -> Tensor:
    """Limits scores to (-softcap, softcap) by tanh."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Returns the softmax over the last dimension; a sink is one more key, whose value is 0."""
    if sinks is None:
        return torch.softmax(scores, -1)
    sink_scores = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink_scores], -1), -1)[..., :-1]


def is_visible(distance: Tensor, window: int | None) -> Tensor:
    """Returns whether a query may attend to a key that is `distance` tokens before it."""
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns 0 for visible keys and -inf for masked keys."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, float("-inf"))


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values [N, KV, D] repeated to the number of query heads, [N, H, D]."""
    group_size = q.shape[1] // k.shape[1]
    if group_size == 1:
        return k, v
    return k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)


def fits_varlen(q: Tensor) -> bool:
    """Returns whether `varlen_attention` supports the device, dtype and head dimension of q [N, H, D]."""
    return q.is_cuda and q.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def varlen_attention(
    q: Tensor,  # [N, H, D]
    k: Tensor,  # [M, KV, D]
    v: Tensor,  # [M, KV, D]
    cu_q: Tensor,  # [S + 1] int32, cumulative number of queries
    cu_k: Tensor,  # [S + 1] int32, cumulative number of keys
    max_q: int,
    max_k: int,
    *,
    scaling: float,
    window: int | None,
) -> Tensor:  # [N, H, D]
    """Returns causal attention over concatenated 16-bit sequences on a GPU.

    The last query and the last key of a sequence have the same position. If a flash-attn package that
    supports this GPU is installed, its kernel is used instead of torch's.
    """
    attend = _package_kernel() or _torch_attention
    return attend(q, k, v, cu_q, cu_k, max_q, max_k, scaling, window)


def _torch_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    scaling: float, window: int | None,
) -> Tensor:  # fmt: skip
    # torch.nn.attention.varlen calls this operator, but takes much host time.
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
