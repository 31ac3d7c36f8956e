"""The mapping between Hugging Face tensors and the parameters of a megatron-core stage.

A megatron-core matrix contains several Hugging Face tensors, and a tensor-parallel rank holds a shard of it:
`to_local` returns the shard of one rank, `to_full` joins the shards of all ranks. `StageTensors` applies
both to a stage and runs the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hone.models.families import key_shape
from hone.models.policy import Model

if TYPE_CHECKING:  # the mapping itself does not need megatron-core
    from hone.engine.megatron.model import Stage

Kind = Literal["same", "columns", "vocabulary", "qkv", "gate_up", "experts_gate_up", "experts_down"]


@dataclass(frozen=True)
class Entry:
    """A parameter of one stage and the Hugging Face tensors that it contains."""

    kind: Kind
    stage_name: str
    """The name of the parameter in the stage."""
    hf_names: tuple[str, ...]
    """The names of the tensors in the Hugging Face module."""


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of the model and of expert parallelism that the mapping needs."""

    vocab_size: int
    kv_heads: int
    head_dim: int
    expert_parallel_size: int = 1
    """Number of ranks that divide the experts; expert-tensor-parallel ranks split each expert."""


_LAYER_ENTRIES: tuple[tuple[Kind, str, tuple[str, ...]], ...] = (
    ("same", "input_layernorm.weight", ("input_layernorm.weight",)),
    ("same", "pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
    ("same", "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    ("same", "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
    *(
        (
            "qkv",
            f"self_attention.linear_qkv.{suffix}",
            tuple(f"self_attn.{name}_proj.{suffix}" for name in "qkv"),
        )
        for suffix in ("weight", "bias")
    ),
    ("columns", "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
    ("gate_up", "mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    ("columns", "mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
    ("same", "mlp.router.weight", ("mlp.gate.weight",)),
    ("experts_gate_up", "mlp.experts.gate_up", ("mlp.experts.gate_up_proj",)),
    ("experts_down", "mlp.experts.down", ("mlp.experts.down_proj",)),
)


def stage_entries(stage: Stage, *, is_tied: bool) -> list[Entry]:
    """Returns one entry per parameter of a stage; raises for an unknown parameter."""
    names = {name for name, _ in stage.named_parameters()}
    head = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    outside_layers: tuple[tuple[Kind, str, str], ...] = (
        ("vocabulary", "embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("same", "decoder.final_layernorm.weight", "model.norm.weight"),
        ("vocabulary", "output_layer.weight", head),
        ("same", "value_head.weight", "value_head.weight"),
        ("same", "value_head.bias", "value_head.bias"),
    )
    entries = [
        Entry(kind, name, (hf_name,)) for kind, name, hf_name in outside_layers if name in names
    ]
    for index, layer in enumerate(stage.decoder.layers):
        for kind, suffix, hf_suffixes in _LAYER_ENTRIES:
            name = f"decoder.layers.{index}.{suffix}"
            if name in names:
                prefix = f"model.layers.{layer.layer_number - 1}."
                entries.append(
                    Entry(kind, name, tuple(prefix + hf_suffix for hf_suffix in hf_suffixes))
                )
    if missing := names - {entry.stage_name for entry in entries}:
        raise ValueError(f"the weight mapping has no entry for {', '.join(sorted(missing))}")
    return entries


def to_local(
    kind: Kind, tensors: Sequence[Tensor], sizes: ModelSizes, rank: int, num_ranks: int
) -> Tensor:
    """Returns one rank's shard of a parameter from Hugging Face tensors.

    `rank` and `num_ranks` count tensor-parallel ranks, or expert × expert-tensor-parallel ranks for experts.
    """

    def part(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(num_ranks, dim)[rank]

    first_tensor = tensors[0]
    if kind in ("experts_gate_up", "experts_down"):
        return _experts_to_local(kind, first_tensor, sizes.expert_parallel_size, rank, num_ranks)
    if kind == "same":
        return first_tensor
    if kind == "columns":
        return part(first_tensor, 1)
    if kind == "vocabulary":
        return part(F.pad(first_tensor, (0, 0, 0, -first_tensor.shape[0] % num_ranks)), 0)
    if kind == "gate_up":
        return torch.cat([part(tensor, 0) for tensor in tensors])
    # qkv: megatron-core stores one block per key-value head: queries, key, value.
    row_shape = first_tensor.shape[1:]
    heads = [tensor.reshape(sizes.kv_heads, -1, *row_shape) for tensor in tensors]
    return part(torch.cat(heads, 1), 0).reshape(-1, *row_shape)


def to_full(kind: Kind, shards: Sequence[Tensor], sizes: ModelSizes) -> list[Tensor]:
    """Returns Hugging Face tensors from the shards of all ranks, in rank order."""
    if kind == "same":
        return [shards[0]]
    if kind in ("experts_gate_up", "experts_down"):
        return [_experts_to_full(kind, shards, sizes.expert_parallel_size)]
    if kind == "columns":
        return [torch.cat(list(shards), 1)]
    if kind == "vocabulary":
        return [torch.cat(list(shards))[: sizes.vocab_size]]
    if kind == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]
    row_shape, head_dim = shards[0].shape[1:], sizes.head_dim
    heads = torch.cat(list(shards)).view(sizes.kv_heads, -1, *row_shape)
    qkv_sizes = [heads.shape[1] - 2 * head_dim, head_dim, head_dim]
    return [tensor.reshape(-1, *row_shape) for tensor in heads.split(qkv_sizes, 1)]


def _experts_to_local(
    kind: Kind, experts: Tensor, expert_parallel_size: int, rank: int, num_ranks: int
) -> Tensor:
    tensor_size = num_ranks // expert_parallel_size
    expert_rank, tensor_rank = divmod(rank, tensor_size)
    # [experts, 2 × width, d] or [experts, d, width]
    local = experts.chunk(expert_parallel_size)[expert_rank]
    if kind == "experts_down":
        return local.chunk(tensor_size, 2)[tensor_rank]
    halves = [half.chunk(tensor_size, 1)[tensor_rank] for half in local.chunk(2, 1)]
    return torch.cat(halves, 1)


def _experts_to_full(kind: Kind, shards: Sequence[Tensor], expert_parallel_size: int) -> Tensor:
    """Joins the shards of all expert × expert-tensor-parallel ranks, in rank order."""
    tensor_size = len(shards) // expert_parallel_size
    full_experts = []
    for start in range(0, len(shards), tensor_size):
        same_experts = shards[start : start + tensor_size]
        if kind == "experts_down":
            full_experts.append(torch.cat(list(same_experts), 2))
        else:
            halves = [shard.chunk(2, 1) for shard in same_experts]
            full_experts.append(torch.cat([half[i] for i in range(2) for half in halves], 1))
    return torch.cat(full_experts)


@dataclass(frozen=True)
class MegatronGroups:
    """The process groups of this rank."""

    data: dist.ProcessGroup
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    experts: dist.ProcessGroup
    """The expert × expert-tensor-parallel ranks, which together hold every expert once."""
    expert_parallel_size: int

    def group_for(self, kind: Kind) -> dist.ProcessGroup:
        """Returns the group of ranks that together hold a parameter of this kind once."""
        return self.experts if kind.startswith("experts") else self.tensor


class StageTensors:
    """The parameters of a stage, and those of the whole model by Hugging Face name."""

    def __init__(
        self, stage: Stage, module: Model, groups: MegatronGroups, *, is_tied: bool
    ) -> None:
        """Copies this rank's weights from `module`, the whole model on the host, and frees the module."""
        self.groups = groups
        self.parameters = dict(stage.named_parameters())
        config = module.lm.config
        self._sizes = ModelSizes(config.vocab_size, *key_shape(config), groups.expert_parallel_size)
        self.entries = stage_entries(stage, is_tied=is_tied)
        for entry in self.entries:  # megatron-core marks only parameters that it initializes itself
            self.parameters[entry.stage_name].tensor_model_parallel = entry.kind != "same"
        self.load(parameters_by_hf_name(module))
        self.is_tied = is_tied
        self.meta_model = module.to("meta")
        """The whole model on the meta device: names, shapes and configs."""
        if is_tied:
            self.meta_model.lm.tie_weights()
        self._meta_parameters = parameters_by_hf_name(self.meta_model)
        self._entries_of_stages = self._gather_entries()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies this rank's shards from tensors with Hugging Face names."""
        for name, shard in self.local_shards(tensors):
            self.parameters[name].data.copy_(shard)

    def local_shards(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's shards by their names in the stage."""
        for entry in self.entries:
            group = self.groups.group_for(entry.kind)
            full_tensors = [tensors[name].detach() for name in entry.hf_names]
            shard = to_local(entry.kind, full_tensors, self._sizes, group.rank(), group.size())
            yield entry.stage_name, shard

    def gather_stage(
        self, get_local_tensor: Callable[[str], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the full tensors of this stage by Hugging Face name; all ranks of the stage must iterate.

        `get_local_tensor` returns this rank's shard of a parameter by name; it is called before each gather.
        """
        for entry in self.entries:
            if not self._is_copy(entry):
                yield from zip(entry.hf_names, self._gather(entry, get_local_tensor), strict=True)

    def gather_model(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all parameters of the model by Hugging Face name; all ranks must iterate."""
        group = self.groups.pipeline
        for stage_rank, entry in self._entries_of_stages:
            if stage_rank == group.rank():
                gathered = self._gather(entry, self.parameters.__getitem__)
                full_tensors = [tensor.contiguous() for tensor in gathered]
            else:
                example = next(iter(self.parameters.values()))
                full_tensors = [
                    example.new_empty(self._meta_parameters[name].shape) for name in entry.hf_names
                ]
            for name, tensor in zip(entry.hf_names, full_tensors, strict=True):
                if group.size() > 1:
                    dist.broadcast(tensor, dist.get_global_rank(group, stage_rank), group=group)
                yield name, tensor

    def _gather(self, entry: Entry, get_local_tensor: Callable[[str], Tensor]) -> list[Tensor]:
        """Returns the full Hugging Face tensors of an entry; all ranks of its group must call this."""
        local_shard = get_local_tensor(entry.stage_name).detach().contiguous()
        group = self.groups.group_for(entry.kind)
        if group.size() == 1 or entry.kind == "same":
            return to_full(entry.kind, [local_shard], self._sizes)
        shards = [torch.empty_like(local_shard) for _ in range(group.size())]
        dist.all_gather(shards, local_shard, group=group)
        return to_full(entry.kind, shards, self._sizes)

    def _is_copy(self, entry: Entry) -> bool:
        """Whether the parameter is the last stage's copy of a tied embedding."""
        return bool(getattr(self.parameters[entry.stage_name], "shared", False))

    def _gather_entries(self) -> list[tuple[int, Entry]]:
        """Returns the entries of all pipeline stages, each with the pipeline rank of its stage."""
        entries = [entry for entry in self.entries if not self._is_copy(entry)]
        stages: list[list[Entry]] = [[]] * self.groups.pipeline.size()
        dist.all_gather_object(stages, entries, self.groups.pipeline)
        return [(rank, entry) for rank, entries in enumerate(stages) for entry in entries]


def parameters_by_hf_name(module: Model) -> dict[str, Tensor]:
    """Returns the parameters of a module by the names that `named_hf_weights` yields."""
    return {name.removeprefix("lm."): p for name, p in module.named_parameters()}
