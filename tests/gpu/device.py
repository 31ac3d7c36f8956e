"""Where kernel tests run: a GPU, or a CPU under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None

needs_kernels = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (HAS_TRITON and (DEVICE.type == "cuda" or INTERPRETED)),
        reason="needs Triton and a GPU (or TRITON_INTERPRET=1)",
    ),
]
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64; NaN fails every comparison."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
