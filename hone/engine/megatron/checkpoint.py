"""Saves and loads stages in the format of hone/engine/checkpoint.py: full tensors by Hugging Face name.

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

from hone.engine.checkpoint import check_same_tensors, saved_sections, sections_of
from hone.engine.megatron.optimizer import ShardedOptimizer
from hone.engine.megatron.weights import StageTensors, parameters_by_hf_name
from hone.engine.saved_state import State, load_state, no_single_process_warning
from hone.tracking.manifest import write_shard_checksums
from hone.types import Fields

Moments: TypeAlias = dict[str, Fields]
"""Optimizer state by parameter."""


def save_stage(
    folder: Path,
    stage: StageTensors,
    optimizer: ShardedOptimizer | None,
    contents: Collection[str],
) -> None:
    """Writes the named parts: model, optimizer (with master weights), extra (schedule progress)."""
    sections = sections_of(contents)
    state: State = {}
    if "model" in sections:
        state["model"] = {
            alias: tensor
            for name, tensor in _tensors_to_write(stage, stage.parameters.__getitem__)
            for alias in _aliases(stage, name)
        }
    if optimizer is not None:
        if "moments" in sections and optimizer.inner.state:
            state["moments"] = _moments(stage, optimizer)
        if "masters" in sections and (masters := optimizer.master_copies()):
            gather = _gather_function(stage, optimizer, list(masters.values()))
            state["masters"] = {_optimizer_key(n): x for n, x in _tensors_to_write(stage, gather)}
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
    leaves, sections = saved_sections(folder, contents)
    model_tensors = parameters_by_hf_name(stage.meta_model)
    expected = _empty_state(stage, optimizer, sections, model_tensors, "meta")
    check_same_tensors(folder, leaves, expected)
    stage_tensors = {n: model_tensors[n] for entry in stage.entries for n in entry.hf_names}
    state = _empty_state(stage, optimizer, sections, stage_tensors, "cpu")
    load_state(state, folder)
    if "model" in state:
        stage.load({name: state["model"][_module_name(name)] for name in stage_tensors})
    if optimizer is None:
        return
    if "moments" in state:
        _load_moments(stage, optimizer, state["moments"]["state"])
    if "masters" in state:
        full = {name: state["masters"][_optimizer_key(name)] for name in stage_tensors}
        _scatter(stage, optimizer, full, list(optimizer.master_copies().values()))
    elif "model" in state:
        optimizer.copy_weights_to_masters()
    if "progress" in state:
        optimizer.load_state_dict(state["progress"])


def _moments(stage: StageTensors, optimizer: ShardedOptimizer) -> State:
    names = list(parameters_by_hf_name(stage.meta_model))
    masters = list(optimizer.masters.values())
    states = [optimizer.inner.state[master] for master in masters]
    per_element, others = optimizer.state_keys()
    moments: Moments = {_optimizer_key(n): {key: states[0][key] for key in others} for n in names}
    for key in per_element:
        gather = _gather_function(stage, optimizer, [state[key] for state in states])
        for name, tensor in _tensors_to_write(stage, gather):
            moments[_optimizer_key(name)][key] = tensor
    (group,) = optimizer.inner.state_dict()["param_groups"]
    return {
        "state": moments,
        "param_groups": [group | {"params": [_optimizer_key(n) for n in names]}],
    }


def _load_moments(stage: StageTensors, optimizer: ShardedOptimizer, moments: Moments) -> None:
    masters = list(optimizer.masters.values())
    per_element, others = optimizer.state_keys(masters[0].device)
    first = next(iter(moments.values()))  # the other state is the same for all parameters
    for master in masters:
        values = {key: torch.zeros_like(master, requires_grad=False) for key in per_element}
        optimizer.inner.state[master] = values | {
            key: first[key].to(new.device, copy=True) if isinstance(new, Tensor) else first[key]
            for key, new in others.items()
        }
    for key in per_element:
        full = {
            name: moments[_optimizer_key(name)][key] for e in stage.entries for name in e.hf_names
        }
        flats = [optimizer.inner.state[master][key] for master in masters]
        _scatter(stage, optimizer, full, flats)


def _empty_state(
    stage: StageTensors,
    optimizer: ShardedOptimizer | None,
    sections: set[str],
    names: Mapping[str, Tensor],
    device: str,
) -> State:
    """Returns a state of uninitialized full tensors for these Hugging Face names."""

    def empty(like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(like.shape, dtype=dtype, device=device)

    state: State = {}
    if "model" in sections:
        aliases = {alias: x for n, x in names.items() for alias in _aliases(stage, n)}
        state["model"] = {alias: empty(x, x.dtype) for alias, x in aliases.items()}
    if optimizer is None:
        return state
    if "moments" in sections:
        per_element, others = optimizer.state_keys()
        moments = {
            _optimizer_key(name): {**{k: empty(x, torch.float32) for k in per_element}, **others}
            for name, x in names.items()
        }
        state["moments"] = {"state": moments}
    if "masters" in sections and optimizer.master_copies():
        state["masters"] = {
            _optimizer_key(name): empty(x, torch.float32) for name, x in names.items()
        }
    if "progress" in sections:
        state["progress"] = optimizer.state_dict()
    return state


def _tensors_to_write(
    stage: StageTensors, tensor_of: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the full tensors that this rank writes; the ranks of a stage take turns."""
    groups = stage.groups
    rank_in_stage = groups.data.rank() * groups.tensor.size() + groups.tensor.rank()
    ranks = groups.data.size() * groups.tensor.size()
    for index, (name, tensor) in enumerate(stage.gather_stage(tensor_of)):
        if index % ranks == rank_in_stage:
            yield name, tensor.cpu().contiguous().clone()


def _scatter(
    stage: StageTensors,
    optimizer: ShardedOptimizer,
    full: Mapping[str, Tensor],
    flats: list[Tensor],
) -> None:
    """Writes this rank's parts of full tensors into flat shards."""
    parts = {stage.parameters[name]: part for name, part in stage.parts(full)}
    with torch.no_grad():
        optimizer.scatter(parts, flats)


def _gather_function(
    stage: StageTensors, optimizer: ShardedOptimizer, flats: list[Tensor]
) -> Callable[[str], Tensor]:
    """Returns a function that gathers the full tensor of a parameter from flat shards."""
    return lambda name: optimizer.gather(stage.parameters[name], flats)


def _module_name(name: str) -> str:
    """Returns the name of a parameter in the module of the FSDP2 engine."""
    return name if name.startswith("value_head.") else f"lm.{name}"


def _optimizer_key(name: str) -> str:
    """Returns the key of a parameter in the optimizer's sections, like the keys of `Optimizer.masters`."""
    return _module_name(name).replace(".", "/")


def _aliases(stage: StageTensors, name: str) -> list[str]:
    """Returns all names of a parameter in the module's state; a tied embedding has two."""
    aliases = [_module_name(name)]
    if stage.tied and name == "model.embed_tokens.weight":
        aliases.append("lm.lm_head.weight")
    return aliases
