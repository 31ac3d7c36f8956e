"""A policy sharded over tensor-parallel ranks (heads, MLP columns, vocabulary rows), and its engine.

Each rank receives whole tensors one at a time and keeps its shard. Attention and MLP each end with an
all-reduce; logits are gathered, so every rank samples the same token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.config.model import ModelConfig
from hone.models.decoder_layer import DecoderLayer, fits_decoder_layer
from hone.models.families import SHARDED_FAMILIES, UnsupportedModel, key_shape
from hone.models.load import empty_causal_lm
from hone.models.policy import PolicyModel
from hone.ops.packed_linear import PackableLinear
from hone.rollout.build import build_cpu_core, paged_core_factory
from hone.rollout.contract import RolloutEngine, RolloutError, RolloutSpec, Weights
from hone.rollout.native.decoder import FusedDecoder, ModuleDecoder, PrepackedDecoder, RmsNorm
from hone.rollout.native.engine import Core
from hone.rollout.native.follower import FollowerRollout
from hone.rollout.native.kernels_reference import kernels_for
from hone.rollout.native.leader import LeaderRollout
from hone.rollout.native.peers import Peers
from hone.rollout.weights import check_name_and_shape, load_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

_COLUMN_PARALLEL_LAYERS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    *("mlp.gate_proj", "mlp.up_proj"),
)
"""The linear layers whose weights are split by output feature."""
_ROW_PARALLEL_LAYERS = ("self_attn.o_proj", "mlp.down_proj")
"""The linear layers whose weights are split by input feature; their outputs are summed over the ranks."""
_KV_LAYERS = ("self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class Shard:
    """The part of a tensor on one rank: a range of one dimension, zero-padded to `width`."""

    dim: int
    start: int
    width: int

    def take(self, whole: Tensor) -> Tensor:
        """Returns this part of a whole tensor."""
        size = whole.shape[self.dim]
        start = min(self.start, size)
        part = whole.narrow(self.dim, start, min(self.width, size - start))
        missing = self.width - part.shape[self.dim]
        if not missing:
            return part
        padding = [0, 0] * (whole.dim() - 1 - self.dim) + [0, missing]
        return F.pad(part, padding)


def check_shardable(lm: PreTrainedModel, size: int, path: str) -> None:
    """Raises if `size` ranks cannot shard the model, whose parameters are on the meta device."""
    text_config, setting = lm.config.get_text_config(), f"rollout.tensor_model_parallel_size={size}"
    kv_heads, head_dim = key_shape(text_config)
    unknown_names: list[str] = []
    if lm.config.model_type in SHARDED_FAMILIES:
        layers = getattr(lm, lm.base_model_prefix).layers
        unknown_names = sorted(
            {name for layer in layers for name in _unknown_parameters(layer, head_dim)}
        )
    if lm.config.model_type not in SHARDED_FAMILIES or unknown_names:
        reason = (
            f", because its layers have {', '.join(unknown_names[:3])}" if unknown_names else ""
        )
        raise UnsupportedModel(
            f"{setting}: {path} is a {lm.config.model_type} model, which the native engine does "
            f"not shard{reason}. Use 1, rollout.name=vllm, or a model family that docs/engines.md "
            "lists"
        )
    for count, name in (
        (text_config.num_attention_heads, "attention heads"),
        (kv_heads, "key-value heads"),
    ):
        if count % size and not (name == "key-value heads" and size % count == 0):
            raise UnsupportedModel(
                f"{setting}: {path} has {count} {name}, which {size} ranks cannot share evenly; "
                f"use a divisor of {count}"
            )


def _unknown_parameters(layer: nn.Module, head_dim: int) -> Iterator[str]:
    """Yields the names of parameters that belong neither to a layer that is split nor to a norm."""
    for name, parameter in layer.named_parameters():
        module, _, _ = name.rpartition(".")
        is_split = module in _COLUMN_PARALLEL_LAYERS or module in _ROW_PARALLEL_LAYERS
        if is_split or parameter.numel() == 1:
            continue
        in_sublayer = name.startswith(("self_attn.", "mlp."))
        if parameter.dim() > 1 or (in_sublayer and len(parameter) != head_dim):
            yield name


class ShardedPolicy(PolicyModel):
    """One rank's shard of a causal language model."""

    logits_are_head_output = False  # the head's output is gathered over the ranks

    def __init__(self, lm: PreTrainedModel, peers: Peers, device: torch.device) -> None:
        """Allocates the shard on `device`; the parameters of `lm` are on the meta device."""
        super().__init__(lm)
        self.peers = peers
        self._kv_heads, head_dim = key_shape(lm.config.get_text_config())
        self._head_dim = head_dim
        self._vocab_size = lm.get_output_embeddings().weight.shape[0]
        self._vocab_rows = -(-self._vocab_size // peers.size)
        self._whole_parameters = dict(lm.named_parameters(remove_duplicate=False))
        self._shards = {
            name: self._make_shard(name, p) for name, p in self._whole_parameters.items()
        }
        self._allocate(device)
        self.lm.to(device)
        self.uses_prepacked_decoder = fits_decoder_layer(self)
        if not self.uses_prepacked_decoder:
            self._register_hooks()

    @property
    def key_shape(self) -> tuple[int, int]:
        return max(1, self._kv_heads // self.peers.size), self._head_dim

    def embed(self, ids: Tensor) -> Tensor:
        """Returns the input embeddings [N, d] of token ids [N]."""
        local_ids, is_local = self._local_ids(ids)
        x = F.embedding(local_ids, self.decoder.embed_tokens.weight)
        return self.peers.all_reduce(x * is_local[..., None])

    def logits(self, hidden: Tensor) -> Tensor:
        return self.peers.gather_columns(super().logits(hidden))[:, : self._vocab_size]

    def shards(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's shard of each whole tensor; raises for a wrong name or shape."""
        for name, tensor in weights:
            check_name_and_shape(name, tensor, self._whole_parameters)
            yield name, self._local_part(name, tensor)

    def _local_part(self, name: str, tensor: Tensor) -> Tensor:
        shard = self._shards[name]
        if shard is not None:
            return shard.take(tensor)
        # Only rank 0 adds the bias of an output that is summed over the ranks.
        is_summed = name.endswith(tuple(f"{module}.bias" for module in _ROW_PARALLEL_LAYERS))
        return torch.zeros_like(tensor) if is_summed and self.peers.rank else tensor

    def _make_shard(self, name: str, parameter: Tensor) -> Shard | None:
        """Returns this rank's shard of a parameter, or None if it is not split."""
        rank, size = self.peers.rank, self.peers.size
        module = ".".join(name.split(".")[-3:-1])
        if module in _KV_LAYERS and self._kv_heads < size:  # several ranks have the same head
            return Shard(0, rank * self._kv_heads // size * self._head_dim, self._head_dim)
        if module in _COLUMN_PARALLEL_LAYERS or module in _ROW_PARALLEL_LAYERS:
            dim = 1 if module in _ROW_PARALLEL_LAYERS else 0
            if dim >= parameter.dim():
                return None  # the bias of a summed output
            width = -(-parameter.shape[dim] // size)
            return Shard(dim, rank * width, width)
        embeddings = (self.lm.get_input_embeddings(), self.lm.get_output_embeddings())
        if any(parameter is p for owner in embeddings for p in owner.parameters()):
            return Shard(0, rank * self._vocab_rows, self._vocab_rows)
        return None

    def _allocate(self, device: torch.device) -> None:
        """Replaces the parameters by this rank's shards; tied parameters stay tied."""
        shard_by_id: dict[int, nn.Parameter] = {}  # by id(whole parameter)
        for name, whole in self._whole_parameters.items():
            if id(whole) not in shard_by_id:
                shape = self._local_part(name, whole).shape
                shard = torch.zeros(shape, dtype=whole.dtype, device=device)
                shard_by_id[id(whole)] = nn.Parameter(shard, requires_grad=False)
            owner, _, attribute = name.rpartition(".")
            setattr(self.lm.get_submodule(owner), attribute, shard_by_id[id(whole)])

    def _local_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the row of each id in this rank's embedding, and whether this rank has it."""
        local_ids = ids - self.peers.rank * self._vocab_rows
        is_local = (local_ids >= 0) & (local_ids < self._vocab_rows)
        return local_ids.clamp(0, self._vocab_rows - 1), is_local

    def _register_hooks(self) -> None:
        """Registers hooks, so that the model's own modules compute on shards."""
        masks: list[Tensor] = []  # which ids of the current embedding call this rank has

        def to_local_ids(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            local_ids, is_local = self._local_ids(args[0])
            masks[:] = [is_local]
            return (local_ids, *args[1:])

        def sum_embeddings(_: nn.Module, args: tuple[Tensor, ...], x: Tensor) -> Tensor:
            return self.peers.all_reduce(x * masks.pop()[..., None])

        def sum_outputs(_: nn.Module, args: tuple[Tensor, ...], x: Tensor) -> Tensor:
            return self.peers.all_reduce(x)

        embedding = self.lm.get_input_embeddings()
        embedding.register_forward_pre_hook(to_local_ids)
        embedding.register_forward_hook(sum_embeddings)
        for layer in self.decoder.layers:
            for name in _ROW_PARALLEL_LAYERS:
                layer.get_submodule(name).register_forward_hook(sum_outputs)


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
    on_gpu = spec.device.type == "cuda"
    core = build_paged_shard(spec, policy) if on_gpu else build_cpu_shard(spec, policy)
    if peers.rank == 0:
        return LeaderRollout(core, peers, keep_stale_kv=spec.keeps_stale_kv)
    return FollowerRollout(core, peers)


def build_cpu_shard(spec: RolloutSpec, policy: ShardedPolicy) -> Core:
    """Builds this rank's core for a CPU; all ranks have the same `row_multiple`.

    Ranks decode the same batch together, so they must pad it to the same number of rows.
    """
    forward = ShardedPrepackedDecoder(policy) if policy.uses_prepacked_decoder else None
    core = build_cpu_core(spec, policy, forward)
    core.row_multiple = -policy.peers.min_over_ranks(-core.row_multiple)  # the maximum of all ranks
    return core


def build_paged_shard(spec: RolloutSpec, policy: ShardedPolicy, blocks: int | None = None) -> Core:
    """Builds this rank's core for a GPU, without CUDA graphs; all ranks have the same number of blocks."""
    forward: FusedDecoder | ModuleDecoder = ModuleDecoder(policy)
    if policy.uses_prepacked_decoder:
        kernels, max_positions = kernels_for(spec.device), spec.config.max_total_tokens
        forward = ShardedFusedDecoder(policy, kernels, max_positions)
    build_core = partial(paged_core_factory(spec, policy), enforce_eager=True, forward=forward)
    core = build_core(blocks=blocks)
    blocks = policy.peers.min_over_ranks(core.cache.num_blocks)
    return core if core.cache.num_blocks == blocks else build_core(blocks=blocks)


class _RowParallelLinear:
    """A row-parallel linear layer: its output is summed over the ranks."""

    def __init__(self, linear: PackableLinear, peers: Peers) -> None:
        self._linear, self._peers = linear, peers

    def __call__(self, x: Tensor) -> Tensor:
        return self._peers.all_reduce(self._linear(x))

    def forward_add(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x).add_(other)


class ShardedPrepackedDecoder(PrepackedDecoder):
    """A `PrepackedDecoder` over this rank's shard of the policy, on a CPU."""

    _policy: ShardedPolicy

    def _read_layer(self, layer: LlamaDecoderLayer) -> DecoderLayer[PackableLinear, RmsNorm]:
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
