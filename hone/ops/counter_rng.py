"""Counter-based random numbers: pure functions of (seed, position).

There is no generator state, so a request gets the same numbers in any batch.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def fold_seed(*parts: int | str) -> int:
    """Returns a 63-bit seed: a hash of the parts (run seed, uid, sample index, …)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _to_signed(0x9E3779B97F4A7C15)
_MIX1 = _to_signed(0xBF58476D1CE4E5B9)
_MIX2 = _to_signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Returns x shifted logically; torch's `>>` shifts arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Applies the finaliser of SplitMix64, in wrapping int64 arithmetic."""
    x = (x ^ _shift_right(x, 30)) * _MIX1
    x = (x ^ _shift_right(x, 27)) * _MIX2
    return x ^ _shift_right(x, 31)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Returns a float64 number in [0, 1) per (seed, position) pair of int64 tensors."""
    bits = _mix(_mix(seed + _GOLDEN) + position * _GOLDEN)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53
