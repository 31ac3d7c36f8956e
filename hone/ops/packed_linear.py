"""Linear layers for decoding on a CPU, with weights packed in the layout of the matrix library.

A product with few rows spends most of its time on reordering the weight, so this is done once in advance.
Processors and dtypes without a packed layout use the plain product.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

_LIKELY_ROWS = 64
"""The layout is optimized for products of about this many rows, but works for any number."""
_MULTIPLES = (1, 4, 8, 16)
_TRIED_ROWS = 64
_WIDEST = 1024
"""Larger weights are tested at this size, which is faster: the code path depends on the rows."""


class PackableLinear(Protocol):
    """A linear layer y = x Wᵀ + b, optionally with a sum."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Returns y + other."""


def linear_map(weight: Tensor, bias: Tensor | None) -> PackableLinear:
    """Returns the fastest linear layer; a packed one copies the current weight."""
    return PackedLinear(weight, bias) if packs(weight) else PlainLinear(weight, bias)


def packs(weight: Tensor) -> bool:
    """Whether this weight can be packed on this machine."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and _library_packs()


@cache
def _library_packs() -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    weight, x = torch.eye(16), torch.arange(32.0).view(2, 16)
    try:
        with torch.inference_mode():
            packed = PackedLinear(weight, None)
            results = packed(x), packed.plus(x, x)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.allclose(results[0], x) and torch.allclose(results[1], x + x)


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
    """One weight [out, in], without a copy, multiplied by torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x) + other


def row_multiple(weights: Iterable[Tensor], *, packed: bool) -> int:
    """Returns the smallest row multiple for which products with these weights [out, in] are batch-invariant.

    Products with few rows, or with a few odd rows for one thread, use another code path with other rounding.
    Decoding pads its rows to this multiple, so that a row's bits do not depend on its batch.
    """
    shapes = {(min(w.shape[0], _WIDEST), min(w.shape[1], _WIDEST)) for w in weights if w.dim() == 2}
    threads = torch.get_num_threads()
    multiples = (_row_multiple(*shape, threads, packed) for shape in sorted(shapes))
    return max(multiples, default=_MULTIPLES[-1])


@lru_cache(maxsize=256)
@torch.inference_mode()
def _row_multiple(outputs: int, inputs: int, threads: int, packed: bool) -> int:
    """Measures the multiple on this machine."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator)
    x = torch.randn(_TRIED_ROWS, inputs, generator=generator)
    product = linear_map(weight, None) if packed else PlainLinear(weight, None)
    reference = product(x)
    for multiple in _MULTIPLES:
        counts = range(multiple, _TRIED_ROWS, multiple)
        if all(torch.equal(product(x[:n]), reference[:n]) for n in counts):
            return multiple
    log.warning(
        "products with a [%d, %d] weight round differently for every number of rows on this machine: "
        "the same request may get other tokens in another batch",
        outputs,
        inputs,
    )
    return _MULTIPLES[-1]
