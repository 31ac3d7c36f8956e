"""Functions over the ranks of a process group, with verl's names and arguments.

In verl, they are in `utils`: `distributed`, `memory_utils`, `torch_functional` and `profiler`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from hone.ops.rows import masked_sum
from hone.verl.device import get_device_name, get_nccl_backend

if TYPE_CHECKING:
    from tensordict import TensorDict


def distributed_mean_max_min_std(
    local_tensor: Tensor,
    compute_max: bool = True,
    compute_min: bool = True,
    compute_std: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Returns mean, max, min and std over all ranks; a value that is not requested is None."""
    count = torch.tensor(local_tensor.numel(), device=local_tensor.device)
    count = _all_reduce(count, dist.ReduceOp.SUM)
    mean = _all_reduce(local_tensor.sum(), dist.ReduceOp.SUM) / count
    squared_deviations = (local_tensor - mean).square().sum()
    return (
        mean,
        _all_reduce(local_tensor.max(), dist.ReduceOp.MAX) if compute_max else None,
        _all_reduce(local_tensor.min(), dist.ReduceOp.MIN) if compute_min else None,
        (_all_reduce(squared_deviations, dist.ReduceOp.SUM) / (count - 1)).sqrt()
        if compute_std
        else None,
    )


def distributed_masked_mean(local_tensor: Tensor, local_mask: Tensor) -> Tensor:
    """Returns the mean of the unmasked entries of all ranks."""
    total = _all_reduce(masked_sum(local_tensor, local_mask), dist.ReduceOp.SUM)
    return total / _all_reduce(local_mask.bool().sum(), dist.ReduceOp.SUM)


def broadcast_dict_tensor(
    tensors: TensorDict | dict[str, Tensor], src: int, group: dist.ProcessGroup | None
) -> None:
    """Sends every tensor from rank `src` to all ranks, in place."""
    for key in sorted(tensors.keys()):
        dist.broadcast(tensors[key], src=src, group=group)


def allgather_dict_tensors(
    tensors: TensorDict | dict[str, Tensor],
    size: int,
    group: dist.ProcessGroup | None,
    dim: int = 0,
) -> TensorDict | dict[str, Tensor]:
    """Returns the tensors of all ranks, concatenated along `dim`."""
    concatenated: dict[str, Tensor] = {}
    for key in sorted(tensors.keys()):
        parts = [torch.empty_like(tensors[key]) for _ in range(size)]
        dist.all_gather(parts, tensors[key].contiguous(), group=group)
        concatenated[key] = torch.cat(parts, dim=dim)
    if isinstance(tensors, dict):
        return concatenated
    return type(tensors)(concatenated, batch_size=[tensors.batch_size[0] * size])


def split_dict_tensor_into_batches(tensors: TensorDict, batch_size: int) -> Sequence[TensorDict]:
    """Returns batches of `batch_size` rows, which must divide the number of rows."""
    if tensors.batch_size[0] % batch_size:
        raise AssertionError(
            f"{tensors.batch_size[0]} rows do not divide into batches of {batch_size}"
        )
    parts: Sequence[TensorDict] = tensors.split(batch_size)
    return parts


def reduce_timing(
    timing_raw: dict[str, float], reduce_op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> dict[str, float]:
    """Returns the seconds per name, reduced over the ranks."""
    names = sorted(timing_raw)
    seconds = torch.tensor([timing_raw[name] for name in names], device=get_device_name())
    if dist.is_initialized():
        seconds = _all_reduce(seconds, reduce_op)
    return dict(zip(names, seconds.tolist(), strict=True))


def initialize_global_process_group(timeout_second: float = 36000) -> tuple[int, int, int]:
    """Joins torchrun's process group; returns local rank, rank and world size."""
    device = get_device_name()
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:{get_nccl_backend()}"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_second))
    if device != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return int(os.environ["LOCAL_RANK"]), dist.get_rank(), dist.get_world_size()


def destroy_global_process_group() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
    """Collects garbage and frees the unused memory of the GPU allocator."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        if force_sync:
            torch.cuda.synchronize()


def _all_reduce(value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    dist.all_reduce(value, op=op)
    return value
