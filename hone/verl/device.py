"""verl's functions about the device of this process: CUDA if available, else the CPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

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
    """Returns the index of the current GPU, or 0 on the CPU."""
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def get_nccl_backend() -> str:
    """Returns the torch.distributed backend of the device."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def get_visible_devices_keyword() -> str:
    """Returns the name of the environment variable that selects devices."""
    return "CUDA_VISIBLE_DEVICES"


def get_resource_name() -> str:
    """Returns Ray's resource name for the device."""
    return "GPU" if torch.cuda.is_available() else "CPU"


def get_device_capability(device_id: int = 0) -> tuple[int | None, int | None]:
    """Returns the compute capability of a GPU; (None, None) on the CPU."""
    return torch.cuda.get_device_capability(device_id) if is_cuda_available else (None, None)


def is_torch_npu_available(check_device: bool = True) -> bool:
    """Returns False: Ascend devices are not used."""
    return False


def is_support_ipc() -> bool:
    """Returns whether tensors can be shared between processes by CUDA IPC."""
    return is_cuda_available


def set_expandable_segments(enable: bool) -> None:
    """Sets the CUDA allocator's `expandable_segments`; does nothing on the CPU."""
    if is_cuda_available:
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{enable}")


def auto_set_device(config: Any) -> None:
    """Does nothing: `trainer.device` is chosen when the config is composed."""
