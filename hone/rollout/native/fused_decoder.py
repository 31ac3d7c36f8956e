"""One forward of a plain decoder in few kernels: eight a layer, from the module's own parameters.

Query, key and value weights lie in one block of memory, gate and up weights in another, and the
module's parameters are views of the blocks: one matrix product each, and still nothing to synchronise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.attention import window_of
from hone.models.plain_shape import PlainLayer, rotary_table
from hone.models.policy import PolicyModel
from hone.ops.wide_product import wide_product
from hone.rollout.native.kernels_reference import Turn
from hone.rollout.native.paged_layouts import PagedDecode, PagedPrefill


class Layer(NamedTuple):
    """The parameters of one layer, each (weight, bias) where it is a linear map."""

    qkv: tuple[Tensor, Tensor | None]
    out: tuple[Tensor, Tensor | None]
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    norm_in: tuple[Tensor, float]
    norm_mlp: tuple[Tensor, float]
    q_norm: Tensor | None
    k_norm: Tensor | None
    scaling: float
    window: int | None


class JoinedDecoder:
    """A plain decoder's parameters in few blocks of memory, and its rotary tables."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._cos = self._sin = torch.empty(0)  # [W, D]
        self._outgrown: list[Tensor] = []  # recorded graphs still read them
        self._layers: list[Layer] = []
        self._read()

    def refresh(self) -> None:
        """Look the parameters up anew if their memory has changed."""
        if self._addresses != self._policy.addresses():
            self._read()

    @torch.no_grad()
    def _read(self) -> None:
        decoder = self._policy.decoder
        # Parameters made in inference mode could not be trained.
        with torch.inference_mode(False):
            self._layers = [read_layer(layer) for layer in decoder.layers]
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._norm: tuple[Tensor, float] = (decoder.norm.weight, decoder.norm.variance_epsilon)
        self._addresses = self._policy.addresses()

    @torch.no_grad()
    def reach(self, width: int) -> None:
        """Have rotary tables for positions below `width`."""
        if width <= len(self._cos):
            return
        self._outgrown += [self._cos, self._sin]
        with torch.inference_mode(False):
            self._cos, self._sin = rotary_table(self._policy.decoder, width)


class FusedDecoder(JoinedDecoder):
    """Hidden states over paged layouts, for the families that decoder.py calls plain."""

    def __init__(self, policy: PolicyModel, kernels: ModuleType, max_positions: int) -> None:
        super().__init__(policy)
        self._kernels = kernels
        self.reach(max_positions)

    def __call__(
        self, ids: Tensor, positions: Tensor, layout: PagedPrefill | PagedDecode
    ) -> Tensor:
        kernels = self._kernels
        x = F.embedding(ids, self._embedding)
        h, residual = kernels.add_rms_norm(x, None, *self._layers[0].norm_in)
        for index, layer in enumerate(self._layers):
            turn = Turn(self._cos, self._sin, layer.q_norm, layer.k_norm, self._norm[1])
            qkv = F.linear(h, *layer.qkv)
            out = layout.attend_joined(
                qkv, turn, layer=index, scaling=layer.scaling, window=layer.window
            )
            o = _wide(out.flatten(1), *layer.out)
            h, residual = kernels.add_rms_norm(o, residual, *layer.norm_mlp)
            mlp = _wide(kernels.silu_mul(F.linear(h, *layer.gate_up)), *layer.down)
            last = index + 1 == len(self._layers)
            norm = self._norm if last else self._layers[index + 1].norm_in
            h, residual = kernels.add_rms_norm(mlp, residual, *norm)
        return h


def _wide(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the residual sum takes up: not rounded to 16 bits before, as in training."""
    return wide_product(x, weight) if bias is None else F.linear(x, weight, bias)


def read_layer(layer: PlainLayer) -> Layer:
    a, m = layer.self_attn, layer.mlp
    return Layer(
        _joined([a.q_proj, a.k_proj, a.v_proj]),
        (a.o_proj.weight, a.o_proj.bias),
        _joined([m.gate_proj, m.up_proj]),
        (m.down_proj.weight, m.down_proj.bias),
        (layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon),
        (layer.post_attention_layernorm.weight, layer.post_attention_layernorm.variance_epsilon),
        a.q_norm.weight if hasattr(a, "q_norm") else None,
        a.k_norm.weight if hasattr(a, "k_norm") else None,
        a.scaling,
        window_of(a),
    )


def _joined(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One weight (and bias) whose rows are the given ones'; they become views of it."""
    weight = _join([m.weight for m in linears])
    biases = [m.bias for m in linears if m.bias is not None]
    assert len(biases) in (0, len(linears)), "a bias of some parts only is of no known family"
    return weight, _join(biases) if biases else None


def _join(parameters: Sequence[Tensor]) -> Tensor:
    first = parameters[0].detach()
    if _adjacent(parameters):
        rows = sum(len(p) for p in parameters)
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    block = torch.cat([p.detach() for p in parameters])
    for parameter, piece in zip(parameters, block.split([len(p) for p in parameters]), strict=True):
        parameter.data = piece
    return block


def _adjacent(parameters: Sequence[Tensor]) -> bool:
    """Whether each lies right behind the one before it, in one block of memory."""
    pairs = itertools.pairwise(parameters)
    return all(
        b.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
        and b.data_ptr() == a.data_ptr() + a.nbytes
        for a, b in pairs
    )


def can_join(policy: PolicyModel) -> bool:
    """Whether the parameters are whole, plain tensors whose memory may be arranged.

    FSDP2 gathers into memory of its own: a gathered parameter is whole, and not ours to move.
    """
    if any(hasattr(module, "unshard") for module in policy.modules()):
        return False
    return all(type(p) is nn.Parameter for p in policy.parameters()) and all(
        type(p.data) is Tensor for p in policy.parameters()
    )
