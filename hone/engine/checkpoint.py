"""Saves and loads engine state with torch.distributed.checkpoint.

All ranks write into one folder, which the caller renames afterwards. A run with another world size can load
the checkpoint. A LoRA checkpoint holds only the trained parameters; the run that loads it must have the same
base model in model.path.
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
from hone.engine.packed_shards import unwrap_packed_shards, wrap_packed_shards
from hone.engine.saved_state import (
    METADATA_FILE,
    State,
    load_state,
    no_single_process_warning,
    read_metadata,
)
from hone.errors import UserError
from hone.models.lora import full_tensor, is_lora
from hone.tracking.manifest import write_shard_checksums

_STRICT = StateDictOptions(strict=True)
_CHECKSUM_RTOL = 1e-9
"""Relative tolerance of the checksum, whose order of summation depends on the number of ranks."""
_KERNEL_SETTINGS = {"capturable", "differentiable", "foreach", "fused"}
"""Optimizer settings that depend on the device and layout."""

EntryShapes = dict[str, tuple[int, ...] | None]
"""The shape of each entry of a state by its dotted name; None for an entry that is not a tensor."""


class CheckpointMissing(UserError, ValueError):
    """A checkpoint lacks a requested part of the engine state."""


class BaseModelMismatch(UserError, ValueError):
    """The adapters of a checkpoint were trained on another base model."""


class ModelMismatch(BaseModelMismatch):
    """A checkpoint's tensors have other names or shapes than the model's."""


def save_checkpoint(
    folder: Path, module: nn.Module, optimizer: Optimizer | None, contents: Collection[str]
) -> None:
    """Writes the named parts: model, optimizer (with master weights), extra (schedule progress)."""
    sections = sections_for_contents(contents)
    if optimizer is not None and not optimizer.torch_optimizer.state:
        sections -= {"moments"}  # to save empty moments, torch would first run an optimizer step
    if state := _engine_state(module, optimizer, sections):
        with no_single_process_warning():
            save(wrap_packed_shards(state), checkpoint_id=str(folder))
        write_shard_checksums(folder, dist.get_rank() if dist.is_initialized() else 0)


def load_checkpoint(
    folder: Path,
    module: nn.Module,
    optimizer: Optimizer | None,
    contents: Collection[str] | None = None,
) -> None:
    """Reads the named parts; None reads all saved parts."""
    saved_shapes, sections = saved_sections(folder, contents, is_trained=optimizer is not None)
    state = _engine_state(module, optimizer, sections)
    check_same_tensors(folder, saved_shapes, state)
    base_checksum = state["base"].clone() if "base" in state else None
    packed_state = wrap_packed_shards(state)
    load_state(packed_state, folder)
    state = unwrap_packed_shards(packed_state)
    if base_checksum is not None and not torch.allclose(
        base_checksum, state["base"], rtol=_CHECKSUM_RTOL
    ):
        raise BaseModelMismatch(
            f"{folder} holds LoRA adapters over another base model (its weights sum to "
            f"{float(state['base']):.8g}, those loaded here to {float(base_checksum):.8g}); set "
            "model.path to the model with which the run started"
        )
    if "model" in state:
        # With adapters, the checkpoint lacks the frozen base model.
        options = StateDictOptions(strict=False) if _has_adapters(module) else _STRICT
        set_model_state_dict(module, state["model"], options=options)
    if optimizer is None:
        return
    if "moments" in state:
        saved_groups = state["moments"]["param_groups"]
        # This run's settings replace the saved ones; other values of a group may be optimizer state.
        settings = _KERNEL_SETTINGS | optimizer.configured_settings
        groups = optimizer.torch_optimizer.param_groups
        for saved_group, group in zip(saved_groups, groups, strict=True):
            saved_group.update({name: group[name] for name in settings & group.keys()})
        set_optimizer_state_dict(
            optimizer.masters, optimizer.torch_optimizer, state["moments"], options=_STRICT
        )
    if "progress" in state:
        optimizer.load_state_dict(state["progress"])
    if "model" in state and "masters" not in state:
        optimizer.copy_weights_to_masters()


def saved_sections(
    folder: Path, contents: Collection[str] | None, *, is_trained: bool
) -> tuple[EntryShapes, set[str]]:
    """Returns the shapes of a checkpoint's entries, and the requested sections that it contains.

    Raises if model state is requested and missing. With `is_trained`, also raises if the checkpoint has none
    of the requested parts of the optimizer.
    """
    if not folder.is_dir():
        raise CheckpointMissing(
            f"{folder.parent} holds no {folder.name}: the run that wrote this checkpoint had none; use the "
            "settings of that run, or start from its model in another trainer.default_local_dir"
        )
    shapes = _saved_entry_shapes(folder)
    available = {name.partition(".")[0] for name in shapes}
    sections = available if contents is None else sections_for_contents(contents) & available
    if "model" not in sections:
        sections = sections - {"masters"}  # the first update would copy them into the model
    if "model" not in available and (contents is None or "model" in contents):
        raise CheckpointMissing(
            f"{folder} holds no model state (it has {', '.join(sorted(available)) or 'nothing'}): "
            "it was saved without 'model' in checkpoint.save_contents; start from its export instead"
        )
    # One of the two is enough: before the first update, only the schedule has state to save.
    requested_parts = sorted({"optimizer", "extra"} & set(contents or ()))
    if is_trained and requested_parts and not available & sections_for_contents(requested_parts):
        raise CheckpointMissing(
            f"{folder} was saved without {' and '.join(requested_parts)}, which checkpoint.load_contents "
            "requests; leave them out to continue with a new optimizer"
        )
    return shapes, sections


def sections_for_contents(contents: Collection[str]) -> set[str]:
    """Returns the sections of a hone checkpoint for verl's parts `contents` (model, optimizer, extra)."""
    sections = {
        "model": {"model", "base"},  # base: the checksum of the model below LoRA adapters
        "optimizer": {"moments", "masters"},  # masters: float32 weights of a 16-bit model
        "extra": {"progress"},  # of the learning-rate schedule
    }
    return set().union(*(sections.get(part, set()) for part in contents))


def _engine_state(module: nn.Module, optimizer: Optimizer | None, sections: set[str]) -> State:
    """Returns the state of the sections; loading fills its tensors in place."""
    state: State = {}
    has_adapters = _has_adapters(module)
    if "model" in sections:
        state["model"] = get_model_state_dict(module)
        if has_adapters:
            for name in _frozen_names(module):
                state["model"].pop(name, None)
    if "base" in sections and has_adapters:
        state["base"] = _frozen_checksum(module)
    if optimizer is None:
        return state
    if "moments" in sections:
        state["moments"] = get_optimizer_state_dict(optimizer.masters, optimizer.torch_optimizer)
    if "masters" in sections and (masters := optimizer.master_copies()):
        state["masters"] = masters
    if "progress" in sections:
        state["progress"] = optimizer.state_dict()
    return state


def _has_adapters(module: nn.Module) -> bool:
    return is_lora(getattr(module, "lm", None))


def _frozen_names(module: nn.Module) -> list[str]:
    """Returns the names of frozen parameters; a tied parameter has two names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in parameters if not parameter.requires_grad]


@torch.no_grad()
def _frozen_checksum(module: nn.Module) -> Tensor:
    """Returns the sum of |weight| over the frozen parameters of all ranks; it identifies the base model."""
    total = torch.zeros((), dtype=torch.float64)
    for parameter in module.parameters():
        if not parameter.requires_grad:
            # Rounding to bfloat16 makes the sum independent of the dtype in which the base model is loaded.
            total += full_tensor(parameter.bfloat16().abs().sum(dtype=torch.float64)).cpu()
    return total


def _saved_entry_shapes(folder: Path) -> EntryShapes:
    """Returns the shapes of a checkpoint's entries; a sharded tensor has its full shape."""
    if not (folder / METADATA_FILE).is_file():
        return {}
    entries = read_metadata(folder).state_dict_metadata
    return {name: tuple(x.size) if hasattr(x, "size") else None for name, x in entries.items()}


def _entry_shapes(value: State | list[State] | Tensor | float, name: str) -> EntryShapes:
    """Returns the shapes of the entries below `value`; `name` is the dotted name of `value` in the state."""
    if isinstance(value, Mapping):
        children = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        children = [(str(index), child) for index, child in enumerate(value)]
    else:
        return {name: tuple(value.shape) if isinstance(value, Tensor) else None}
    shapes: EntryShapes = {}
    for key, child in children:
        shapes |= _entry_shapes(child, f"{name}.{key}" if name else key)
    return shapes


def check_same_tensors(folder: Path, saved_shapes: EntryShapes, state: State) -> None:
    """Raises, before any tensor is read, unless the checkpoint has the state's names and shapes."""
    current_shapes = _entry_shapes(state, "")
    weights = _weight_shapes(current_shapes)
    saved_weights = _weight_shapes(saved_shapes) if "model" in state else {}
    trained_names = _trained_names(current_shapes)
    saved_trained_names = _trained_names(saved_shapes)
    if not trained_names or not saved_trained_names:  # an optimizer without state per parameter
        trained_names = saved_trained_names = set()
    missing_names = (weights.keys() - saved_weights.keys()) | (trained_names - saved_trained_names)
    extra_names = (saved_weights.keys() - weights.keys()) | (saved_trained_names - trained_names)
    common_names = [name for name in weights if name in saved_weights]
    reshaped_names = [name for name in common_names if weights[name] != saved_weights[name]]
    if missing_names or extra_names or reshaped_names:
        difference = _describe_difference(
            sorted(missing_names), sorted(extra_names), reshaped_names, weights, saved_weights
        )
        raise ModelMismatch(
            f"{folder} holds another model than this run's: {difference}; set "
            "model.path and model.lora_rank to their values at the start of the run, or start a new run "
            "in another trainer.default_local_dir"
        )
    if missing_entries := [name for name in current_shapes if name not in saved_shapes]:
        raise CheckpointMissing(
            f"{folder} was saved with another optimizer than this run's (it has no "
            f"{missing_entries[0]}); keep optim.optimizer as it was, or leave "
            "'optimizer' out of checkpoint.load_contents"
        )


def _weight_shapes(shapes: EntryShapes) -> EntryShapes:
    """Returns the shapes of the section "model", by the names of the weights."""
    return {
        name.removeprefix("model."): shape
        for name, shape in shapes.items()
        if name.startswith("model.")
    }


def _trained_names(shapes: EntryShapes) -> set[str]:
    """Returns the names of the weights for which the optimizer keeps state."""
    keys = [name.split(".")[2] for name in shapes if name.startswith("moments.state.")]
    return {key.replace("/", ".") for key in keys}


def _describe_difference(
    missing_names: list[str],
    extra_names: list[str],
    reshaped_names: list[str],
    weights: EntryShapes,
    saved_weights: EntryShapes,
) -> str:
    """Describes how the weights of a checkpoint differ from the model's."""
    has_adapters = any(".lora_" in name for name in weights)
    has_saved_adapters = any(".lora_" in name for name in saved_weights)
    if has_adapters and not has_saved_adapters:
        return "it was trained without LoRA adapters, this run with them"
    if has_saved_adapters and not has_adapters:
        return "it was trained with LoRA adapters, this run without them"
    differences = []
    if missing_names:
        differences.append(f"it has no {_abbreviate(missing_names)}")
    if extra_names:
        differences.append(f"it has the additional {_abbreviate(extra_names)}")
    if reshaped_names:
        saved_shape = list(saved_weights[reshaped_names[0]] or ())
        shape = list(weights[reshaped_names[0]] or ())
        differences.append(
            f"{_abbreviate(reshaped_names)} has shape {saved_shape} there and {shape} here"
        )
    return ", ".join(differences)


def _abbreviate(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
