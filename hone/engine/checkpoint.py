"""Engine state on disk through torch.distributed.checkpoint, and the Hugging Face export beside it.

Written by every rank of the group into a folder that the caller later renames; readable at another
world size. Random state is not kept: nothing here draws from it.
"""

from __future__ import annotations

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


def save_checkpoint(folder: Path, module: nn.Module, optimizer: Optimizer | None) -> None:
    state: dict[str, Any] = {"model": get_model_state_dict(module)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(module, optimizer.inner)
        state["progress"] = optimizer.state_dict()
    dcp.save(state, checkpoint_id=str(folder))


def load_checkpoint(folder: Path, module: nn.Module, optimizer: Optimizer | None) -> None:
    state: dict[str, Any] = {"model": get_model_state_dict(module)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(module, optimizer.inner)
        state["progress"] = optimizer.state_dict()
    dcp.load(state, checkpoint_id=str(folder))
    options = StateDictOptions(strict=True)
    set_model_state_dict(module, state["model"], options=options)
    if optimizer is not None:
        set_optimizer_state_dict(module, optimizer.inner, state["optimizer"], options=options)
        optimizer.load_state_dict(state["progress"])
