"""Lets megatron-core run on the CPU: import it before the engine is built, as `model.external_lib` does.

megatron-core names the CUDA device in many places. Here that name means the CPU, and its generators are the
CPU's.
"""

from __future__ import annotations

from typing import Any

import megatron.core.pipeline_parallel.schedules as schedules
import megatron.core.tensor_parallel.random as megatron_random
import megatron.core.transformer.moe.moe_utils as moe_utils
import torch


class _Torch:
    """The module `torch` as a megatron-core file sees it, with zeros on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs | {"device": "cpu"})


class _Stream:
    """A stream that orders nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def patch() -> None:
    schedules.torch = moe_utils.torch = _Torch()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = _Stream
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


if not torch.cuda.is_available():
    patch()
