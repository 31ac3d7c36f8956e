"""Saves and loads pipeline stages in the format of hone/engine/checkpoint.py: full tensors by HF name.

Megatron and FSDP2 can resume each other's checkpoints, under any layout. Each rank of a stage writes some of
the stage's tensors; each rank reads the tensors of its stage and keeps its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from hone.engine.checkpoint import check_same_tensors, saved_sections, sections_for_contents
from hone.engine.megatron.optimizer import ShardedOptimizer
from hone.engine.megatron.weights import StageTensors, parameters_by_hf_name
from hone.engine.saved_state import State, load_state, no_single_process_warning
from hone.tracking.manifest import write_shard_checksums
from hone.types import Fields

Moments: TypeAlias = dict[str, Fields]
"""Optimizer state (moments and step counts) by the optimizer key of each parameter."""


def save_stage(
    folder: Path,
    stage: StageTensors,
    optimizer: ShardedOptimizer | None,
    contents: Collection[str],
) -> None:
    """Writes the named parts: model, optimizer (with master weights), extra (schedule progress)."""
    sections = sections_for_contents(contents)
    state: State = {}
    if "model" in sections:
        state["model"] = {
            alias: tensor
            for name, tensor in _tensors_to_write(stage, stage.parameters.__getitem__)
            for alias in _aliases(stage, name)
        }
    if optimizer is not None:
        if "moments" in sections and optimizer.torch_optimizer.state:
            state["moments"] = _gather_moments(stage, optimizer)
        if "masters" in sections and (masters := optimizer.master_copies()):
            gather = _gather_function(stage, optimizer, list(masters.values()))
            state["masters"] = {
                _optimizer_key(name): tensor for name, tensor in _tensors_to_write(stage, gather)
            }
        if "progress" in sections:
            state["progress"] = optimizer.state_dict()
    if state:
        with no_single_process_warning():
            save(state, checkpoint_id=str(folder))
        write_shard_checksums(folder, dist.get_rank())


def load_stage(
    folder: Path,
    stage: StageTensors,
    optimizer: ShardedOptimizer | None,
    contents: Collection[str] | None,
) -> None:
    """Reads the named parts; None reads all saved parts."""
    saved_shapes, sections = saved_sections(folder, contents, is_trained=optimizer is not None)
    model_tensors = parameters_by_hf_name(stage.meta_model)
    expected_state = _empty_state(stage, optimizer, sections, model_tensors, "meta")
    check_same_tensors(folder, saved_shapes, expected_state)
    needed_tensors = {
        name: model_tensors[name] for entry in stage.entries for name in entry.hf_names
    }
    state = _empty_state(stage, optimizer, sections, needed_tensors, "cpu")
    load_state(state, folder)
    if "model" in state:
        stage.load({name: state["model"][_module_name(name)] for name in needed_tensors})
    if optimizer is None:
        return
    if "moments" in state:
        _load_moments(stage, optimizer, state["moments"]["state"])
    if "masters" in state:
        full_masters = {name: state["masters"][_optimizer_key(name)] for name in needed_tensors}
        _scatter(stage, optimizer, full_masters, list(optimizer.master_copies().values()))
    elif "model" in state:
        optimizer.copy_weights_to_masters()
    if "progress" in state:
        optimizer.load_state_dict(state["progress"])


def _gather_moments(stage: StageTensors, optimizer: ShardedOptimizer) -> State:
    """Returns the section "moments": full tensors that this rank writes, and scalar state."""
    keys = [_optimizer_key(name) for name in parameters_by_hf_name(stage.meta_model)]
    masters = list(optimizer.masters.values())
    states = [optimizer.torch_optimizer.state[master] for master in masters]
    element_fields, scalars = optimizer.state_schema()
    moments: Moments = {key: {field: states[0][field] for field in scalars} for key in keys}
    for field in element_fields:
        gather = _gather_function(stage, optimizer, [state[field] for state in states])
        for name, tensor in _tensors_to_write(stage, gather):
            moments[_optimizer_key(name)][field] = tensor
    (group,) = optimizer.torch_optimizer.state_dict()["param_groups"]
    return {"state": moments, "param_groups": [group | {"params": keys}]}


def _load_moments(stage: StageTensors, optimizer: ShardedOptimizer, moments: Moments) -> None:
    """Writes this rank's part of the full moments into the state of the optimizer."""
    masters = list(optimizer.masters.values())
    element_keys, scalars = optimizer.state_schema(masters[0].device)
    saved_scalars = next(iter(moments.values()))  # scalar state is the same for all parameters
    for master in masters:
        state = {key: torch.zeros_like(master, requires_grad=False) for key in element_keys}
        for key, new_scalar in scalars.items():
            scalar = saved_scalars[key]
            is_tensor = isinstance(new_scalar, Tensor)
            state[key] = scalar.to(new_scalar.device, copy=True) if is_tensor else scalar
        optimizer.torch_optimizer.state[master] = state
    for key in element_keys:
        full_tensors = {
            name: moments[_optimizer_key(name)][key]
            for entry in stage.entries
            for name in entry.hf_names
        }
        flat_shards = [optimizer.torch_optimizer.state[master][key] for master in masters]
        _scatter(stage, optimizer, full_tensors, flat_shards)


def _empty_state(
    stage: StageTensors,
    optimizer: ShardedOptimizer | None,
    sections: set[str],
    tensors: Mapping[str, Tensor],
    device: str,
) -> State:
    """Returns uninitialized state for `tensors` (by Hugging Face name), into which a checkpoint is loaded."""

    def empty(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(tensor.shape, dtype=dtype, device=device)

    state: State = {}
    if "model" in sections:
        state["model"] = {
            alias: empty(tensor, tensor.dtype)
            for name, tensor in tensors.items()
            for alias in _aliases(stage, name)
        }
    if optimizer is None:
        return state
    if "moments" in sections:
        element_keys, scalars = optimizer.state_schema()
        moments = {
            _optimizer_key(name): {key: empty(tensor, torch.float32) for key in element_keys}
            | scalars
            for name, tensor in tensors.items()
        }
        state["moments"] = {"state": moments}
    if "masters" in sections and optimizer.master_copies():
        state["masters"] = {
            _optimizer_key(name): empty(tensor, torch.float32) for name, tensor in tensors.items()
        }
    if "progress" in sections:
        state["progress"] = optimizer.state_dict()
    return state


def _tensors_to_write(
    stage: StageTensors, get_local_tensor: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the full tensors that this rank writes; the ranks of a stage take tensors in turn."""
    groups = stage.groups
    rank_in_stage = groups.data.rank() * groups.tensor.size() + groups.tensor.rank()
    num_ranks = groups.data.size() * groups.tensor.size()
    for index, (name, tensor) in enumerate(stage.gather_stage(get_local_tensor)):
        if index % num_ranks == rank_in_stage:
            yield name, tensor.cpu().contiguous().clone()


def _scatter(
    stage: StageTensors,
    optimizer: ShardedOptimizer,
    full_tensors: Mapping[str, Tensor],
    flat_shards: list[Tensor],
) -> None:
    """Writes this rank's parts of full tensors into flat shards."""
    shards = {stage.parameters[name]: shard for name, shard in stage.local_shards(full_tensors)}
    with torch.no_grad():
        optimizer.scatter(shards, flat_shards)


def _gather_function(
    stage: StageTensors, optimizer: ShardedOptimizer, flat_shards: list[Tensor]
) -> Callable[[str], Tensor]:
    """Returns a function that gathers the full tensor of a parameter from flat shards."""
    return lambda name: optimizer.gather(stage.parameters[name], flat_shards)


def _module_name(name: str) -> str:
    """Returns the name of a parameter in the module of the FSDP2 engine."""
    return name if name.startswith("value_head.") else f"lm.{name}"


def _optimizer_key(name: str) -> str:
    """Returns the key of a parameter in the optimizer's sections, like the keys of `Optimizer.masters`."""
    return _module_name(name).replace(".", "/")


def _aliases(stage: StageTensors, name: str) -> list[str]:
    """Returns all names of a parameter in the module's state; a tied embedding has two."""
    aliases = [_module_name(name)]
    if stage.is_tied and name == "model.embed_tokens.weight":
        aliases.append("lm.lm_head.weight")
    return aliases
