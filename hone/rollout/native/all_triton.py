"""The kernels of a decode step on a GPU; their reference is kernels_reference.py."""

from hone.rollout.native.attention_triton import decode_attention, rope_attention
from hone.rollout.native.kernels_triton import add_rms_norm, rope_store, silu_mul, store
from hone.rollout.native.sampling_triton import advance, sample

__all__ = [
    "add_rms_norm",
    "advance",
    "decode_attention",
    "rope_attention",
    "rope_store",
    "sample",
    "silu_mul",
    "store",
]
