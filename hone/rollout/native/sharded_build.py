"""Builds the native engine of one tensor-parallel rank, with the decoder of its shard.

The outputs of attention and MLP are summed over the ranks.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from hone.config.model import ModelConfig
from hone.models.decoder_layer import DecoderLayer, LayerModule
from hone.models.load import empty_causal_lm
from hone.ops.packed_linear import PackableLinear
from hone.rollout.contract import RolloutEngine, RolloutError, RolloutSpec
from hone.rollout.native.core import NativeCore
from hone.rollout.native.decoder import ModuleDecoder, PlainDecoder, RmsNorm
from hone.rollout.native.engine import Core
from hone.rollout.native.follower import FollowerRollout
from hone.rollout.native.fused_decoder import FusedDecoder
from hone.rollout.native.kernels_reference import kernels_for
from hone.rollout.native.leader import LeaderRollout
from hone.rollout.native.paged_core import PagedCore
from hone.rollout.native.peers import Peers
from hone.rollout.native.sharded_policy import ShardedPolicy, check_shardable
from hone.rollout.weights import load_weights


def check_sharding(size: int, world_size: int, model: ModelConfig) -> None:
    """Raises if `world_size` ranks cannot decode with `size` ranks per model; loads no weights."""
    if world_size % size:
        raise RolloutError(
            f"rollout.tensor_model_parallel_size={size} does not divide the {world_size} rollout "
            f"rank(s); use a divisor of {world_size}"
        )
    lm = empty_causal_lm(model.path, dtype=torch.float32, override_config=model.override_config)
    check_shardable(lm, size, model.path)


def build_sharded(spec: RolloutSpec, peers: Peers) -> RolloutEngine:
    """Returns this rank's engine with a shard of the model; all ranks of the model call this together."""
    policy = ShardedPolicy(spec.load_policy().lm, peers, spec.device)
    if spec.current_weights is not None:
        load_weights(policy, policy.shards(spec.current_weights()))
    core = (
        build_paged_core(spec, policy)
        if spec.device.type == "cuda"
        else build_slot_core(spec, policy)
    )
    return LeaderRollout(core, peers) if peers.rank == 0 else FollowerRollout(core, peers)


def build_slot_core(spec: RolloutSpec, policy: ShardedPolicy) -> Core:
    """Returns the core for a CPU; all ranks pad batches to a multiple of the same number of rows."""
    core = NativeCore(
        policy,
        eos_ids=spec.eos_ids,
        max_num_seqs=spec.config.max_num_seqs,
        max_num_batched_tokens=spec.config.max_num_batched_tokens,
        tokenizer=spec.tokenizer,
        forward=ShardedPlainDecoder(policy) if policy.uses_plain_decoder else None,
    )
    core.row_multiple = -policy.peers.min_over_ranks(-core.row_multiple)  # the maximum of all ranks
    return core


def build_paged_core(spec: RolloutSpec, policy: ShardedPolicy, blocks: int | None = None) -> Core:
    """Returns the core for a GPU, without CUDA graphs; all ranks have the same number of blocks."""
    config, max_model_len = spec.config, spec.config.max_total_tokens
    decoder = (
        ShardedFusedDecoder(policy, kernels_for(spec.device), max_model_len)
        if policy.uses_plain_decoder
        else ModuleDecoder(policy)
    )
    build = functools.partial(
        PagedCore,
        policy,
        eos_ids=spec.eos_ids,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tokenizer=spec.tokenizer,
        enforce_eager=True,
        prefix_caching=config.enable_prefix_caching,
        forward=decoder,
    )
    core = build(blocks=blocks)
    blocks = policy.peers.min_over_ranks(core.cache.num_blocks)
    return core if core.cache.num_blocks == blocks else build(blocks=blocks)


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

    _policy: ShardedPolicy

    def _read_layer(self, layer: LayerModule) -> DecoderLayer[PackableLinear, RmsNorm]:
        layer_shard, peers = super()._read_layer(layer), self._policy.peers
        return replace(
            layer_shard,
            out=_RowParallelLinear(layer_shard.out, peers),
            down=_RowParallelLinear(layer_shard.down, peers),
        )

    def _embed(self, ids: Tensor) -> Tensor:
        return self._policy.embed(ids)


class ShardedFusedDecoder(FusedDecoder):
    """A `FusedDecoder` over this rank's shard of the policy, on a GPU."""

    _policy: ShardedPolicy

    def _embed(self, ids: Tensor) -> Tensor:
        return self._policy.embed(ids)

    def _residual_term(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._policy.peers.all_reduce(super()._residual_term(x, weight, bias))
