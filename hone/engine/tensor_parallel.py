"""Tensor parallel: shards a decoder's parameters over a group of ranks by the model's own plan.

Every parameter becomes a DTensor on the tensor mesh. Transformers' `_tp_plan` names the split parameters; the
embedding and the LM head are split by vocabulary, and all other parameters are replicated. FSDP2, the
optimizer, clipping and checkpoints treat all DTensors of one mesh alike. Each module's forward computes with
this rank's shards and exchanges activations (hone/ops/tensor_parallel.py); the model's code is unchanged.
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

from hone.engine.optimizer import local_shard
from hone.models.families import UnsupportedModel, config_field, key_shape
from hone.models.lora import full_tensor, is_lora
from hone.models.policy import Model, PolicyModel, without_peft
from hone.ops.tensor_parallel import (
    Group,
    copy_to_group,
    gather_last_dim,
    shard_start,
    split_last_dim,
    sum_over_group,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_VOCABULARY_STYLE = "vocabulary"
_PACKED_PROJECTIONS = 2
"""Number of projections in a packed weight (gate, then up); each is split separately."""
_STYLES_SPLITTING_ROWS = ("colwise", "colwise_gather_output", _VOCABULARY_STYLE)
_STYLES_SPLITTING_COLUMNS = ("rowwise", "rowwise_split_input")
_ADAPTER_STYLES = {
    "colwise": ("replicated", "colwise"),
    "rowwise": ("rowwise", "replicated"),
    "mla_kv_a_proj": ("replicated", "mla_kv_a_proj"),
}
"""Maps the style of a base layer to the styles of its `lora_A` and `lora_B`."""


def check_tensor_parallel(
    config: PreTrainedConfig, path: str, size: int, *, adapters: bool = False, fsdp_shards: int = 1
) -> None:
    """Raises if the model cannot be split over `size` ranks, and each part into `fsdp_shards` shards."""
    text_config, setting = config.get_text_config(), f"tensor_parallel_size={size}"
    plan = tensor_parallel_plan(config)
    if not plan:
        raise UnsupportedModel(
            f"{path} is a {config.model_type} model, whose layers have no tensor-parallel plan in "
            f"transformers; use tensor_parallel_size=1, not {size}"
        )
    if adapters and "moe_tp_experts" in plan.values():
        raise UnsupportedModel(
            f"{path} is a {config.model_type} model with LoRA adapters over its experts, which {setting} "
            "does not split; train it without adapters, or with tensor_parallel_size=1"
        )
    if not _shards_match_dtensor(text_config.vocab_size, size, fsdp_shards):
        raise UnsupportedModel(
            f"{path} has vocab_size={text_config.vocab_size}, which {setting} and FSDP2 split into "
            f"{fsdp_shards} shards of different sizes; use a size that divides it, or fsdp_size=1 or 2"
        )
    for name, count in _split_sizes(config, plan):
        if count % size:
            is_head_count = name.endswith(("heads", "per_layer"))
            reason = "a rank computes whole heads, so " if is_head_count else ""
            raise UnsupportedModel(
                f"{path} has {name}={count}, which {setting} does not divide; {reason}use a "
                f"divisor of {count}"
            )


def tensor_parallel_plan(config: PreTrainedConfig) -> dict[str, str]:
    """Returns transformers' plan for the model's layers, or {} if there is none that fits them."""
    if (
        config.model_type == "minimax_m3_vl_text"
    ):  # its plan names modules that the model does not have
        return {}
    return config.get_text_config().base_model_tp_plan or {}


def _split_sizes(config: PreTrainedConfig, plan: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Yields the name and value of each size that tensor parallel splits: attention heads and MLP widths.

    Heads are left out if every rank computes all of them.
    """
    text_config = config.get_text_config()
    if any(style == "colwise" and ("attn" in n or "attention" in n) for n, style in plan.items()):
        yield "num_attention_heads", text_config.num_attention_heads
        for count in config_field(text_config, "num_attention_heads_per_layer") or ():
            yield "num_attention_heads_per_layer", count
        if not config_field(text_config, "kv_lora_rank"):
            yield "num_key_value_heads", key_shape(config)[0]
    for name in ("intermediate_size", "moe_intermediate_size"):
        if isinstance(width := config_field(text_config, name), int):
            yield name, width


def _shards_match_dtensor(rows: int, size: int, shards: int) -> bool:
    """Returns whether FSDP2 shards the vocabulary into the sizes that DTensor assumes.

    FSDP2 splits the rows of each of `size` tensor-parallel parts into `shards`. DTensor takes the shards with
    the same number, one of each part, and assumes that their rows are split evenly over the parts.
    """

    def chunk_sizes(length: int, chunks: int) -> list[int]:
        width = -(-length // chunks)
        return [max(0, min(width, length - i * width)) for i in range(chunks)]

    shard_sizes_of_parts = [chunk_sizes(part, shards) for part in chunk_sizes(rows, size)]
    part_sizes_of_shards = zip(*shard_sizes_of_parts, strict=True)
    return all(list(sizes) == chunk_sizes(sum(sizes), size) for sizes in part_sizes_of_shards)


def _placement(style: str, dims: int) -> Placement:
    """Returns the placement of a parameter with `dims` dimensions under a style."""
    if style == "per_head":
        return Shard(0)
    if style in _STYLES_SPLITTING_ROWS:
        return Shard(max(dims - 2, 0))
    if style in _STYLES_SPLITTING_COLUMNS:
        return Shard(dims - 1) if dims > 1 else Replicate()
    if style in ("packed_colwise", "packed_rowwise"):
        return _StridedShard(
            dims - (2 if style == "packed_colwise" else 1), split_factor=_PACKED_PROJECTIONS
        )
    return Replicate()


@dataclass
class _ParallelForward:
    """The parallel forward of one module with parameters of its own; it uses this rank's shards."""

    module: nn.Module
    style: str
    group: Group
    original_forward: Callable[..., Any]
    """The forward of the model's code."""
    rope_dim: int = 0
    """Size of the rotary part of MLA's keys."""
    first_row: int = 0
    """The first row of this rank's shard of the embedding."""
    last_input: ClassVar[tuple[ReferenceType[Tensor], Tensor] | None] = None
    """The last input of a colwise layer (a weak reference), and its copy in the autograd graph."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any] = _FORWARDS.get(self.style, _replicated_forward)
        shards = {name: local_shard(p) for name, p in self.module.named_parameters(recurse=False)}
        if self.style == "replicated_with_grad_allreduce":
            shards = {name: copy_to_group(p, self.group) for name, p in shards.items()}
        attributes = vars(self.module)  # an attribute hides the parameter of the same name
        # The outputs are summed over ranks, so the bias is added once, after the sum.
        bias = shards.get("bias") if self.style in _STYLES_SPLITTING_COLUMNS else None
        attributes.update(shards if bias is None else shards | {"bias": None})
        try:
            out = forward(self, *args, **kwargs)
        finally:
            for name in shards:
                del attributes[name]
        return out if bias is None else out + bias


def _replicated_forward(layer: _ParallelForward, *args: Any, **kwargs: Any) -> Any:
    return layer.original_forward(*args, **kwargs)


def _drop_last_input(_: ReferenceType[Tensor]) -> None:
    _ParallelForward.last_input = None


def _colwise_forward(layer: _ParallelForward, x: Tensor) -> Tensor:
    """Runs a colwise layer; layers with the same input (q, k and v) share one sum of the input's gradient."""
    layer_input = x
    if torch.is_grad_enabled():
        last_input = layer.last_input
        if last_input is None or last_input[0]() is not x:
            last_input = ref(x, _drop_last_input), copy_to_group(x, layer.group)
            _ParallelForward.last_input = last_input
        layer_input = last_input[1]
    out: Tensor = layer.original_forward(layer_input)
    return out


def _gathered_colwise_forward(layer: _ParallelForward, x: Tensor) -> Tensor:
    return gather_last_dim(_colwise_forward(layer, x), layer.group)


def _rowwise_forward(layer: _ParallelForward, x: Tensor) -> Tensor:
    return sum_over_group(layer.original_forward(x), layer.group)


def _split_input_forward(layer: _ParallelForward, x: Tensor) -> Tensor:
    return _rowwise_forward(layer, split_last_dim(x, layer.group))


def _experts_forward(layer: _ParallelForward, *args: Any, **kwargs: Any) -> Tensor:
    """Runs routed experts: inputs and routing weights are replicated, outputs are partial sums."""

    def copy_if_float(x: Any) -> Any:
        is_float = isinstance(x, Tensor) and x.is_floating_point()
        return copy_to_group(x, layer.group) if is_float else x

    kwargs = {name: copy_if_float(x) for name, x in kwargs.items()}
    return sum_over_group(layer.original_forward(*map(copy_if_float, args), **kwargs), layer.group)


def _mla_latent_forward(layer: _ParallelForward, x: Tensor) -> Tensor:
    """Runs MLA's compressed KV projection; the heads of all ranks share its rotary keys."""
    latent, rotary = layer.original_forward(x).tensor_split((-layer.rope_dim,), -1)
    return torch.cat([latent, copy_to_group(rotary, layer.group)], -1)


def _vocabulary_forward(layer: _ParallelForward, ids: Tensor) -> Tensor:
    """Embeds the ids of this rank's shard of the vocabulary; a sum over the ranks adds all other ids."""
    module = cast(nn.Embedding, layer.module)
    rows, padding = module.weight.shape[0], module.padding_idx
    local_ids = ids - layer.first_row
    is_local = (local_ids >= 0) & (local_ids < rows)
    if padding is not None:  # the row of the padding token gets no gradient
        local_padding = padding - layer.first_row
        module.padding_idx = local_padding if 0 <= local_padding < rows else None
    try:
        out = layer.original_forward(local_ids.clamp(0, rows - 1))
    finally:
        module.padding_idx = padding
    return sum_over_group(out * is_local[..., None], layer.group)


_FORWARDS: dict[str, Callable[..., Tensor]] = {
    "colwise": _colwise_forward,
    "colwise_gather_output": _gathered_colwise_forward,
    "rowwise": _rowwise_forward,
    "rowwise_split_input": _split_input_forward,
    "moe_tp_experts": _experts_forward,
    "mla_kv_a_proj": _mla_latent_forward,
    _VOCABULARY_STYLE: _vocabulary_forward,
}


STYLES = frozenset(_FORWARDS) | {
    "packed_colwise",
    "packed_rowwise",
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
}
"""The implemented styles of transformers' plans; `embedding_rowwise` is split by vocabulary."""


class TensorParallel:
    """A module whose parameters are sharded over the ranks of a tensor mesh."""

    def __init__(self, module: Model, mesh: DeviceMesh) -> None:
        self.module = module
        self.group = mesh.get_group()
        # Torch warns about gathers in two steps, which parameters sharded over both meshes need.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        base = without_peft(module.lm)
        name = base.config.name_or_path
        check_tensor_parallel(base.config, name, mesh.size(), adapters=is_lora(module.lm))
        self._plan: dict[str, str] = dict(base._tp_plan or {})
        self._rope_dim = int(getattr(base.config.get_text_config(), "qk_rope_head_dim", 0) or 0)
        self._embedding_module = base.get_input_embeddings()
        self._head_module = base.get_output_embeddings()
        self._forwards: list[_ParallelForward] = []
        shards: dict[int, nn.Parameter] = {}
        for path, owner in module.named_modules():
            if not owner._parameters:
                continue
            style = self._style(path, owner)
            for name, parameter in owner.named_parameters(recurse=False):
                parameter_style = self._plan.get(_plan_name(f"{path}.{name}"), style)
                if id(parameter) not in shards:
                    shards[id(parameter)] = _shard_parameter(
                        parameter, mesh, parameter_style, f"{path}.{name}"
                    )
                owner._parameters[name] = shards[id(parameter)]
            if owner is not self._head_module:
                rows = owner.get_parameter("weight").shape[0] if style == _VOCABULARY_STYLE else 0
                start = shard_start(rows, self.group)
                self._forwards.append(
                    _ParallelForward(owner, style, self.group, owner.forward, self._rope_dim, start)
                )
        self._set_parallel(True)

    def _style(self, path: str, owner: nn.Module) -> str:
        """Returns the style of the parameters that the module `owner` at `path` owns."""
        if owner is self._embedding_module or owner is self._head_module:
            return _VOCABULARY_STYLE
        name = _plan_name(path)
        adapter = re.fullmatch(r"(.*)\.lora_([AB])\.\w+", name)
        if adapter is None:
            return self._plan.get(name) or self._default_style(name, owner)
        base_style = self._plan.get(adapter[1], "")
        style_a, style_b = _ADAPTER_STYLES.get(base_style, ("replicated", "replicated"))
        return style_a if adapter[2] == "A" else style_b

    def _default_style(self, name: str, owner: nn.Module) -> str:
        """Returns the style of a module outside the plan: replicated, unless its input features are split."""
        parent, _, leaf = name.rpartition(".")
        is_norm = re.fullmatch(r"[qk]_(layer)?norm", leaf) is not None
        if is_norm and self._plan.get(f"{parent}.q_proj") == "colwise":
            has_weight_per_head = owner.get_parameter("weight").dim() == 2
            return "per_head" if has_weight_per_head else "replicated_with_grad_allreduce"
        return "replicated_with_grad_allreduce" if leaf == "act_fn" else "replicated"

    def _set_parallel(self, enabled: bool) -> None:
        """Gives all modules their parallel forwards if `enabled`, otherwise their original forwards."""
        for forward in self._forwards:
            vars(forward.module)["forward"] = forward if enabled else forward.original_forward
        if isinstance(self.module, PolicyModel):
            self.module.head_group = self.group if enabled else None

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gives every module its full parameters and its original forward inside the block.

        FSDP must have gathered its shards before. A parameter's shard is freed once the parameter is
        gathered, so the block needs the memory of one model.
        """
        owned_parameters = [
            (owner, name, parameter)
            for owner in self.module.modules()
            for name, parameter in owner.named_parameters(recurse=False)
        ]
        full_parameters: dict[int, nn.Parameter] = {}
        for owner, name, parameter in owned_parameters:
            if id(parameter) not in full_parameters:
                tensor = full_tensor(parameter)
                if tensor.data_ptr() == local_shard(parameter).data_ptr():  # replicated
                    tensor = tensor.clone()
                full_parameters[id(parameter)] = nn.Parameter(tensor, parameter.requires_grad)
                local_shard(parameter).untyped_storage().resize_(0)
            owner._parameters[name] = full_parameters[id(parameter)]
        self._set_parallel(False)
        try:
            yield
        finally:
            for owner, name, parameter in owned_parameters:
                owner._parameters[name] = parameter
            self._set_parallel(True)


def _plan_name(path: str) -> str:
    """Returns the name of a module in the plan: without wrapper prefixes, and with * for layer numbers."""
    path = path.removeprefix("lm.").removeprefix("base_model.model.").replace(".base_layer", "")
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _shard_parameter(
    parameter: nn.Parameter, mesh: DeviceMesh, style: str, path: str
) -> nn.Parameter:
    """Returns the parameter as a DTensor that is placed by its style; raises if ranks do not divide it."""
    placement = _placement(style, parameter.dim())
    if isinstance(placement, Shard | _StridedShard) and style != _VOCABULARY_STYLE:
        width = parameter.shape[placement.dim]
        pieces = mesh.size() * (_PACKED_PROJECTIONS if isinstance(placement, _StridedShard) else 1)
        if width % pieces:
            raise ValueError(
                f"{path} has shape {list(parameter.shape)}, and its {width} features ({style}) do not divide "
                f"into {pieces} parts; use a tensor_parallel_size that divides them"
            )
    dtensor = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(dtensor, parameter.requires_grad)
