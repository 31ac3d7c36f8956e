"""What this process runs on: device and dtype, decided in one place for every role."""

from __future__ import annotations

import torch

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """`auto` is this rank's GPU where there is one."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            "trainer.device=cuda, but torch sees no CUDA device; use trainer.device=cpu"
        )
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU, where bfloat16 is a hundred times slower, and bfloat16 on a GPU."""
    if wanted == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[wanted]
