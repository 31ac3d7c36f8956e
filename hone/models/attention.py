"""One attention for every Hugging Face decoder: the caller's layout decides who sees whom.

The model code stays unchanged. It asks transformers' attention interface for `hone`, and the function
below hands queries, keys and values to the `layout` that the caller passed to the model's forward:
packed rows in training, a key-value cache in rollout.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

NAME = "hone"


class Layout(Protocol):
    """Who attends to whom in one forward pass."""

    def attend(
        self,
        q: Tensor,  # [N, H, D]
        k: Tensor,  # [N, KV, D]
        v: Tensor,  # [N, KV, D]
        *,
        layer: int,
        scaling: float,
        window: int | None,
    ) -> Tensor: ...  # [N, H, D]


def layout_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    layout: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer."""
    if layout is None:
        raise RuntimeError(
            f"{type(module).__name__} was called without a layout; call the model with layout=… "
            "or load it with another attn_implementation"
        )
    if softcap is not None:
        raise NotImplementedError(
            f"{type(module).__name__} caps its attention scores (softcap={softcap}); such models are "
            "not supported: use one without attention soft-capping"
        )
    if s_aux is not None:
        raise NotImplementedError(
            f"{type(module).__name__} has attention sinks (s_aux); such models are not supported"
        )
    out = layout.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        layer=module.layer_idx,  # type: ignore[arg-type]
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
    )
    return out[None], None


def window_of(attention: Any) -> int | None:
    """How many keys back a family's attention module looks; None where it sees all."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    config = getattr(attention, "config", None)
    mistral = getattr(config, "model_type", None) == "mistral"  # reads it from its config
    return getattr(config, "sliding_window", None) if mistral else None


def register() -> None:
    """Make `attn_implementation="hone"` known to transformers; more than once does no harm."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, layout_attention)
