"""One forward of a decoder without its modules' overhead: the same parameters, plain function calls.

For the plain shape that most decoders share (rotary positions, RMS norms, gated MLP). Any other
model, and one whose layers are wrapped (adapters, quantisation), goes through its own modules.
Weights are packed for the CPU where that pays, and packed anew when the parameters have changed.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.attention import Layout, forward_options, window_of
from hone.models.plain_shape import FAMILIES, PlainLayer, PlainNorm, linears, rotary_table
from hone.models.policy import PolicyModel
from hone.ops.packed_linear import Linear, linear_map


class Forward(Protocol):
    """A decoder's forward and its head, over the policy's parameters."""

    def __call__(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Token ids [N], positions [N], layout to hidden states [N, d]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, d] to [M, V] float32, before temperature."""

    def refresh(self) -> None:
        """See the parameters as they are now: training changes them, sharding replaces them."""

    def forget(self) -> None:
        """Keep nothing that was made from the parameters."""


_FIXED_ROPES = {"default", "linear", "llama3", "yarn"}
"""Rotary tables that do not depend on how long the sequence is."""


def decoder_forward(policy: PolicyModel) -> Forward:
    """The fastest forward that computes what the policy's own modules would."""
    return PlainDecoder(policy) if is_plain(policy) else ModuleDecoder(policy)


def is_plain(policy: PolicyModel) -> bool:
    """Whether `PlainDecoder` knows every part of this model."""
    config = policy.lm.config
    if hasattr(policy.lm, "peft_config") or config.model_type not in FAMILIES:
        return False
    decoder = policy.decoder
    rope = getattr(decoder.rotary_emb, "rope_type", "default")
    silu = config.hidden_act in ("silu", "swish")
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in decoder.modules())
    maps = (m for layer in decoder.layers for m in linears(layer))
    return silu and rope in _FIXED_ROPES and not hooked and all(type(m) is nn.Linear for m in maps)


class ModuleDecoder:
    """Any Hugging Face decoder, through its own modules."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy

    def refresh(self) -> None:
        """Nothing is kept."""

    def forget(self) -> None:
        """Nothing is kept."""

    def logits(self, hidden: Tensor) -> Tensor:
        return self._policy.logits(hidden)

    def __call__(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        out = self._policy.decoder(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            **forward_options(self._policy.decoder, layout),
        )
        return out.last_hidden_state[0]


class _Layer(NamedTuple):
    """One layer, ready to compute."""

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    norm_in: _Norm
    norm_mlp: _Norm
    norm_q: _Norm | None
    norm_k: _Norm | None
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    window: int | None


class PlainDecoder:
    """The shared shape, made from the modules' own parameters."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._cos = self._sin = torch.empty(0)  # [W, 1, D]; the sine carries the rotation's sign
        self.forget()

    def forget(self) -> None:
        self._parameters: list[Tensor] = []
        self._seen: list[tuple[int, int]] = []
        self._layers: list[_Layer] = []
        self._head: Linear | None = None

    def refresh(self) -> None:
        if not self._parameters:
            self._parameters = list(self._policy.parameters())
        # Every write by torch counts the version up; sharding takes other memory.
        now = [(p.data_ptr(), p._version) for p in self._parameters]
        if now == self._seen:
            return
        decoder = self._policy.decoder
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._norm = _Norm(decoder.norm)
        self._layers = [_layer(layer) for layer in decoder.layers]
        if self._policy.plain_head:
            head = self._policy.lm.get_output_embeddings()
            self._head = linear_map(head.weight, head.bias)
        self._seen = now

    def logits(self, hidden: Tensor) -> Tensor:
        if self._head is None:
            return self._policy.logits(hidden)
        return self._head(hidden).float()

    def __call__(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        self._reach(int(positions.max()) + 1)
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        x = F.embedding(ids, self._embedding)
        for index, layer in enumerate(self._layers):
            out = self._attention(index, layer, layer.norm_in(x), cos, sin, layout)
            x = layer.out.plus(out, x)
            gate, up = layer.gate_up(layer.norm_mlp(x)).chunk(2, -1)
            x = layer.down.plus(F.silu(gate).mul_(up), x)
        return self._norm(x)

    def _attention(
        self, index: int, layer: _Layer, h: Tensor, cos: Tensor, sin: Tensor, layout: Layout
    ) -> Tensor:
        rows, heads, kv_heads = h.shape[0], layer.heads, layer.kv_heads
        qkv = layer.qkv(h).view(rows, heads + 2 * kv_heads, layer.head_dim)
        both, v = torch.split_with_sizes(qkv, (heads + kv_heads, kv_heads), 1)
        if layer.norm_q is not None and layer.norm_k is not None:
            q, k = torch.split_with_sizes(both, (heads, kv_heads), 1)
            both = torch.cat([layer.norm_q(q), layer.norm_k(k)], 1)
        q, k = torch.split_with_sizes(_rotate(both, cos, sin), (heads, kv_heads), 1)
        out = layout.attend(q, k, v, layer=index, scaling=layer.scaling, window=layer.window)
        return out.reshape(rows, -1)

    def _reach(self, width: int) -> None:
        """Have rotary tables for positions below `width`."""
        if width <= len(self._cos):
            return
        width = max(256, 2 * len(self._cos), width)
        cos, sin = rotary_table(self._policy.decoder, width)
        self._cos = cos[:, None]
        half = sin.shape[-1] // 2
        self._sin = torch.cat([-sin[:, :half], sin[:, half:]], -1)[:, None]


def _layer(layer: PlainLayer) -> _Layer:
    a, m = layer.self_attn, layer.mlp
    return _Layer(
        _joined(a.q_proj, a.k_proj, a.v_proj),
        _map(a.o_proj),
        _joined(m.gate_proj, m.up_proj),
        _map(m.down_proj),
        _Norm(layer.input_layernorm),
        _Norm(layer.post_attention_layernorm),
        _Norm(a.q_norm) if hasattr(a, "q_norm") else None,
        _Norm(a.k_norm) if hasattr(a, "k_norm") else None,
        a.q_proj.weight.shape[0] // a.head_dim,
        a.k_proj.weight.shape[0] // a.head_dim,
        a.head_dim,
        a.scaling,
        window_of(a),
    )


def _map(module: nn.Linear) -> Linear:
    return linear_map(module.weight, module.bias)


def _joined(*parts: nn.Linear) -> Linear:
    """Several maps of the same input as one."""
    biases: list[Tensor] = [p.bias for p in parts]
    bias = None if biases[0] is None else torch.cat(biases)
    return linear_map(torch.cat([p.weight for p in parts]), bias)


class _Norm:
    """x / rms(x) · weight; on a CPU in float32 by half the calls that torch's own makes."""

    def __init__(self, module: PlainNorm) -> None:
        self._weight: Tensor = module.weight
        self._epsilon: float = module.variance_epsilon
        width = len(self._weight)
        self._by_sum = self._weight * width**0.5, self._weight.new_tensor(self._epsilon * width)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return F.rms_norm(x, self._weight.shape, self._weight, self._epsilon)
        weight, epsilon = self._by_sum
        return (x * (x * x).sum(-1, keepdim=True).add_(epsilon).rsqrt_()).mul_(weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [N, H, D]
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat([second, first], -1), sin)
