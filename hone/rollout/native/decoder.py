"""One forward of a decoder without its modules' overhead: the same parameters, plain function calls.

For the plain shape that most decoders share (rotary positions, RMS norms, gated MLP). Any other
model, and one whose layers are wrapped (adapters, quantisation), goes through its own modules.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.attention import Layout
from hone.models.policy import PolicyModel


class Forward(Protocol):
    """(token ids [N], positions [N], layout) to hidden states [N, d]."""

    def __call__(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor: ...

    def refresh(self) -> None:
        """Look the parameters up anew: sharding replaces them between generations."""


_PLAIN_FAMILIES = {"llama", "qwen2", "qwen3", "mistral"}
_FIXED_ROPES = {"default", "linear", "llama3", "yarn"}
"""Rotary tables that do not depend on how long the sequence is."""


def decoder_forward(policy: PolicyModel) -> Forward:
    """The fastest forward that computes what the policy's own modules would."""
    return PlainDecoder(policy) if is_plain(policy) else ModuleDecoder(policy)


def is_plain(policy: PolicyModel) -> bool:
    """Whether `PlainDecoder` knows every part of this model."""
    config = policy.lm.config
    if hasattr(policy.lm, "peft_config") or config.model_type not in _PLAIN_FAMILIES:
        return False
    decoder: Any = policy.decoder
    rope = getattr(decoder.rotary_emb, "rope_type", "default")
    silu = config.hidden_act in ("silu", "swish")
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in decoder.modules())
    linears = (m for layer in decoder.layers for m in _linears(layer))
    return (
        silu and rope in _FIXED_ROPES and not hooked and all(type(m) is nn.Linear for m in linears)
    )


def _linears(layer: Any) -> tuple[nn.Module, ...]:
    a, m = layer.self_attn, layer.mlp
    return (a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj)


class ModuleDecoder:
    """Any Hugging Face decoder, through its own modules."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy

    def refresh(self) -> None:
        """Nothing is kept."""

    def __call__(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        out = self._policy.decoder(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, layout=layout
        )
        return out.last_hidden_state[0]


class _Layer(NamedTuple):
    """The parameters of one layer, each (weight, bias) where it is a linear map."""

    linears: tuple[tuple[Tensor, Tensor | None], ...]
    norm_in: tuple[Tensor, float]
    norm_mlp: tuple[Tensor, float]
    norm_q: tuple[Tensor, float] | None
    norm_k: tuple[Tensor, float] | None
    head_dim: int
    scaling: float
    window: int | None


class PlainDecoder:
    """The shared shape, read from the modules' own parameters."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._cos = self._sin = torch.empty(0)  # [W, 1, D]; the sine carries the rotation's sign
        self.refresh()

    def refresh(self) -> None:
        """Look the parameters up anew: sharding replaces them between generations."""
        decoder: Any = self._policy.decoder
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._norm = _norm(decoder.norm)
        self._layers = [_layer(layer) for layer in decoder.layers]

    def __call__(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        self._reach(int(positions.max()) + 1)
        cos, sin = self._cos[positions], self._sin[positions]
        x = F.embedding(ids, self._embedding)
        for index, layer in enumerate(self._layers):
            x = x + self._attention(index, layer, _rms(x, layer.norm_in), cos, sin, layout)
            gate, up, down = layer.linears[4:]
            h = _rms(x, layer.norm_mlp)
            x = x + F.linear(F.silu(F.linear(h, *gate)).mul_(F.linear(h, *up)), *down)
        return _rms(x, self._norm)

    def _attention(
        self, index: int, layer: _Layer, h: Tensor, cos: Tensor, sin: Tensor, layout: Layout
    ) -> Tensor:
        q, k, v = (F.linear(h, *m).view(len(h), -1, layer.head_dim) for m in layer.linears[:3])
        if layer.norm_q is not None and layer.norm_k is not None:
            q, k = _rms(q, layer.norm_q), _rms(k, layer.norm_k)
        heads = q.shape[1]
        turned = _rotate(torch.cat([q, k], 1), cos, sin)
        out = layout.attend(
            turned[:, :heads],
            turned[:, heads:],
            v,
            layer=index,
            scaling=layer.scaling,
            window=layer.window,
        )
        return F.linear(out.flatten(1), *layer.linears[3])

    def _reach(self, width: int) -> None:
        """Have rotary tables for positions below `width`."""
        if width <= len(self._cos):
            return
        width = max(256, 2 * len(self._cos), width)
        decoder: Any = self._policy.decoder
        like = self._embedding[:1]
        cos, sin = decoder.rotary_emb(like, torch.arange(width, device=like.device)[None])
        self._cos = cos[0][:, None]
        half = sin.shape[-1] // 2
        self._sin = torch.cat([-sin[0][:, :half], sin[0][:, half:]], -1)[:, None]


def _layer(layer: Any) -> _Layer:
    a = layer.self_attn
    return _Layer(
        tuple((m.weight, m.bias) for m in _linears(layer)),  # type: ignore[misc]
        _norm(layer.input_layernorm),
        _norm(layer.post_attention_layernorm),
        _norm(a.q_norm) if hasattr(a, "q_norm") else None,
        _norm(a.k_norm) if hasattr(a, "k_norm") else None,
        a.head_dim,
        a.scaling,
        getattr(a, "sliding_window", None),
    )


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight, module.variance_epsilon


def _rms(x: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    weight, epsilon = norm
    return F.rms_norm(x, weight.shape, weight, epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [N, H, D]
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat([second, first], -1), sin)
