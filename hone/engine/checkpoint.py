"""Saves and loads engine state with torch.distributed.checkpoint.

Every rank writes into a folder that the caller renames afterwards; another world size can read it. A LoRA
checkpoint holds only the trained parameters, and model.path must be the same base model when it is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save

from hone.engine.optimizer import Optimizer
from hone.engine.packed_shards import with_chunks, without_chunks
from hone.engine.saved_state import (
    METADATA_FILE,
    State,
    load_state,
    no_single_process_warning,
    read_metadata,
)
from hone.models.lora import is_lora
from hone.tracking.manifest import write_shard_checksums

_STRICT = StateDictOptions(strict=True)
_BASE_TOLERANCE = 1e-9
"""Relative tolerance; the order of the float64 sum depends on the number of ranks."""
_KERNEL_SETTINGS = {"capturable", "differentiable", "foreach", "fused"}
"""Settings of an optimizer that depend on the device and layout, so this run's values are used."""

Leaves = dict[str, tuple[int, ...] | None]
"""Dotted names of the entries of a state, with the shape of tensors."""


class CheckpointMissing(ValueError):
    """A folder lacks a requested part of the engine state."""


class BaseModelMismatch(ValueError):
    """The adapters of a checkpoint were trained on another base model."""


class ModelMismatch(BaseModelMismatch):
    """The tensors of a checkpoint differ from this model's in name or shape."""


def save_checkpoint(
    folder: Path, module: nn.Module, optimizer: Optimizer | None, contents: Collection[str]
) -> None:
    """Writes the named parts: model, optimizer (with master weights), extra (schedule progress)."""
    # torch would create missing optimizer state by running a step; skip it instead.
    skip = {"moments"} if optimizer is not None and not optimizer.inner.state else set()
    if state := _state(module, optimizer, sections_of(contents) - skip):
        with no_single_process_warning():
            save(with_chunks(state), checkpoint_id=str(folder))
        write_shard_checksums(folder, dist.get_rank() if dist.is_initialized() else 0)


def load_checkpoint(
    folder: Path,
    module: nn.Module,
    optimizer: Optimizer | None,
    contents: Collection[str] | None = None,
) -> None:
    """Reads the named parts; None reads all saved parts."""
    leaves, sections = saved_sections(folder, contents)
    state = _state(module, optimizer, sections)
    check_same_tensors(folder, leaves, state)
    base = state["base"].clone() if "base" in state else None
    packed_state = with_chunks(state)
    load_state(packed_state, folder)
    state = without_chunks(packed_state)
    if base is not None and not torch.allclose(base, state["base"], rtol=_BASE_TOLERANCE):
        raise BaseModelMismatch(
            f"{folder} holds LoRA adapters over another base model (its weights sum to "
            f"{float(state['base']):.8g}, those loaded here to {float(base):.8g}); set model.path to "
            "the model of the start of the run"
        )
    if "model" in state:
        strict = StateDictOptions(strict=False) if _has_adapters(module) else _STRICT
        set_model_state_dict(module, state["model"], options=strict)
    if optimizer is None:
        return
    if "moments" in state:
        groups = zip(state["moments"]["param_groups"], optimizer.inner.param_groups, strict=True)
        for saved, current in groups:
            saved.update({n: current[n] for n in _KERNEL_SETTINGS & current.keys()})
        set_optimizer_state_dict(
            optimizer.masters, optimizer.inner, state["moments"], options=_STRICT
        )
    if "progress" in state:
        optimizer.load_state_dict(state["progress"])
    if "model" in state and "masters" not in state:
        optimizer.copy_weights_to_masters()


def saved_sections(folder: Path, contents: Collection[str] | None) -> tuple[Leaves, set[str]]:
    """Returns the entries of a checkpoint, and the sections of the requested parts that it has."""
    if not folder.is_dir():
        raise CheckpointMissing(
            f"{folder.parent} holds no {folder.name}: the run that wrote it had none; keep its "
            "settings, or start from its model in another trainer.default_local_dir"
        )
    leaves = _saved_leaves(folder)
    saved = {name.partition(".")[0] for name in leaves}
    sections = saved if contents is None else sections_of(contents) & saved
    if "model" not in saved and (contents is None or "model" in contents):
        raise CheckpointMissing(
            f"{folder} holds no model state (it has {', '.join(sorted(saved)) or 'nothing'}); it was "
            "saved without 'model' in checkpoint.save_contents. Start from its export instead"
        )
    return leaves, sections


def sections_of(contents: Collection[str]) -> set[str]:
    """Maps verl's checkpoint parts to the sections of our file."""
    parts = {"model": {"model", "base"}, "optimizer": {"moments", "masters"}, "extra": {"progress"}}
    return set().union(*(parts.get(part, set()) for part in contents))


def _state(module: nn.Module, optimizer: Optimizer | None, sections: set[str]) -> State:
    state: State = {}
    adapters = _has_adapters(module)
    if "model" in sections:
        state["model"] = get_model_state_dict(module)
        for name in _frozen_names(module) if adapters else ():
            state["model"].pop(name, None)
    if "base" in sections and adapters:
        state["base"] = _frozen_checksum(module)
    if optimizer is None:
        return state
    if "moments" in sections:
        state["moments"] = get_optimizer_state_dict(optimizer.masters, optimizer.inner)
    if "masters" in sections and (masters := optimizer.master_copies()):
        state["masters"] = masters  # loading fills these tensors in place
    if "progress" in sections:
        state["progress"] = optimizer.state_dict()
    return state


def _has_adapters(module: nn.Module) -> bool:
    return is_lora(getattr(module, "lm", None))


def _frozen_names(module: nn.Module) -> list[str]:
    """Returns all names of frozen parameters; a tied parameter has two."""
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not parameter.requires_grad]


@torch.no_grad()
def _frozen_checksum(module: nn.Module) -> Tensor:
    """Returns the sum of |weight| over frozen parameters of all ranks, which identifies the base model."""
    total = torch.zeros((), dtype=torch.float64)
    for parameter in module.parameters():
        if not parameter.requires_grad:
            # Round to bfloat16, because the base may be loaded in another dtype than when it was saved.
            part = parameter.bfloat16().abs().sum(dtype=torch.float64)
            total += (part.full_tensor() if hasattr(part, "full_tensor") else part).cpu()
    return total


def _saved_leaves(folder: Path) -> Leaves:
    """Returns all entries of a checkpoint, with the full shape of sharded tensors."""
    if not (folder / METADATA_FILE).is_file():
        return {}
    leaves = read_metadata(folder).state_dict_metadata
    return {name: tuple(x.size) if hasattr(x, "size") else None for name, x in leaves.items()}


def _leaves(value: State | list[State] | Tensor | float, name: str) -> Leaves:
    """Returns the entries of a state in memory."""
    if isinstance(value, Mapping):
        children = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        children = [(str(index), child) for index, child in enumerate(value)]
    else:
        return {name: tuple(value.shape) if isinstance(value, Tensor) else None}
    leaves: Leaves = {}
    for key, child in children:
        leaves |= _leaves(child, f"{name}.{key}" if name else key)
    return leaves


def check_same_tensors(folder: Path, saved: Leaves, state: State) -> None:
    """Raises unless checkpoint and state have the same names and shapes, before any tensor is read."""
    current = _leaves(state, "")
    weights, saved_weights = _weights(current), _weights(saved) if "model" in state else {}
    trained, saved_trained = _trained(current), _trained(saved)
    if not (trained and saved_trained):  # one of the optimizers keeps no state per parameter
        trained = saved_trained = {}
    missing = (weights.keys() - saved_weights.keys()) | (trained.keys() - saved_trained.keys())
    extra = (saved_weights.keys() - weights.keys()) | (saved_trained.keys() - trained.keys())
    reshaped = [n for n in weights if n in saved_weights and weights[n] != saved_weights[n]]
    if missing or extra or reshaped:
        raise ModelMismatch(
            f"{folder} holds another model than this run's: "
            f"{_difference(sorted(missing), sorted(extra), reshaped, weights, saved_weights)}; set "
            "model.path and model.lora_rank to their values at the start of the run, or start a new run "
            "in another trainer.default_local_dir"
        )
    if absent := [name for name in current if name not in saved]:
        raise CheckpointMissing(
            f"{folder} was saved with another optimizer than this run's (it has no {absent[0]}); keep "
            "optim.optimizer as it was, or leave 'optimizer' out of checkpoint.load_contents"
        )


def _weights(leaves: Leaves) -> Leaves:
    names = {name: name.removeprefix("model.") for name in leaves if name.startswith("model.")}
    return {short: leaves[name] for name, short in names.items()}


def _trained(leaves: Leaves) -> Leaves:
    """Returns the weights for which the optimizer keeps state."""
    keys = [name.split(".")[2] for name in leaves if name.startswith("moments.state.")]
    return dict.fromkeys(key.replace("/", ".") for key in keys)


def _difference(
    missing: list[str], extra: list[str], reshaped: list[str], weights: Leaves, saved: Leaves
) -> str:
    """Describes how the weights of a checkpoint differ from the model's."""
    has_adapters, had_adapters = (any(".lora_" in name for name in x) for x in (weights, saved))
    if has_adapters != had_adapters:
        with_without = ("without", "with") if has_adapters else ("with", "without")
        return "it was trained {} LoRA adapters, this run {}".format(*with_without)
    differences = []
    if missing:
        differences.append(f"it has no {_abbreviate(missing)}")
    if extra:
        differences.append(f"it has the additional {_abbreviate(extra)}")
    if reshaped:
        was, now = (list(x[reshaped[0]] or ()) for x in (saved, weights))
        differences.append(f"{_abbreviate(reshaped)} has shape {was} there and {now} here")
    return ", ".join(differences)


def _abbreviate(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
