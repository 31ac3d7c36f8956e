"""Linear maps for decoding on a CPU: weights laid out once as the matrix library multiplies fastest.

A product with a few rows spends its time re-ordering the weight; here that is done ahead. Where the
library has no such layout (other processors, other dtypes) the plain product stands in.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_LIKELY_ROWS = 64
"""The layout is chosen for products of about this many rows; it serves any number."""


class Linear(Protocol):
    """y = x Wᵀ + b, alone or added to something."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """y + other."""


def linear_map(weight: Tensor, bias: Tensor | None) -> Linear:
    """The fastest form of this map; a packed one is a copy of the weight as it is now."""
    return PackedLinear(weight, bias) if packs(weight) else PlainLinear(weight, bias)


def packs(weight: Tensor) -> bool:
    """Whether products with such a weight have a packed form here."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and _library_packs()


@cache
def _library_packs() -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    weight, x = torch.eye(16), torch.arange(32.0).view(2, 16)
    try:
        with torch.inference_mode():
            packed = PackedLinear(weight, None)
            found = packed(x), packed.plus(x, x)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.allclose(found[0], x) and torch.allclose(found[1], x + x)


class PackedLinear:
    """One weight [out, in] in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _LIKELY_ROWS)
        self._unary = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        return self._unary(x, self._weight, self._bias, "none", [], "")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, self._weight, self._bias, "add")


class PlainLinear:
    """The same map by torch's own product, with the parameter itself."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x) + other
