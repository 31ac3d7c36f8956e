"""The process groups of `strategy=megatron`, which all models of a process share."""

from __future__ import annotations

import math

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from hone.engine.contract import EngineSpec, Mesh
from hone.engine.megatron.weights import MegatronGroups


def join_mesh(spec: EngineSpec) -> Mesh:
    """Creates megatron-core's process groups, unless they exist; returns the coordinates of this rank."""
    megatron = spec.megatron
    if problem := megatron.divisibility_problem(spec.world_size):
        raise ValueError(f"megatron.{problem}")
    requested_sizes = (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.expert_model_parallel_size,
        megatron.effective_expert_tensor_parallel_size,
    )
    if not dist.is_initialized():
        backend = "gloo" if spec.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        world_group = dist.distributed_c10d._get_default_group()
        timeout = world_group._get_backend(spec.device).options._timeout
        parallel_state.initialize_model_parallel(
            megatron.tensor_model_parallel_size,
            megatron.pipeline_model_parallel_size,
            expert_model_parallel_size=megatron.expert_model_parallel_size,
            expert_tensor_parallel_size=megatron.effective_expert_tensor_parallel_size,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=math.ceil(timeout.total_seconds() / 60),
            order="tp-cp-ep-dp-pp",
        )
    current_sizes = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    if current_sizes != requested_sizes:
        raise ValueError(
            "two models of one process have different Megatron layouts: tensor, pipeline, expert and expert "
            f"tensor parallel {current_sizes} and {requested_sizes}; give actor, reference and critic the "
            "same layout, or separate processes"
        )
    model_parallel_cuda_manual_seed(spec.fsdp.seed)
    return Mesh(
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=megatron.tensor_model_parallel_size,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=megatron.pipeline_model_parallel_size,
    )


def process_groups() -> MegatronGroups:
    """Returns the process groups of this rank."""
    return MegatronGroups(
        parallel_state.get_data_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_expert_tensor_and_model_parallel_group(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
