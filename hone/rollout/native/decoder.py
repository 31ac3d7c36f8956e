"""The decoder forwards of the native engine, over the policy's own parameters.

`PrepackedDecoder` (CPU) and `FusedDecoder` (GPU) compute the layers of models/decoder_layer.py without module
overhead. `ModuleDecoder` runs the modules of any other model. exact_decoder.py has the forward of exact
mode, and sharding.py has the forwards of tensor parallelism.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.decoder_layer import (
    DecoderLayer,
    norm_parameters,
    read_layer,
    rotary_table,
)
from hone.models.policy import Layout, PolicyModel, forward_options
from hone.models.routing import EXPERT_DTYPE, Routing
from hone.ops.decoder import Linear, Norm
from hone.ops.logprobs import matmul_fp32
from hone.ops.packed_linear import PackableLinear, make_linear
from hone.protocol.rows import to_device
from hone.rollout.native.kernels_reference import RotaryTable
from hone.rollout.native.paged_layouts import PagedDecode, PagedPrefill

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm


class ModuleDecoder:
    """Runs the modules of any Hugging Face decoder, without copies of the parameters."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy

    def refresh(self) -> None: ...

    def invalidate(self) -> None: ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [M, V] float32 of hidden states [M, d], before temperature."""
        return self._policy.logits(hidden)

    def __call__(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Returns hidden states [N, d] of token ids [N] at positions [N]."""
        out = self._policy.decoder(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            **forward_options(self._policy.decoder, layout),
        )
        return out.last_hidden_state[0]


class PrepackedDecoder:
    """Computes the layers of models/decoder_layer.py with prepacked copies of the weights (oneDNN)."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        # [positions, 1, head_dim]; the first half of each row of `_sin` is negated
        self._cos = self._sin = torch.empty(0)
        self.invalidate()

    def invalidate(self) -> None:
        """Drops everything that was computed from the parameters."""
        self._parameters: list[Tensor] = []
        self._prepacked_versions: list[tuple[int, int]] = []
        self._layers: list[DecoderLayer[PackableLinear, RmsNorm]] = []
        self._lm_head: PackableLinear | None = None

    def refresh(self) -> None:
        """Reads the parameters again if training has written them or sharding has moved them."""
        if not self._parameters:
            self._parameters = list(self._policy.parameters())
        # Every write by torch increments `_version`; sharding changes the address.
        versions = [(p.data_ptr(), p._version) for p in self._parameters]
        if versions == self._prepacked_versions:
            return
        decoder = self._policy.decoder
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._norm = RmsNorm(decoder.norm)
        self._layers = [self._read_layer(layer) for layer in decoder.layers]
        if self._policy.logits_are_head_output:
            self._lm_head = _join_and_prepack([self._policy.lm.get_output_embeddings()])
        self._prepacked_versions = versions

    def _read_layer(self, layer: LlamaDecoderLayer) -> DecoderLayer[PackableLinear, RmsNorm]:
        return read_layer(layer, join=_join_and_prepack, norm=RmsNorm)

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


def _join_and_prepack(modules: Sequence[nn.Linear]) -> PackableLinear:
    """Returns one layer that concatenates the outputs of linear layers with the same input."""
    first, *others = modules
    if not others:
        return make_linear(first.weight, first.bias)
    biases: list[Tensor] = [module.bias for module in modules]
    bias = None if first.bias is None else torch.cat(biases)
    return make_linear(torch.cat([module.weight for module in modules]), bias)


class RmsNorm:
    """RMS norm with half as many ATen operators as F.rms_norm in float32."""

    def __init__(self, module: LlamaRMSNorm) -> None:
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


class JoinedDecoder:
    """The parameters of a decoder, with joined query-key-value and gate-up weights, and a rotary table."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._cos = self._sin = torch.empty(0)  # [positions, head_dim]
        # `extend_rotary_table` keeps old tables alive, because captured graphs still read them.
        self._old_rotary_tables: list[Tensor] = []
        self._read_parameters()

    def refresh(self) -> None:
        """Reads the parameters again if their memory has moved."""
        if self._addresses != self._policy.addresses():
            self._read_parameters()

    @torch.no_grad()
    def _read_parameters(self) -> None:
        decoder = self._policy.decoder
        # Tensors that are created in inference mode cannot be trained.
        with torch.inference_mode(False):
            self._layers: list[DecoderLayer[Linear, Norm]] = [
                read_layer(layer, join=_join_linears, norm=norm_parameters)
                for layer in decoder.layers
            ]
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._norm = norm_parameters(decoder.norm)
        self._addresses = self._policy.addresses()

    @torch.no_grad()
    def extend_rotary_table(self, num_positions: int) -> None:
        """Extends the rotary table to at least `num_positions` positions."""
        if num_positions <= len(self._cos):
            return
        self._old_rotary_tables += [self._cos, self._sin]
        with torch.inference_mode(False):
            self._cos, self._sin = rotary_table(self._policy.decoder, num_positions)


class FusedDecoder(JoinedDecoder):
    """Computes the layers of models/decoder_layer.py over the paged cache, with joined weights."""

    def __init__(self, policy: PolicyModel, kernels: ModuleType, max_positions: int) -> None:
        super().__init__(policy)
        self._kernels = kernels
        self.extend_rotary_table(max_positions)

    def __call__(
        self, ids: Tensor, positions: Tensor, layout: PagedPrefill | PagedDecode
    ) -> Tensor:
        kernels = self._kernels
        x = self._embed(ids)
        h, residual = kernels.add_rms_norm(x, None, *self._layers[0].norm_in)
        norms = [*(layer.norm_in for layer in self._layers[1:]), self._norm]
        for layer, next_norm in zip(self._layers, norms, strict=True):
            q_norm, k_norm = (
                norm.weight if norm is not None else None for norm in (layer.q_norm, layer.k_norm)
            )
            rotary = RotaryTable(self._cos, self._sin, q_norm, k_norm, self._norm.eps)
            out = layout.attend_qkv(F.linear(h, *layer.qkv), rotary, layer.attention)
            h, residual = kernels.add_rms_norm(
                self._residual_term(out.flatten(1), *layer.out), residual, *layer.norm_mlp
            )
            gated = kernels.silu_mul(F.linear(h, *layer.gate_up))
            h, residual = kernels.add_rms_norm(
                self._residual_term(gated, *layer.down), residual, *next_norm
            )
        return h

    def _embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._embedding)

    def _residual_term(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns a term of the residual stream; without a bias, the term is float32, as in training."""
        return matmul_fp32(x, weight) if bias is None else F.linear(x, weight, bias)


def _join_linears(modules: Sequence[nn.Linear]) -> Linear:
    """Returns one joined weight and bias; the modules' parameters become views of them."""
    first = modules[0]
    if len(modules) == 1:
        return Linear(first.weight, first.bias)
    biases = [module.bias for module in modules if module.bias is not None]
    assert len(biases) in (0, len(modules)), "either all joined modules have a bias or none has"
    return Linear(
        _join_parameters([module.weight for module in modules]),
        _join_parameters(biases) if biases else None,
    )


def _join_parameters(parameters: Sequence[Tensor]) -> Tensor:
    """Returns the concatenated parameters; afterwards, each parameter is a view of the result."""
    first = parameters[0].detach()
    are_adjacent = all(
        following.untyped_storage().data_ptr() == previous.untyped_storage().data_ptr()
        and following.data_ptr() == previous.data_ptr() + previous.nbytes
        for previous, following in itertools.pairwise(parameters)
    )
    if are_adjacent:
        rows = sum(len(p) for p in parameters)
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    joined = torch.cat([p.detach() for p in parameters])
    views = joined.split([len(p) for p in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view
    return joined


def can_join_parameters(policy: PolicyModel) -> bool:
    """Returns whether parameters may be moved into joined weights: they are plain tensors.

    FSDP2 owns the memory of its parameters, even while they are gathered.
    """
    if any(hasattr(module, "unshard") for module in policy.modules()):
        return False
    return all(type(p) is nn.Parameter and type(p.data) is Tensor for p in policy.parameters())


class ExpertCache:
    """The routed experts of all slots of a paged cache: [blocks, block_size, layers, k]."""

    def __init__(
        self, routing: Routing, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self._block_size, self._device = block_size, device
        shape = (num_blocks, block_size, routing.layers, routing.top_k)
        self._memory = torch.zeros(shape, dtype=EXPERT_DTYPE, device=device)
        self._slots = self._memory.flatten(0, 1)

    def write(self, slots: Tensor, layer: int, experts: Tensor) -> None:
        self._slots[:, layer].index_copy_(0, slots.long(), experts.to(EXPERT_DTYPE))

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if sources:
            target = to_device(torch.tensor(targets), self._device)
            source = to_device(torch.tensor(sources), self._device)
            self._memory[target] = self._memory[source]

    def read(self, blocks: Sequence[int], num_tokens: int) -> Tensor:
        """Returns the experts [num_tokens, layers, k] of a sequence's first tokens, on the CPU."""
        num_blocks = -(-num_tokens // self._block_size)
        block_ids = to_device(torch.tensor(list(blocks[:num_blocks])), self._device)
        return self._memory[block_ids].flatten(0, 1)[:num_tokens].cpu()


class RecordingDecoder(ModuleDecoder):
    """Runs the policy's modules and writes the routed experts of every token to the cache."""

    def __init__(self, policy: PolicyModel, cache: ExpertCache) -> None:
        super().__init__(policy)
        self._cache = cache
        assert policy.routing is not None
        self._routing = policy.routing

    def __call__(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        assert isinstance(layout, PagedPrefill | PagedDecode)
        slots = layout.slots
        routing = self._routing
        routing.replay = None
        routing.record = lambda layer, experts: self._cache.write(slots, layer, experts)
        try:
            return super().__call__(ids, positions, layout)
        finally:
            routing.record = None
