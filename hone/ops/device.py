"""The device of this process, under verl's names: CUDA if available, else the CPU."""

from __future__ import annotations

from types import ModuleType

import torch

is_cuda_available = torch.cuda.is_available()
is_npu_available = False


def get_device_name() -> str:
    """Returns `cuda` or `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def get_torch_device() -> ModuleType:
    """Returns the torch module of the device: `torch.cuda` or `torch.cpu`."""
    return torch.cuda if torch.cuda.is_available() else torch.cpu


def get_device_id() -> int:
    """Returns the index of the current device; 0 on the CPU."""
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def get_nccl_backend() -> str:
    """Returns the torch.distributed backend of the device."""
    return "nccl" if torch.cuda.is_available() else "gloo"
