"""Which kernels a device gets: Triton's on a GPU, the torch reference elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

_PLAIN = ("add_rms_norm", "silu_mul", "rope_store", "store")
_ATTENTION = ("decode_attention", "rope_attention")
_SAMPLING = ("sample", "advance")


def kernels_for(device: torch.device) -> Any:
    """An object with one function a kernel."""
    if device.type != "cuda":
        from hone.rollout.native import kernels_reference

        return kernels_reference
    from hone.rollout.native import attention_triton, kernels_triton, sampling_triton

    return SimpleNamespace(
        **{name: getattr(kernels_triton, name) for name in _PLAIN},
        **{name: getattr(attention_triton, name) for name in _ATTENTION},
        **{name: getattr(sampling_triton, name) for name in _SAMPLING},
    )


def exact_kernels_for(device: torch.device) -> Any:
    """The kernels of exact mode: a row's bits do not depend on its batch."""
    if device.type != "cuda":
        from hone.rollout.native import exact_reference

        return exact_reference
    from hone.rollout.native import exact_triton

    return exact_triton
