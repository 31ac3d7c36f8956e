"""Compares the processes of a run with the GPUs and CPU cores of this machine, before Ray starts."""

from __future__ import annotations

import os

from hone.config import PPOTrainerConfig
from hone.trainer.threads import uses_gpu


def device_problem(config: PPOTrainerConfig) -> str | None:
    """Returns why the run does not fit this machine, or None; a Ray cluster checks its own nodes."""
    import torch

    device, ray_init = config.trainer.device, config.ray_kwargs.ray_init
    uses_ray = config.resolved_controller == "ray"
    if uses_ray:
        from hone.controller.ray_start import joins_cluster

        if joins_cluster(vars(ray_init)):
            return None
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not num_gpus:
        return "trainer.device=cuda, but torch sees no CUDA device here; use trainer.device=cpu"
    if not uses_ray:
        return None
    processes = config.world_size + sum(config.rollout_pool) + sum(config.reward_pool)
    needs = f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}: the run needs {processes}"
    remedy = "lower it, or name a Ray cluster with ray_kwargs.ray_init.address"
    if uses_gpu(device):
        limit = num_gpus if ray_init.num_gpus is None else ray_init.num_gpus
        has = f"GPUs, and this machine has {limit}"
    else:
        limit = (os.cpu_count() or 1) if ray_init.num_cpus is None else ray_init.num_cpus
        has = f"CPU processes, and this machine has {num_gpus} GPUs and {limit} CPU cores"
    return f"{needs} {has}; {remedy}" if processes > limit else None


def device_warning(config: PPOTrainerConfig) -> str | None:
    """Returns a line if a run of several processes trains on the CPU because there is no GPU."""
    trainer = config.trainer
    if config.world_size == 1 or trainer.device != "auto" or uses_gpu(trainer.device):
        return None
    return (
        f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}, but torch sees no GPU here: "
        f"{config.world_size} CPU processes train"
    )
