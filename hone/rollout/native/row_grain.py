"""How many rows a matrix product takes before each of them rounds alike: tried out on this machine.

Products with a few rows, or that leave one thread a few odd rows, take another path with other rounding.
Decoding rounds its number of rows up to this grain, so that a row's bits do not depend on its batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from hone.ops.packed_linear import PlainLinear, linear_map

log = logging.getLogger(__name__)

_GRAINS = (1, 4, 8, 16)
_ROWS = 64
_WIDEST = 1024
"""Larger weights are tried at this size: the path is chosen by the rows, and trying should be quick."""


def row_grain(weights: Iterable[Tensor], *, packed: bool) -> int:
    """The smallest grain that holds for products with all these weights [out, in]."""
    shapes = {(min(w.shape[0], _WIDEST), min(w.shape[1], _WIDEST)) for w in weights if w.dim() == 2}
    threads = torch.get_num_threads()
    return max((_grain(*shape, threads, packed) for shape in sorted(shapes)), default=_GRAINS[-1])


@lru_cache(maxsize=256)
@torch.inference_mode()
def _grain(outputs: int, inputs: int, threads: int, packed: bool) -> int:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator)
    x = torch.randn(_ROWS, inputs, generator=generator)
    product = linear_map(weight, None) if packed else PlainLinear(weight, None)
    whole = product(x)
    for grain in _GRAINS:
        counts = range(grain, _ROWS, grain)
        if all(torch.equal(product(x[:n]), whole[:n]) for n in counts):
            return grain
    log.warning(
        "products with a [%d, %d] weight round differently for every number of rows on this machine: "
        "the same request may get other tokens in another batch",
        outputs,
        inputs,
    )
    return _GRAINS[-1]
