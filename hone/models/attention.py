"""One attention for every Hugging Face decoder: the caller's layout decides who sees whom.

The model code stays unchanged. It asks transformers' attention interface for `hone`, and the function
below hands queries, keys and values to the `layout` that the caller passed to the model's forward:
packed rows in training, a key-value cache in rollout.
"""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "hone"
_DROP_NAMES = {"falcon", "nemotron", "stablelm"}
"""Families whose layers keep their keyword arguments from the attention."""


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
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [H]
    ) -> Tensor: ...  # [N, H, D]


class AttentionModule(Protocol):
    """What every family's attention module has."""

    layer_idx: int


def layout_attention(
    module: AttentionModule,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | EllipsisType | None = ...,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    layout: Layout | None = None,
    **_: Tensor | float | None,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer."""
    layout = layout if layout is not None else getattr(attention_mask, "hone_layout", None)
    if layout is None:
        raise RuntimeError(
            f"{type(module).__name__} was called without a layout; call the model with layout=… "
            "or load it with another attn_implementation"
        )
    width, value_width = query.shape[-1], value.shape[-1]
    if (
        width != value_width
    ):  # latent attention: keys and values share one cache, as wide as the wider
        query, key, value = (_widened(x, max(width, value_width)) for x in (query, key, value))
    out = layout.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        layer=module.layer_idx,
        scaling=scaling if scaling is not None else width**-0.5,
        # Some modules know their window and leave it to the mask, which is not made here.
        window=window_of(module) if sliding_window is ... else sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None, ..., :value_width], None


def _widened(x: Tensor, width: int) -> Tensor:
    """Zeros behind each head: they change neither a score nor a value."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def window_of(attention: AttentionModule) -> int | None:
    """How many keys back a family's attention module looks; None where it sees all."""
    config = getattr(attention, "config", None)
    mistral = getattr(config, "model_type", None) == "mistral"  # reads it from its config
    of_config = getattr(config, "sliding_window", None) if mistral else None
    return getattr(attention, "sliding_window", of_config)


def forward_options(lm: PreTrainedModel, layout: Layout) -> dict[str, Layout | Tensor]:
    """How a model's decoder is given a layout: by name, or through the mask where layers drop names."""
    if lm.config.model_type not in _DROP_NAMES:
        return {"layout": layout}
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)  # four dimensions: handed on as it is
    vars(mask)["hone_layout"] = layout
    return {"attention_mask": mask}


def register() -> None:
    """Make `attn_implementation="hone"` known to transformers; more than once does no harm."""
    from transformers import AttentionInterface
    from transformers.models.falcon.modeling_falcon import FALCON_ATTENTION_CLASSES

    AttentionInterface.register(NAME, layout_attention)
    FALCON_ATTENTION_CLASSES[NAME] = _falcon_attention()


def _falcon_attention() -> type:
    """Falcon computes its attention itself; this one asks the layout."""
    from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

    class FalconLayoutAttention(FalconAttention):
        def forward(
            self,
            hidden_states: Tensor,  # [1, N, d]
            alibi: Tensor | None,
            attention_mask: Tensor,
            position_embeddings: tuple[Tensor, Tensor],
            **_: Tensor | float | None,
        ) -> tuple[Tensor, None]:
            q, k, v = (
                x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states))
            )
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
            out, _weights = layout_attention(self, q, k, v, attention_mask)
            return self.dense(out.flatten(2)), None

    return FalconLayoutAttention
