"""The attention implementation of all Hugging Face decoders: a layout decides which keys a query attends to.

The model code is unchanged. `attn_implementation="hone"` selects `layout_attention`, which passes queries,
keys and values to the layout that the model's forward got as `layout`: packed rows in training, a
key-value cache in rollout.
"""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.attention import AttentionOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "hone"
_FAMILIES_DROPPING_KEYWORDS = {"falcon", "nemotron", "stablelm"}
"""Families whose layers do not pass keyword arguments to the attention."""


class Layout(Protocol):
    """Decides which keys each query of one forward pass attends to."""

    def attend(
        self,
        q: Tensor,  # [N, H, D]
        k: Tensor,  # [N, KV, D]
        v: Tensor,  # [N, KV, D]
        options: AttentionOptions,
    ) -> Tensor: ...  # [N, H, D]


class AttentionModule(Protocol):
    """The attribute that the attention modules of all families have."""

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
    """Computes attention with the layout; transformers calls it in every attention layer."""
    layout = layout if layout is not None else getattr(attention_mask, "hone_layout", None)
    if layout is None:
        raise RuntimeError(
            f"{type(module).__name__} was called without a layout; call the model with layout=… "
            "or load it with another attn_implementation"
        )
    key_dim, value_dim = query.shape[-1], value.shape[-1]
    heads = [query, key, value]
    if key_dim != value_dim:  # latent attention: pad, because keys and values share a cache
        padded_dim = max(key_dim, value_dim)
        heads = [F.pad(x, (0, padded_dim - x.shape[-1])) for x in heads]
    # Some modules do not pass their window, because transformers' mask would apply it.
    window = attention_window(module) if sliding_window is ... else sliding_window
    scaling = scaling if scaling is not None else key_dim**-0.5
    options = AttentionOptions(module.layer_idx, scaling, window, softcap, s_aux)
    q, k, v = (x[0].transpose(0, 1) for x in heads)
    out = layout.attend(q, k, v, options)
    return out[None, ..., :value_dim], None


def attention_window(attention: AttentionModule) -> int | None:
    """Returns the sliding window of an attention module, or None for full attention."""
    config = getattr(attention, "config", None)
    # A mistral module has no attribute `sliding_window`; it reads the config.
    is_mistral = getattr(config, "model_type", None) == "mistral"
    config_window = getattr(config, "sliding_window", None) if is_mistral else None
    return getattr(attention, "sliding_window", config_window)


def forward_options(lm: PreTrainedModel, layout: Layout) -> dict[str, Layout | Tensor]:
    """Returns the argument that passes a layout to the decoder: `layout`, or a mask that holds it."""
    if lm.config.model_type not in _FAMILIES_DROPPING_KEYWORDS:
        return {"layout": layout}
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)  # transformers passes 4D masks unchanged
    vars(mask)["hone_layout"] = layout
    return {"attention_mask": mask}


def register() -> None:
    """Registers `attn_implementation="hone"` with transformers; idempotent."""
    from transformers import AttentionInterface
    from transformers.models.falcon.modeling_falcon import FALCON_ATTENTION_CLASSES

    AttentionInterface.register(NAME, layout_attention)
    FALCON_ATTENTION_CLASSES[NAME] = _falcon_attention()


def _falcon_attention() -> type:
    """Returns a Falcon attention class that uses the layout; Falcon ignores the attention interface."""
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
            heads = self._split_heads(self.query_key_value(hidden_states))
            q, k, v = (x.transpose(1, 2) for x in heads)
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
            out, _weights = layout_attention(self, q, k, v, attention_mask)
            return self.dense(out.flatten(2)), None

    return FalconLayoutAttention
