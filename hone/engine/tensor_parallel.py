"""Tensor parallel: a decoder's parameters sharded over a group of ranks by the model's own plan.

Every parameter becomes a DTensor on the tensor mesh: split where transformers' `_tp_plan` says so, the
embedding and the head by vocabulary, all others replicated. So one mesh holds them all, and FSDP2, the
optimizer, clipping and checkpoints treat them alike. The forwards of the modules compute with this rank's
parts and exchange activations (hone/ops/collectives.py); the model's code is unchanged.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from hone.engine.optimizer import local_part
from hone.models.families import UnsupportedModel, declared, key_shape
from hone.models.lora import is_lora, whole_tensor
from hone.models.policy import Model, PolicyModel, base_of
from hone.ops.collectives import Group, copy_to, gather_last, split_last, sum_over
from hone.ops.vocab_parallel import shard_start

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

UNPLANNED = frozenset(
    """
    biogpt bitnet ctrl falcon gpt-sw3 gpt2 gpt_bigcode gpt_oss hunyuan_v1_dense jetmoe minimax_m3_vl_text opt
    persimmon stablelm
    """.split()  # noqa: SIM905
)
"""Families of hone/models/families.py whose layers transformers does not plan to split."""
_VOCABULARY = "vocabulary"
_PACKED = 2
"""Gate and up projections lie one after the other in a packed weight, and each is split."""
_SPLIT_ROWS = ("colwise", "colwise_gather_output", _VOCABULARY)
_SPLIT_COLUMNS = ("rowwise", "rowwise_split_input")
_ADAPTERS = {  # the styles of lora_A and lora_B beside a base of each style
    "colwise": ("replicated", "colwise"),
    "rowwise": ("rowwise", "replicated"),
    "mla_kv_a_proj": ("replicated", "mla_kv_a_proj"),
}


def refuse_tensor_parallel(
    config: PreTrainedConfig, path: str, size: int, *, adapters: bool = False, shards: int = 1
) -> None:
    """Raises for a model whose layers do not split over `size` ranks, and each part over `shards`."""
    text, key = config.get_text_config(), f"tensor_parallel_size={size}"
    if config.model_type in UNPLANNED:
        raise UnsupportedModel(
            f"{path} is a {config.model_type} model, whose layers have no tensor-parallel plan in "
            f"transformers; use tensor_parallel_size=1, not {size}"
        )
    plan = text.base_model_tp_plan or {}
    if adapters and "moe_tp_experts" in plan.values():
        raise UnsupportedModel(
            f"{path} is a {config.model_type} model with LoRA adapters over its experts, which {key} does "
            "not split; train it without adapters, or with size 1"
        )
    if not _is_regular(text.vocab_size, size, shards):
        raise UnsupportedModel(
            f"{path} has vocab_size={text.vocab_size}, whose {size} parts of {key} FSDP2 cuts into {shards} "
            "shards of different sizes; use a size that divides it, or fsdp_size=1 or 2"
        )
    for name, count in _divided(config, plan):
        if count % size:
            why = (
                "a rank computes whole heads, so " if name.endswith(("heads", "per_layer")) else ""
            )
            raise UnsupportedModel(
                f"{path} has {name}={count}, which {key} does not divide; {why}use a size that divides "
                f"{'them' if why else 'it'}"
            )


def _divided(config: PreTrainedConfig, plan: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Yields the heads, unless every rank computes all of them, and the widths of the MLPs."""
    text = config.get_text_config()
    if any(style == "colwise" and ("attn" in n or "attention" in n) for n, style in plan.items()):
        yield "num_attention_heads", text.num_attention_heads
        for count in declared(text, "num_attention_heads_per_layer") or ():
            yield "num_attention_heads_per_layer", count
        if not declared(text, "kv_lora_rank"):
            yield "num_key_value_heads", key_shape(config)[0]
    for name in ("intermediate_size", "moe_intermediate_size"):
        if isinstance(width := declared(text, name), int):
            yield name, width


def _is_regular(rows: int, size: int, shards: int) -> bool:
    """Returns whether the shards of a vocabulary's parts have the sizes that DTensor computes for them.

    FSDP2 cuts each part by itself. DTensor divides the rows with the same shard number over the parts.
    """

    def cut(length: int, pieces: int) -> list[int]:
        width = -(-length // pieces)
        return [max(0, min(width, length - i * width)) for i in range(pieces)]

    by_part = [cut(part, shards) for part in cut(rows, size)]
    return all(list(of) == cut(sum(of), size) for of in zip(*by_part, strict=True))


def _placement(style: str, dims: int) -> Placement:
    """Returns how a parameter of a module (or a parameter with a style of its own) is split."""
    if style == "per_head":
        return Shard(0)
    if style in _SPLIT_ROWS:
        return Shard(max(dims - 2, 0))
    if style in _SPLIT_COLUMNS:
        return Shard(dims - 1) if dims > 1 else Replicate()
    if style in ("packed_colwise", "packed_rowwise"):
        return _StridedShard(dims - (2 if style == "packed_colwise" else 1), split_factor=_PACKED)
    return Replicate()


@dataclass
class _Part:
    """The forward of one module that owns parameters, with this rank's parts of them."""

    module: nn.Module
    style: str
    group: Group
    own: Callable[..., Any]
    """The forward of the model's code."""
    rope: int = 0
    rows: int = 0
    latest: ClassVar[tuple[ReferenceType[Tensor], Tensor] | None] = None
    """The latest input of a layer of split rows while it lives, and its copy in the graph."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run: Callable[..., Any] = _FORWARDS.get(self.style, _replicated)
        local = {name: local_part(p) for name, p in self.module.named_parameters(recurse=False)}
        if self.style == "replicated_with_grad_allreduce":
            local = {name: copy_to(p, self.group) for name, p in local.items()}
        shadowed = vars(self.module)
        bias = local.get("bias") if self.style in _SPLIT_COLUMNS else None
        shadowed.update(local if bias is None else local | {"bias": None})
        try:
            out = run(self, *args, **kwargs)
        finally:
            for name in local:
                del shadowed[name]
        return out if bias is None else out + bias


def _replicated(part: _Part, *args: Any, **kwargs: Any) -> Any:
    return part.own(*args, **kwargs)


def _forget(_: ReferenceType[Tensor]) -> None:
    _Part.latest = None


def _column(part: _Part, x: Tensor) -> Tensor:
    """Layers with the same input (q, k and v) share one sum of its gradients."""
    copied = x
    if torch.is_grad_enabled():
        latest = part.latest
        if latest is None or latest[0]() is not x:
            latest = _Part.latest = ref(x, _forget), copy_to(x, part.group)
        copied = latest[1]
    out: Tensor = part.own(copied)
    return out


def _column_gathered(part: _Part, x: Tensor) -> Tensor:
    return gather_last(_column(part, x), part.group)


def _row(part: _Part, x: Tensor) -> Tensor:
    return sum_over(part.own(x), part.group)


def _row_split(part: _Part, x: Tensor) -> Tensor:
    return _row(part, split_last(x, part.group))


def _experts(part: _Part, *args: Any, **kwargs: Any) -> Tensor:
    """Routed experts: inputs and routing weights are whole, outputs are partial sums."""

    def whole(x: Any) -> Any:
        is_real = isinstance(x, Tensor) and x.is_floating_point()
        return copy_to(x, part.group) if is_real else x

    named = {name: whole(x) for name, x in kwargs.items()}
    return sum_over(part.own(*map(whole, args), **named), part.group)


def _latent(part: _Part, x: Tensor) -> Tensor:
    """Multi-head latent attention: all heads share the rotary keys, which bypass the split projection."""
    latent, rotary = part.own(x).tensor_split((-part.rope,), -1)
    return torch.cat([latent, copy_to(rotary, part.group)], -1)


def _embedding(part: _Part, ids: Tensor) -> Tensor:
    module = cast(nn.Embedding, part.module)
    rows, padding = module.weight.shape[0], module.padding_idx
    own = ids - part.rows
    here = (own >= 0) & (own < rows)
    if padding is not None:  # its row gets no gradient
        shifted = padding - part.rows
        module.padding_idx = shifted if 0 <= shifted < rows else None
    try:
        out = part.own(own.clamp(0, rows - 1))
    finally:
        module.padding_idx = padding
    return sum_over(out * here[..., None], part.group)


_FORWARDS: dict[str, Callable[..., Tensor]] = {
    "colwise": _column,
    "colwise_gather_output": _column_gathered,
    "rowwise": _row,
    "rowwise_split_input": _row_split,
    "moe_tp_experts": _experts,
    "mla_kv_a_proj": _latent,
    _VOCABULARY: _embedding,
}


STYLES = frozenset(_FORWARDS) | {
    "packed_colwise",
    "packed_rowwise",
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
}
"""The styles of transformers' plans that are implemented; embeddings are split by vocabulary anyway."""


class TensorParallel:
    """A module whose parameters are sharded over the ranks of a tensor mesh."""

    def __init__(self, module: Model, mesh: DeviceMesh) -> None:
        self.module = module
        self.group = mesh.get_group()
        # Torch warns of gathers in two steps, which shards of both meshes need.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        base = base_of(module.lm)
        name = base.config.name_or_path
        refuse_tensor_parallel(base.config, name, mesh.size(), adapters=is_lora(module.lm))
        self._plan: dict[str, str] = dict(base._tp_plan or {})
        self._rope = int(getattr(base.config.get_text_config(), "qk_rope_head_dim", 0) or 0)
        self._embedding, self._head = base.get_input_embeddings(), base.get_output_embeddings()
        self._parts: list[_Part] = []
        shards: dict[int, nn.Parameter] = {}
        for path, owner in module.named_modules():
            if not owner._parameters:
                continue
            style = self._style(path, owner)
            for name, parameter in owner.named_parameters(recurse=False):
                own = self._plan.get(_generic(f"{path}.{name}"), style)
                if id(parameter) not in shards:
                    shards[id(parameter)] = _sharded(parameter, mesh, own, f"{path}.{name}")
                owner._parameters[name] = shards[id(parameter)]
            if owner is not self._head:
                rows = owner.get_parameter("weight").shape[0] if style == _VOCABULARY else 0
                start = shard_start(rows, self.group)
                part = _Part(owner, style, self.group, owner.forward, self._rope, start)
                self._parts.append(part)
        self._switch(on=True)

    def _style(self, path: str, owner: nn.Module) -> str:
        if owner is self._embedding or owner is self._head:
            return _VOCABULARY
        name = _generic(path)
        adapter = re.fullmatch(r"(.*)\.lora_([AB])\.\w+", name)
        if adapter is None:
            return self._plan.get(name) or self._unplanned(name, owner)
        pair = _ADAPTERS.get(self._plan.get(adapter[1], ""), ("replicated", "replicated"))
        return pair[adapter[2] == "B"]

    def _unplanned(self, name: str, owner: nn.Module) -> str:
        """Returns the style of a module that the plan leaves out: whole, unless it acts on split features."""
        parent, _, own = name.rpartition(".")
        is_norm = re.fullmatch(r"[qk]_(layer)?norm", own) is not None
        if is_norm and self._plan.get(f"{parent}.q_proj") == "colwise":
            dims = owner.get_parameter("weight").dim()  # 2: each head has weights of its own
            return "per_head" if dims == 2 else "replicated_with_grad_allreduce"
        return "replicated_with_grad_allreduce" if own == "act_fn" else "replicated"

    def _switch(self, *, on: bool) -> None:
        for part in self._parts:
            vars(part.module)["forward"] = part if on else part.own
        if isinstance(self.module, PolicyModel):
            self.module.head_group = self.group if on else None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gives every module its full parameters and its own forward inside the block.

        The parameters must not be sharded by FSDP now. A parameter's part is freed once it is gathered, so
        the block needs the memory of one model.
        """
        places = [
            (owner, name, parameter)
            for owner in self.module.modules()
            for name, parameter in owner.named_parameters(recurse=False)
        ]
        full: dict[int, nn.Parameter] = {}
        for owner, name, parameter in places:
            if id(parameter) not in full:
                tensor = whole_tensor(parameter)
                if tensor.data_ptr() == local_part(parameter).data_ptr():  # replicated
                    tensor = tensor.clone()
                full[id(parameter)] = nn.Parameter(tensor, parameter.requires_grad)
                local_part(parameter).untyped_storage().resize_(0)
            owner._parameters[name] = full[id(parameter)]
        self._switch(on=False)
        try:
            yield
        finally:
            for owner, name, parameter in places:
                owner._parameters[name] = parameter
            self._switch(on=True)


def _generic(path: str) -> str:
    """Returns the name of the model's plan for a module: without wrappers, with * for layer numbers."""
    path = path.removeprefix("lm.").removeprefix("base_model.model.").replace(".base_layer", "")
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _sharded(parameter: nn.Parameter, mesh: DeviceMesh, style: str, path: str) -> nn.Parameter:
    placement = _placement(style, parameter.dim())
    if isinstance(placement, Shard | _StridedShard) and style != _VOCABULARY:
        width = parameter.shape[placement.dim]
        pieces = mesh.size() * (_PACKED if isinstance(placement, _StridedShard) else 1)
        if width % pieces:
            raise ValueError(
                f"{path} has {list(parameter.shape)}: its {width} {style} features do not divide into "
                f"{pieces}; use a tensor_parallel_size that divides them"
            )
    split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(split, parameter.requires_grad)
