"""Families that show every kind of tensor parallel layer; a scenario of two ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.families.tensor_parallel import difference
from hone.engine.sharding import join_group

KINDS = {  # family, whether the other value of every switch, and with adapters
    "norms of heads": ("qwen3", False, False),
    "gathered outputs": ("phi3", False, False),
    "gathered outputs, adapters": ("phi3", False, True),
    "latent attention, adapters": ("minicpm3", False, True),
    "experts": ("qwen3_moe", False, False),
    "packed experts of other strides": ("aria_text", False, False),
    "sinks": ("granite_swa", False, False),
    "soft caps, a scaled embedding": ("gemma2", False, False),
    "a norm per head": ("cohere", True, False),
    "an activation with parameters": ("apertus", False, False),
    "norms that the plan leaves out": ("phi", True, False),
}


def families(rank: int, world: int, folder: Path) -> dict[str, dict[str, float]]:
    join_group(torch.device("cpu"))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
    return {
        name: difference(family, mesh, flipped=flipped, adapters=adapters)
        for name, (family, flipped, adapters) in KINDS.items()
    }
