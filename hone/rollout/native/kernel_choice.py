"""Which kernels a device gets: Triton's on a GPU, the torch reference elsewhere."""

from __future__ import annotations

from types import ModuleType

import torch


def kernels_for(device: torch.device) -> ModuleType:
    """A module with one function per kernel."""
    if device.type != "cuda":
        from hone.rollout.native import kernels_reference

        return kernels_reference
    from hone.rollout.native import all_triton

    return all_triton


def exact_kernels_for(device: torch.device) -> ModuleType:
    """The kernels of exact mode: a row's bits do not depend on its batch."""
    if device.type != "cuda":
        from hone.rollout.native import exact_reference

        return exact_reference
    from hone.rollout.native import exact_triton

    return exact_triton
