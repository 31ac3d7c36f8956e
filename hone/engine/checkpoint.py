"""Engine state on disk through torch.distributed.checkpoint.

Written by every rank of the group into a folder that the caller later renames; readable at another
world size. Of a LoRA model only what is trained is kept: its base is at model.path, and must be that one.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from hone.engine.optimizer import Optimizer
from hone.models.lora import is_lora

_STRICT = StateDictOptions(strict=True)
_SAME_BASE = 1e-9
"""Relative; another number of ranks sums in another order, in float64."""


class CheckpointMissing(ValueError):
    """A folder lacks a part of the engine's state that was asked for."""


class AnotherBase(ValueError):
    """The adapters of a checkpoint were trained over another model than this one."""


def save_checkpoint(
    folder: Path, module: nn.Module, optimizer: Optimizer | None, contents: Collection[str]
) -> None:
    """Write the named parts: model, optimizer (with the masters), extra (how far the schedule is)."""
    # Asking torch for state that does not exist yet would make it, by a step: skip it then.
    skip = {"moments"} if optimizer is not None and not optimizer.inner.state else set()
    if state := _state(module, optimizer, _sections(contents) - skip):
        dcp.save(state, checkpoint_id=str(folder))


def load_checkpoint(
    folder: Path,
    module: nn.Module,
    optimizer: Optimizer | None,
    contents: Collection[str] | None = None,
) -> None:
    """Read the named parts; None reads all that was written."""
    saved = _saved_sections(folder)
    wanted = saved if contents is None else _sections(contents) & saved
    if "model" not in saved and (contents is None or "model" in contents):
        raise CheckpointMissing(
            f"{folder} holds no model state (it has {', '.join(sorted(saved)) or 'nothing'}); it was "
            "saved without 'model' in checkpoint.save_contents. Start from its export instead"
        )
    state = _state(module, optimizer, wanted)
    base = state["base"].clone() if "base" in state else None
    dcp.load(state, checkpoint_id=str(folder))
    if base is not None and not torch.allclose(base, state["base"], rtol=_SAME_BASE):
        raise AnotherBase(
            f"{folder} holds LoRA adapters over another base model (its weights sum to "
            f"{float(state['base']):.8g}, those loaded here to {float(base):.8g}); set model.path to "
            "the model the run began with"
        )
    if "model" in state:
        strict = StateDictOptions(strict=False) if _has_adapters(module) else _STRICT
        set_model_state_dict(module, state["model"], options=strict)
    if optimizer is None:
        return
    if "moments" in state:
        set_optimizer_state_dict(
            optimizer.masters, optimizer.inner, state["moments"], options=_STRICT
        )
    if "progress" in state:
        optimizer.load_state_dict(state["progress"])
    if "model" in state and "masters" not in state:
        optimizer.take_masters_from_weights()


def _sections(contents: Collection[str]) -> set[str]:
    """The family's parts as the sections of our file."""
    parts = {"model": {"model", "base"}, "optimizer": {"moments", "masters"}, "extra": {"progress"}}
    return set().union(*(parts.get(part, set()) for part in contents))


def _state(module: nn.Module, optimizer: Optimizer | None, sections: set[str]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    adapters = _has_adapters(module)
    if "model" in sections:
        state["model"] = get_model_state_dict(module)
        for name in _frozen_names(module) if adapters else ():
            state["model"].pop(name, None)
    if "base" in sections and adapters:
        state["base"] = _size_of_frozen(module)
    if optimizer is None:
        return state
    if "moments" in sections:
        state["moments"] = get_optimizer_state_dict(optimizer.masters, optimizer.inner)
    if "masters" in sections and (masters := optimizer.own_masters()):
        state["masters"] = masters  # loading fills these very tensors
    if "progress" in sections:
        state["progress"] = optimizer.state_dict()
    return state


def _has_adapters(module: nn.Module) -> bool:
    return is_lora(getattr(module, "lm", None))


def _frozen_names(module: nn.Module) -> list[str]:
    """Every name of every frozen parameter: a tied one has two."""
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not parameter.requires_grad]


@torch.no_grad()
def _size_of_frozen(module: nn.Module) -> Tensor:
    """Sum of |weight| over the frozen parameters of all ranks: tells one base from another."""
    total = torch.zeros((), dtype=torch.float64)
    for parameter in module.parameters():
        if not parameter.requires_grad:
            # Rounded alike: the same base may be held in another dtype than when it was saved.
            size = parameter.bfloat16().abs().sum(dtype=torch.float64)
            total += (size.full_tensor() if hasattr(size, "full_tensor") else size).cpu()
    return total


def _saved_sections(folder: Path) -> set[str]:
    if not (folder / ".metadata").is_file():
        return set()
    names = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    return {name.partition(".")[0] for name in names}
