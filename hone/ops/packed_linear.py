"""Linear layers for decoding on a CPU, with weights packed in oneDNN's layout.

oneDNN spends most of the time of a product with few rows on reordering the weight; a packed weight is
reordered only once. Processors and dtypes without a packed layout use the plain product.
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

_TYPICAL_ROWS = 64
"""The number of rows for which the packed layout is chosen; any number of rows works."""
_ROW_MULTIPLES = (1, 4, 8, 16)
"""The candidates of `row_multiple`."""
_TESTED_ROWS = 64
_TESTED_SIZE = 1024
"""Larger weights are tested at this size, because the code path depends only on the number of rows."""


class PackableLinear(Protocol):
    """A linear layer, y = x Wᵀ + b, whose weight may be packed."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def forward_add(self, x: Tensor, other: Tensor) -> Tensor:
        """Returns y + other."""


def make_linear(weight: Tensor, bias: Tensor | None) -> PackableLinear:
    """Returns a layer with a packed copy of the weight if possible, else with the weight itself."""
    return PackedLinear(weight, bias) if can_pack(weight) else PlainLinear(weight, bias)


def can_pack(weight: Tensor) -> bool:
    """Returns whether this weight can be packed on this machine."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and _is_packing_supported()


@cache
def _is_packing_supported() -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    weight, x = torch.eye(16), torch.arange(32.0).view(2, 16)
    try:
        with torch.inference_mode():
            packed = PackedLinear(weight, None)
            results = packed(x), packed.forward_add(x, x)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.allclose(results[0], x) and torch.allclose(results[1], x + x)


class PackedLinear:
    """One weight [out, in] in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS)
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._linear_add = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._weight, self._bias, "none", [], "")

    def forward_add(self, x: Tensor, other: Tensor) -> Tensor:
        return self._linear_add(x, other, self._weight, self._bias, "add")


class PlainLinear:
    """One weight [out, in], not copied."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def forward_add(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x) + other


def row_multiple(weights: Iterable[Tensor], *, prepacked: bool) -> int:
    """Returns the smallest m such that products with a multiple of m rows are batch-invariant.

    The matrix library chooses its code path, and thus the rounding, by the number of rows. Decoding pads
    batches to a multiple of m rows, so that the result of a row does not depend on the other rows.
    """
    shapes = {
        (min(weight.shape[0], _TESTED_SIZE), min(weight.shape[1], _TESTED_SIZE))
        for weight in weights
        if weight.dim() == 2
    }
    threads = torch.get_num_threads()
    multiples = (_row_multiple(*shape, threads, prepacked) for shape in sorted(shapes))
    return max(multiples, default=_ROW_MULTIPLES[-1])


@lru_cache(maxsize=256)
@torch.inference_mode()
def _row_multiple(out_features: int, in_features: int, threads: int, prepacked: bool) -> int:
    """Returns the m of `row_multiple` for one weight shape; tests products on this machine."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator)
    x = torch.randn(_TESTED_ROWS, in_features, generator=generator)
    product = make_linear(weight, None) if prepacked else PlainLinear(weight, None)
    reference = product(x)
    for multiple in _ROW_MULTIPLES:
        row_counts = range(multiple, _TESTED_ROWS, multiple)
        if all(torch.equal(product(x[:rows]), reference[:rows]) for rows in row_counts):
            return multiple
    log.warning(
        "on this machine, the rounding of products with a [%d, %d] weight depends on the number of "
        "rows, so the same request may get other tokens in another batch",
        out_features,
        in_features,
    )
    return _ROW_MULTIPLES[-1]
