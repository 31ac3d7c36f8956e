"""The decoder forward on a GPU, with eight kernels per layer.

The query, key and value weights of the policy are joined into one tensor, the gate and up weights
into another, and the module's parameters become views of these tensors. So each joined weight is
one matrix product, and there is no copy to update.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.decoder_layer import DecoderLayer, NormModule, read_layer, rotary_table
from hone.models.policy import PolicyModel
from hone.ops.decoder_halves import Linear, Norm
from hone.ops.logprobs import matmul_fp32
from hone.rollout.native.kernels_reference import RotaryTable
from hone.rollout.native.paged_layouts import PagedDecode, PagedPrefill


class JoinedDecoder:
    """The parameters of a decoder, with joined query-key-value and gate-up weights, and a rotary table."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._cos = self._sin = torch.empty(0)  # [positions, head_dim]
        # Captured graphs still read old tables after `extend_rotary_table`.
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
                read_layer(layer, join=_join_linears, norm=_norm_parameters)
                for layer in decoder.layers
            ]
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._norm = _norm_parameters(decoder.norm)
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
    """Computes hidden states over the paged cache, for the layers of models/decoder_layer.py."""

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
                n.weight if n is not None else None for n in (layer.q_norm, layer.k_norm)
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


def _norm_parameters(module: NormModule) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def _join_linears(modules: Sequence[nn.Linear]) -> Linear:
    """Returns one joined weight and bias; the modules' parameters become views of them."""
    first = modules[0]
    if len(modules) == 1:
        return Linear(first.weight, first.bias)
    biases = [m.bias for m in modules if m.bias is not None]
    assert len(biases) in (0, len(modules)), "either all joined modules have a bias or none has"
    return Linear(
        _join_parameters([m.weight for m in modules]), _join_parameters(biases) if biases else None
    )


def _join_parameters(parameters: Sequence[Tensor]) -> Tensor:
    """Returns the concatenated parameters; afterwards, each parameter is a view of the result."""
    first = parameters[0].detach()
    are_adjacent = all(
        b.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
        and b.data_ptr() == a.data_ptr() + a.nbytes
        for a, b in itertools.pairwise(parameters)
    )
    if are_adjacent:
        rows = sum(len(p) for p in parameters)
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    joined = torch.cat([p.detach() for p in parameters])
    views = joined.split([len(p) for p in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view
    return joined


def can_join(policy: PolicyModel) -> bool:
    """Whether the parameters are plain tensors whose memory may be moved.

    FSDP2 owns the memory of its parameters, even while they are gathered.
    """
    if any(hasattr(module, "unshard") for module in policy.modules()):
        return False
    return all(type(p) is nn.Parameter and type(p.data) is Tensor for p in policy.parameters())
