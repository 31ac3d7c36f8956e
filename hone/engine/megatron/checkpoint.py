"""Saves and loads stages in the format of hone/engine/checkpoint.py: whole tensors by Hugging Face name.

A checkpoint can be resumed under another layout and under FSDP2, and FSDP2's under Megatron. Each rank of a
stage writes some of the stage's tensors; each rank reads the tensors of its stage and keeps its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from hone.engine.checkpoint import refuse_other_tensors, saved_sections, sections_of
from hone.engine.megatron.optimizer import ShardedOptimizer
from hone.engine.megatron.weights import StageTensors, hf_names
from hone.engine.saved_state import State, alone_without_warning, load_state
from hone.tracking.manifest import seal_shards
from hone.types import Row

Moments: TypeAlias = dict[str, Row]
"""Optimizer state by parameter."""


def save_stage(
    folder: Path,
    tensors: StageTensors,
    optimizer: ShardedOptimizer | None,
    contents: Collection[str],
) -> None:
    """Writes the named parts: model, optimizer (with master weights), extra (schedule progress)."""
    sections = sections_of(contents)
    state: State = {}
    if "model" in sections:
        state["model"] = {
            alias: tensor
            for name, tensor in _own_share(tensors, tensors.parameters.__getitem__)
            for alias in _aliases(tensors, name)
        }
    if optimizer is not None:
        if "moments" in sections and optimizer.inner.state:
            state["moments"] = _moments(tensors, optimizer)
        if "masters" in sections and (masters := optimizer.own_masters()):
            share = _own_share(tensors, _gathers(tensors, optimizer, list(masters.values())))
            state["masters"] = {_key(name): tensor for name, tensor in share}
        if "progress" in sections:
            state["progress"] = optimizer.state_dict()
    if state:
        with alone_without_warning():
            save(state, checkpoint_id=str(folder))
        seal_shards(folder, dist.get_rank())


def load_stage(
    folder: Path,
    tensors: StageTensors,
    optimizer: ShardedOptimizer | None,
    contents: Collection[str] | None,
) -> None:
    """Reads the named parts; None reads all saved parts."""
    leaves, sections = saved_sections(folder, contents)
    trained = hf_names(tensors.skeleton)
    refuse_other_tensors(folder, leaves, _empty(tensors, optimizer, sections, trained, "meta"))
    mine = {name: trained[name] for entry in tensors.entries for name in entry.whole}
    state = _empty(tensors, optimizer, sections, mine, "cpu")
    load_state(state, folder)
    if "model" in state:
        tensors.load({name: state["model"][_module_name(name)] for name in mine})
    if optimizer is None:
        return
    if "moments" in state:
        _load_moments(tensors, optimizer, state["moments"]["state"])
    if "masters" in state:
        whole = {name: state["masters"][_key(name)] for name in mine}
        _scatter(tensors, optimizer, whole, list(optimizer.own_masters().values()))
    elif "model" in state:
        optimizer.take_masters_from_weights()
    if "progress" in state:
        optimizer.load_state_dict(state["progress"])


def _moments(tensors: StageTensors, optimizer: ShardedOptimizer) -> State:
    names = list(hf_names(tensors.skeleton))
    masters = list(optimizer.masters.values())
    states = [optimizer.inner.state[master] for master in masters]
    flat, single = optimizer.state_keys()
    moments: Moments = {_key(n): {key: states[0][key] for key in single} for n in names}
    for key in flat:
        gather = _gathers(tensors, optimizer, [state[key] for state in states])
        for name, tensor in _own_share(tensors, gather):
            moments[_key(name)][key] = tensor
    (group,) = optimizer.inner.state_dict()["param_groups"]
    return {"state": moments, "param_groups": [group | {"params": [_key(n) for n in names]}]}


def _load_moments(tensors: StageTensors, optimizer: ShardedOptimizer, moments: Moments) -> None:
    masters = list(optimizer.masters.values())
    flat, single = optimizer.state_keys(masters[0].device)
    some = next(iter(moments.values()))
    for master in masters:
        values = {key: torch.zeros_like(master, requires_grad=False) for key in flat}
        optimizer.inner.state[master] = values | {
            key: some[key].to(new.device, copy=True) if isinstance(new, Tensor) else some[key]
            for key, new in single.items()
        }
    for key in flat:
        whole = {name: moments[_key(name)][key] for e in tensors.entries for name in e.whole}
        flats = [optimizer.inner.state[master][key] for master in masters]
        _scatter(tensors, optimizer, whole, flats)


def _empty(
    tensors: StageTensors,
    optimizer: ShardedOptimizer | None,
    sections: set[str],
    names: Mapping[str, Tensor],
    device: str,
) -> State:
    """Returns a state of whole tensors for these Hugging Face names, to be filled."""

    def empty(like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(like.shape, dtype=dtype, device=device)

    state: State = {}
    if "model" in sections:
        aliases = {alias: x for n, x in names.items() for alias in _aliases(tensors, n)}
        state["model"] = {alias: empty(x, x.dtype) for alias, x in aliases.items()}
    if optimizer is None:
        return state
    if "moments" in sections:
        flat, single = optimizer.state_keys()
        moments = {
            _key(name): {**{k: empty(x, torch.float32) for k in flat}, **single}
            for name, x in names.items()
        }
        state["moments"] = {"state": moments}
    if "masters" in sections and optimizer.own_masters():
        state["masters"] = {_key(name): empty(x, torch.float32) for name, x in names.items()}
    if "progress" in sections:
        state["progress"] = optimizer.state_dict()
    return state


def _own_share(
    tensors: StageTensors, tensor_of: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the whole tensors that this rank writes: those of its stage, dealt over the stage's ranks."""
    groups = tensors.groups
    place = groups.data.rank() * groups.tensor.size() + groups.tensor.rank()
    ranks = groups.data.size() * groups.tensor.size()
    for index, (name, tensor) in enumerate(tensors.of_stage(tensor_of)):
        if index % ranks == place:
            yield name, tensor.cpu().contiguous().clone()


def _scatter(
    tensors: StageTensors,
    optimizer: ShardedOptimizer,
    whole: Mapping[str, Tensor],
    flats: list[Tensor],
) -> None:
    parts = {tensors.parameters[name]: part for name, part in tensors.parts(whole)}
    with torch.no_grad():
        optimizer.scatter(parts, flats)


def _gathers(
    tensors: StageTensors, optimizer: ShardedOptimizer, flats: list[Tensor]
) -> Callable[[str], Tensor]:
    """Returns a function that gathers the whole tensor of a parameter from flat shards."""
    return lambda name: optimizer.gather(tensors.parameters[name], flats)


def _module_name(name: str) -> str:
    """Returns the name of a parameter in the module of a Hugging Face engine."""
    return name if name.startswith("value_head.") else f"lm.{name}"


def _key(name: str) -> str:
    """Returns the name of a parameter in the optimizer's sections."""
    return _module_name(name).replace(".", "/")


def _aliases(tensors: StageTensors, name: str) -> list[str]:
    """Returns all names of a parameter in the module's state; a tied embedding has two."""
    aliases = [_module_name(name)]
    if tensors.tied and name == "model.embed_tokens.weight":
        aliases.append("lm.lm_head.weight")
    return aliases
