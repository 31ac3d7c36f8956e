"""The decoder forwards of a sharded policy: attention and MLP outputs are summed over the ranks."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from torch import Tensor

from hone.models.decoder_layer import DecoderLayer, LayerModule
from hone.ops.packed_linear import PackableLinear
from hone.rollout.native.decoder import PlainDecoder, _RmsNorm
from hone.rollout.native.fused_decoder import FusedDecoder
from hone.rollout.native.peers import Peers
from hone.rollout.native.sharded_policy import ShardedPolicy


class _RowParallelLinear:
    """A row-parallel linear layer: its output is summed over the ranks."""

    def __init__(self, linear: PackableLinear, peers: Peers) -> None:
        self._linear, self._peers = linear, peers

    def __call__(self, x: Tensor) -> Tensor:
        return self._peers.all_reduce(self._linear(x))

    def forward_add(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x).add_(other)


class ShardedPlainDecoder(PlainDecoder):
    """A `PlainDecoder` over this rank's shard of the policy, on a CPU."""

    def __init__(self, policy: ShardedPolicy) -> None:
        super().__init__(policy)
        self._sharded_policy = policy

    def _read_layer(self, layer: LayerModule) -> DecoderLayer[PackableLinear, _RmsNorm]:
        layer_shard, peers = super()._read_layer(layer), self._sharded_policy.peers
        return replace(
            layer_shard,
            out=_RowParallelLinear(layer_shard.out, peers),
            down=_RowParallelLinear(layer_shard.down, peers),
        )

    def _embed(self, ids: Tensor) -> Tensor:
        return self._sharded_policy.embed(ids)


class ShardedFusedDecoder(FusedDecoder):
    """A `FusedDecoder` over this rank's shard of the policy, on a GPU."""

    def __init__(self, policy: ShardedPolicy, kernels: ModuleType, max_positions: int) -> None:
        super().__init__(policy, kernels, max_positions)
        self._sharded_policy = policy

    def _embed(self, ids: Tensor) -> Tensor:
        return self._sharded_policy.embed(ids)

    def _residual_term(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._sharded_policy.peers.all_reduce(super()._residual_term(x, weight, bias))
