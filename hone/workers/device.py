"""Chooses the device and dtype of a process and joins the process group, for all roles."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable

import numpy as np
import torch

from hone.config import ConfigError
from hone.config.engine import FSDPConfig

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


def pick_device(name: str, local_rank: int) -> torch.device:
    """Returns the device of a rank; `auto` is its GPU if there is one, else the CPU."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            ["trainer.device=cuda, but torch sees no CUDA device; use trainer.device=cpu"]
        )
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the dtype; `auto` is bfloat16 on a GPU, and float32 on a CPU, where bfloat16 is slow."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[name]


def prepare_process(
    device: torch.device, world_size: int, timeout_s: float, fsdp_configs: Iterable[FSDPConfig]
) -> None:
    """Joins the process group and applies `full_determinism`; call this before a model is loaded."""
    if world_size > 1:
        from hone.engine.sharding import join_group

        join_group(device, timeout_s)
    for config in fsdp_configs:
        if config.full_determinism:
            make_deterministic(config.seed)


def make_deterministic(seed: int) -> None:
    """Enables deterministic kernels (torch warns where it has none) and seeds every generator."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling uninitialized memory is slow, and no kernel reads that memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
