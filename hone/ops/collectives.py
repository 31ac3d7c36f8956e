"""Collectives of a tensor-parallel group with their gradients.

`copy_to_group` and `sum_over_group` are each the backward pass of the other, as are `gather_last_dim` and
`split_last_dim`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hone.ops.autograd import Context

Group = dist.ProcessGroup


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Returns x, which must be equal on all ranks; the gradient is summed over the ranks."""
    return _Copy.apply(x, group)


def sum_over_group(x: Tensor, group: Group) -> Tensor:
    """Returns the sum of x over the ranks; the gradient of x is the gradient of the sum."""
    return _Sum.apply(x, group)


def gather_last_dim(x: Tensor, group: Group) -> Tensor:
    """Returns the tensors of all ranks, which have equal shapes, joined in the last dimension."""
    return _Gather.apply(x, group)


def split_last_dim(x: Tensor, group: Group) -> Tensor:
    """Returns this rank's part of the last dimension of x; x must be equal on all ranks."""
    return _Split.apply(x, group)


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(x: Tensor, group: Group) -> Tensor:
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, -1)


def _local_part(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size(), -1)[group.rank()].contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return _local_part(gradient, ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _local_part(x, group)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_gather(gradient, ctx.group), None
