"""The map between Hugging Face tensors and the parameters of a megatron-core stage.

A megatron-core matrix contains several Hugging Face tensors, and a tensor-parallel rank holds a shard of it:
`to_local` returns the shard of one rank, `to_full` joins the shards of all ranks. `StageTensors` applies
both to a stage, with the collectives.
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

if TYPE_CHECKING:  # the map itself does not need megatron-core
    from hone.engine.megatron.model import Stage

Kind = Literal["same", "columns", "vocabulary", "qkv", "gate_up", "experts_gate_up", "experts_down"]


@dataclass(frozen=True)
class Entry:
    """A parameter of one stage and the Hugging Face tensors that it is made of."""

    kind: Kind
    stage_name: str
    """The name in the stage."""
    hf_names: tuple[str, ...]
    """The names in the Hugging Face module."""


@dataclass(frozen=True)
class Shape:
    """The sizes that the map needs."""

    vocabulary: int
    kv_heads: int
    head_dim: int
    expert_ranks: int = 1
    """Expert-parallel ranks; the expert-tensor-parallel ranks with the same experts split each of them."""


_LAYER: tuple[tuple[Kind, str, tuple[str, ...]], ...] = (
    ("same", "input_layernorm.weight", ("input_layernorm.weight",)),
    ("same", "pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
    ("same", "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    ("same", "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
    *(
        ("qkv", f"self_attention.linear_qkv.{x}", tuple(f"self_attn.{n}_proj.{x}" for n in "qkv"))
        for x in ("weight", "bias")
    ),
    ("columns", "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
    ("gate_up", "mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    ("columns", "mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
    ("same", "mlp.router.weight", ("mlp.gate.weight",)),
    ("experts_gate_up", "mlp.experts.gate_up", ("mlp.experts.gate_up_proj",)),
    ("experts_down", "mlp.experts.down", ("mlp.experts.down_proj",)),
)


def entries(stage: Stage, *, tied: bool) -> list[Entry]:
    """Returns the entries of all parameters of a stage; raises for an unknown parameter."""
    names = {name for name, _ in stage.named_parameters()}
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    ends: tuple[tuple[Kind, str, str], ...] = (
        ("vocabulary", "embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("same", "decoder.final_layernorm.weight", "model.norm.weight"),
        ("vocabulary", "output_layer.weight", head),
        ("same", "value_head.weight", "value_head.weight"),
        ("same", "value_head.bias", "value_head.bias"),
    )
    mapped = [Entry(kind, name, (hf_name,)) for kind, name, hf_name in ends if name in names]
    for index, layer in enumerate(stage.decoder.layers):
        for kind, suffix, hf_suffixes in _LAYER:
            name = f"decoder.layers.{index}.{suffix}"
            if name in names:
                prefix = f"model.layers.{layer.layer_number - 1}."
                mapped.append(Entry(kind, name, tuple(prefix + x for x in hf_suffixes)))
    if missing := names - {entry.stage_name for entry in mapped}:
        raise ValueError(f"the weight map does not know {', '.join(sorted(missing))}")
    return mapped


def to_local(kind: Kind, tensors: Sequence[Tensor], shape: Shape, rank: int, ranks: int) -> Tensor:
    """Returns one rank's shard of a parameter from Hugging Face tensors; `rank` and `ranks` count
    tensor-parallel ranks, or expert × expert-tensor-parallel ranks for experts."""

    def part(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(ranks, dim)[rank]

    first = tensors[0]
    if kind in ("experts_gate_up", "experts_down"):
        return _experts_to_local(kind, first, shape.expert_ranks, rank, ranks)
    if kind == "same":
        return first
    if kind == "columns":
        return part(first, 1)
    if kind == "vocabulary":
        return part(F.pad(first, (0, 0, 0, -first.shape[0] % ranks)), 0)
    if kind == "gate_up":
        return torch.cat([part(tensor, 0) for tensor in tensors])
    rest = first.shape[1:]  # qkv, per key-value head: its queries, its key, its value
    heads = [tensor.reshape(shape.kv_heads, -1, *rest) for tensor in tensors]
    return part(torch.cat(heads, 1), 0).reshape(-1, *rest)


def to_full(kind: Kind, parts: Sequence[Tensor], shape: Shape) -> list[Tensor]:
    """Returns Hugging Face tensors from the parameters of all tensor-parallel ranks, in rank order."""
    if kind == "same":
        return [parts[0]]
    if kind in ("experts_gate_up", "experts_down"):
        return [_experts_to_full(kind, parts, shape.expert_ranks)]
    if kind == "columns":
        return [torch.cat(list(parts), 1)]
    if kind == "vocabulary":
        return [torch.cat(list(parts))[: shape.vocabulary]]
    if kind == "gate_up":
        halves = [tensor.chunk(2) for tensor in parts]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]
    rest, width = parts[0].shape[1:], shape.head_dim
    heads = torch.cat(list(parts)).view(shape.kv_heads, -1, *rest)
    sizes = [heads.shape[1] - 2 * width, width, width]
    return [x.reshape(-1, *rest) for x in heads.split(sizes, 1)]


def _experts_to_local(
    kind: Kind, experts: Tensor, expert_ranks: int, rank: int, ranks: int
) -> Tensor:
    tensor_ranks = ranks // expert_ranks
    expert_rank, tensor_rank = divmod(rank, tensor_ranks)
    local = experts.chunk(expert_ranks)[
        expert_rank
    ]  # [experts, 2 × width, d] or [experts, d, width]
    if kind == "experts_down":
        return local.chunk(tensor_ranks, 2)[tensor_rank]
    halves = [half.chunk(tensor_ranks, 1)[tensor_rank] for half in local.chunk(2, 1)]
    return torch.cat(halves, 1)


def _experts_to_full(kind: Kind, parts: Sequence[Tensor], expert_ranks: int) -> Tensor:
    tensor_ranks = len(parts) // expert_ranks
    joined = []
    for start in range(0, len(parts), tensor_ranks):
        shards = parts[start : start + tensor_ranks]  # of the same experts
        if kind == "experts_down":
            joined.append(torch.cat(list(shards), 2))
        else:
            halves = [shard.chunk(2, 1) for shard in shards]
            joined.append(torch.cat([half[i] for i in range(2) for half in halves], 1))
    return torch.cat(joined)


@dataclass(frozen=True)
class Groups:
    """The process groups of this rank."""

    data: dist.ProcessGroup
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    experts: dist.ProcessGroup
    """The expert × expert-tensor-parallel ranks, which together hold every expert once."""
    expert_ranks: int
    """The expert-parallel size."""

    def of(self, kind: Kind) -> dist.ProcessGroup:
        """Returns the ranks that together hold a parameter of this kind once."""
        return self.experts if kind.startswith("experts") else self.tensor


class StageTensors:
    """The parameters of a stage, and those of the whole model by Hugging Face name."""

    def __init__(self, stage: Stage, module: Model, groups: Groups, *, tied: bool) -> None:
        """Copies this rank's weights from `module`, the whole model on the host, and frees its memory."""
        self.groups = groups
        self.parameters = dict(stage.named_parameters())
        config = module.lm.config
        self._shape = Shape(config.vocab_size, *key_shape(config), groups.expert_ranks)
        self.entries = entries(stage, tied=tied)
        for entry in self.entries:  # megatron-core marks only parameters that it initializes itself
            self.parameters[entry.stage_name].tensor_model_parallel = entry.kind != "same"
        self.load(parameters_by_hf_name(module))
        self.tied = tied
        self.meta_model = module.to("meta")
        """The whole model on the meta device: names, shapes and configs."""
        if tied:
            self.meta_model.lm.tie_weights()
        self._meta_parameters = parameters_by_hf_name(self.meta_model)
        self._by_stage = self._gather_entries()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies this rank's shards from tensors with Hugging Face names."""
        for name, part in self.parts(tensors):
            self.parameters[name].data.copy_(part)

    def parts(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's shards by their names in the stage."""
        for entry in self.entries:
            group = self.groups.of(entry.kind)
            full = [tensors[name].detach() for name in entry.hf_names]
            part = to_local(entry.kind, full, self._shape, group.rank(), group.size())
            yield entry.stage_name, part

    def gather_stage(self, tensor_of: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields the full tensors of this stage; its ranks call it together. `tensor_of` maps the name of a
        parameter to this rank's tensor; it is called for one at a time."""
        for entry in self.entries:
            if not self._is_copy(entry):
                yield from zip(entry.hf_names, self._gather(entry, tensor_of), strict=True)

    def gather_model(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all parameters of the model; all ranks call it together."""
        group = self.groups.pipeline
        for owner, entry in self._by_stage:
            if owner == group.rank():
                full = [x.contiguous() for x in self._gather(entry, self.parameters.__getitem__)]
            else:
                like = next(iter(self.parameters.values()))
                sizes = [self._meta_parameters[name].shape for name in entry.hf_names]
                full = [torch.empty(size, dtype=like.dtype, device=like.device) for size in sizes]
            for name, tensor in zip(entry.hf_names, full, strict=True):
                if group.size() > 1:
                    dist.broadcast(tensor, dist.get_global_rank(group, owner), group=group)
                yield name, tensor

    def _gather(self, entry: Entry, tensor_of: Callable[[str], Tensor]) -> list[Tensor]:
        local = tensor_of(entry.stage_name).detach().contiguous()
        group = self.groups.of(entry.kind)
        if group.size() == 1 or entry.kind == "same":
            return to_full(entry.kind, [local], self._shape)
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local, group=group)
        return to_full(entry.kind, parts, self._shape)

    def _is_copy(self, entry: Entry) -> bool:
        """Whether the parameter is the last stage's copy of a tied embedding."""
        return bool(getattr(self.parameters[entry.stage_name], "shared", False))

    def _gather_entries(self) -> list[tuple[int, Entry]]:
        own = [entry for entry in self.entries if not self._is_copy(entry)]
        by_stage: list[list[Entry]] = [[]] * self.groups.pipeline.size()
        dist.all_gather_object(by_stage, own, self.groups.pipeline)
        return [(stage, entry) for stage, entries in enumerate(by_stage) for entry in entries]


def parameters_by_hf_name(module: Model) -> dict[str, Tensor]:
    """Returns the parameters of a module by the names that `named_hf_weights` yields."""
    return {name.removeprefix("lm."): p for name, p in module.named_parameters()}
