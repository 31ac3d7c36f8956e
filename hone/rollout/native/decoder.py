"""The decoder forward on a CPU, and the forward of other models on any device.

On a CPU, `PlainDecoder` computes the layers of models/decoder_layer.py without module overhead. It
packs weights for the CPU where that is faster, and packs them again after the parameters change.
`ModuleDecoder` runs the modules of any other model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.attention import Layout, forward_options
from hone.models.decoder_layer import (
    DecoderLayer,
    LayerModule,
    NormModule,
    fits_decoder_layer,
    read_layer,
    rotary_table,
)
from hone.models.policy import PolicyModel
from hone.ops.packed_linear import PackableLinear, make_linear


class Forward(Protocol):
    """The decoder forward and the LM head, over the policy's parameters."""

    def __call__(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Returns hidden states [N, d] of token ids [N] at positions [N]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [M, V] float32 of hidden states [M, d], before temperature."""

    def refresh(self) -> None:
        """Reads the parameters again if training has written them or sharding has moved them."""

    def invalidate(self) -> None:
        """Drops everything computed from the parameters."""


def decoder_forward(policy: PolicyModel) -> Forward:
    """Returns the fastest forward that computes the same as the policy's modules."""
    return PlainDecoder(policy) if fits_decoder_layer(policy) else ModuleDecoder(policy)


class ModuleDecoder:
    """Runs the modules of any Hugging Face decoder and caches nothing."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy

    def refresh(self) -> None: ...

    def invalidate(self) -> None: ...

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


class PlainDecoder:
    """Computes the layers of models/decoder_layer.py with packed copies of the parameters."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        # [positions, 1, head_dim]; the first half of each row of `_sin` is negated
        self._cos = self._sin = torch.empty(0)
        self.invalidate()

    def invalidate(self) -> None:
        self._parameters: list[Tensor] = []
        self._packed_versions: list[tuple[int, int]] = []
        self._layers: list[DecoderLayer[PackableLinear, RmsNorm]] = []
        self._lm_head: PackableLinear | None = None

    def refresh(self) -> None:
        if not self._parameters:
            self._parameters = list(self._policy.parameters())
        # Every write by torch increments `_version`; sharding changes the address.
        versions = [(p.data_ptr(), p._version) for p in self._parameters]
        if versions == self._packed_versions:
            return
        decoder = self._policy.decoder
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._norm = RmsNorm(decoder.norm)
        self._layers = [self._read_layer(layer) for layer in decoder.layers]
        if self._policy.has_plain_head:
            self._lm_head = _join([self._policy.lm.get_output_embeddings()])
        self._packed_versions = versions

    def _read_layer(self, layer: LayerModule) -> DecoderLayer[PackableLinear, RmsNorm]:
        return read_layer(layer, join=_join, norm=RmsNorm)

    def _embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        if self._lm_head is None:
            return self._policy.logits(hidden)
        return self._lm_head(hidden).float()

    def __call__(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        self._extend_rotary_table(int(positions.max()) + 1)
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        x = self._embed(ids)
        for layer in self._layers:
            qkv = layer.qkv(layer.norm_in(x)).view(len(x), -1, layer.head_dim)
            qk, v = qkv.split_with_sizes((layer.heads + layer.kv_heads, layer.kv_heads), 1)
            head_counts = (layer.heads, layer.kv_heads)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = qk.split_with_sizes(head_counts, 1)
                qk = torch.cat([layer.q_norm(q), layer.k_norm(k)], 1)
            q, k = _rotate(qk, cos, sin).split_with_sizes(head_counts, 1)
            out = layout.attend(q, k, v, layer.attention)
            x = layer.out.forward_add(out.reshape(len(x), -1), x)
            gate, up = layer.gate_up(layer.norm_mlp(x)).chunk(2, -1)
            x = layer.down.forward_add(F.silu(gate).mul_(up), x)
        return self._norm(x)

    def _extend_rotary_table(self, num_positions: int) -> None:
        if num_positions <= len(self._cos):
            return
        num_positions = max(256, 2 * len(self._cos), num_positions)
        cos, sin = rotary_table(self._policy.decoder, num_positions)
        self._cos = cos[:, None]
        half = sin.shape[-1] // 2
        self._sin = torch.cat([-sin[:, :half], sin[:, half:]], -1)[:, None]


def _join(modules: Sequence[nn.Linear]) -> PackableLinear:
    """Returns one layer that concatenates the outputs of linear layers with the same input."""
    first, *others = modules
    if not others:
        return make_linear(first.weight, first.bias)
    biases: list[Tensor] = [m.bias for m in modules]
    bias = None if first.bias is None else torch.cat(biases)
    return make_linear(torch.cat([m.weight for m in modules]), bias)


class RmsNorm:
    """RMS norm; in float32 it runs half as many ATen operators as F.rms_norm."""

    def __init__(self, module: NormModule) -> None:
        self._weight: Tensor = module.weight
        self._epsilon: float = module.variance_epsilon
        size = len(self._weight)
        self._scaled_weight = self._weight * size**0.5
        self._scaled_epsilon = self._weight.new_tensor(self._epsilon * size)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return F.rms_norm(x, self._weight.shape, self._weight, self._epsilon)
        # With d features: x / sqrt(mean(x²) + ε) = √d · x / sqrt(sum(x²) + d · ε)
        square_sum = (x * x).sum(-1, keepdim=True)
        return (x * square_sum.add_(self._scaled_epsilon).rsqrt_()).mul_(self._scaled_weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [N, H, D]
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat([second, first], -1), sin)
