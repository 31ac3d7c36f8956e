"""Families that cover every kind of tensor-parallel layer; a scenario of two ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.families.tensor_parallel import difference
from hone.config.engine import OptimConfig
from hone.engine.contract import TrainEngine
from hone.engine.mesh import create_process_groups, mesh_for_rank
from hone.engine.sharding import join_group
from hone.models.lora import full_tensor

from .layouts import CASES, CONTENTS, ONE, Layout, build, update

KINDS = {  # family, whether its config switches are flipped, whether it has adapters
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


EXPERTS = replace(CASES["token-mean"], model="family qwen3_moe")
MASTERS = {"dtype": torch.bfloat16, "optim": OptimConfig(lr=1e-4)}
"""Weights in bfloat16, so that float32 masters and moments are saved too."""


def save_experts(layout: Layout, rank: int, folder: Path) -> list[torch.Tensor]:
    """Updates packed experts and saves them; returns weights, masters and moments."""
    engine = build(layout, EXPERTS, folder, rank, **MASTERS)
    update(engine, EXPERTS.objective())
    engine.save(folder / f"experts {layout}", CONTENTS)
    return experts_of(engine)


def load_experts(layout: Layout, rank: int, folder: Path, saved: Layout) -> list[torch.Tensor]:
    engine = build(layout, EXPERTS, folder, rank, **MASTERS)
    engine.load(folder / f"experts {saved}")
    return experts_of(engine)


def experts_of(engine: TrainEngine) -> list[torch.Tensor]:
    optimizer = engine.optimizer
    masters = [m for name, m in optimizer.masters.items() if "experts" in name]
    moments = [x for m in masters for x in optimizer.torch_optimizer.state[m].values() if x.dim()]
    weights = [w for name, w in engine.named_hf_weights() if "experts" in name]
    return [full_tensor(x).clone() for x in (*weights, *masters, *moments)]


def experts(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Returns the tensors that two ranks saved, loaded again, and loaded from one rank."""
    two = Layout("fsdp2", tensor=world)
    saved = save_experts(two, rank, folder)
    loaded = [load_experts(two, rank, folder, layout) for layout in (two, ONE)]
    return {"experts saved": saved, "experts again": loaded[0], "experts of one": loaded[1]}


def timeouts(rank: int, world: int, folder: Path) -> dict[str, set[float]]:
    """Returns the timeouts in seconds of all groups of the meshes."""
    device, seconds = torch.device("cpu"), set()
    for sizes in ({"tensor": world}, {"sequence": world}):
        groups = create_process_groups(mesh_for_rank(rank, world, **sizes), -1, device)
        meshes = [m for m in (groups.fsdp_mesh, groups.tensor_mesh) if m is not None]
        mesh_groups = [m.get_group(name) for m in meshes for name in m.mesh_dim_names]
        for group in (groups.data, groups.sequence, *mesh_groups):
            if group is not None:
                timeout = group._get_backend(device).options._timeout
                seconds.add(timeout.total_seconds())
    return {"timeouts": seconds}
