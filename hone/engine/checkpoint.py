"""Engine state on disk through torch.distributed.checkpoint.

Written by every rank of the group into a folder that the caller later renames; readable at another
world size. Random state is not kept: nothing here draws from it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from hone.engine.optimizer import Optimizer

_STRICT = StateDictOptions(strict=True)


class CheckpointMissing(ValueError):
    """A folder lacks a part of the engine's state that was asked for."""


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
    dcp.load(state, checkpoint_id=str(folder))
    if "model" in state:
        set_model_state_dict(module, state["model"], options=_STRICT)
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
    parts = {"model": {"model"}, "optimizer": {"moments", "masters"}, "extra": {"progress"}}
    return set().union(*(parts.get(part, set()) for part in contents))


def _state(module: nn.Module, optimizer: Optimizer | None, sections: set[str]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if "model" in sections:
        state["model"] = get_model_state_dict(module)
    if optimizer is None:
        return state
    if "moments" in sections:
        state["moments"] = get_optimizer_state_dict(optimizer.masters, optimizer.inner)
    if "masters" in sections and (masters := optimizer.own_masters()):
        state["masters"] = masters  # loading fills these very tensors
    if "progress" in sections:
        state["progress"] = optimizer.state_dict()
    return state


def _saved_sections(folder: Path) -> set[str]:
    if not (folder / ".metadata").is_file():
        return set()
    names = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    return {name.partition(".")[0] for name in names}
