"""Collectives of a tensor-parallel group with their gradients.

`copy_to` and `sum_over` are each other's transpose, as are `gather_last` and `split_last`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hone.ops.autograd import Context

Group = dist.ProcessGroup


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Returns x, which all ranks have; its gradient is summed over the ranks."""
    copied: Tensor = _Copy.apply(x, group)
    return copied


def sum_over(x: Tensor, group: Group) -> Tensor:
    """Returns the sum of the ranks' x; every rank passes its gradient through."""
    total: Tensor = _Sum.apply(x, group)
    return total


def gather_last(x: Tensor, group: Group) -> Tensor:
    """Concatenates the ranks' equal parts of the last dimension."""
    whole: Tensor = _Gather.apply(x, group)
    return whole


def split_last(x: Tensor, group: Group) -> Tensor:
    """Returns this rank's part of the last dimension of x, which all ranks have."""
    part: Tensor = _Split.apply(x, group)
    return part


def _summed(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gathered(x: Tensor, group: Group) -> Tensor:
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, -1)


def _part(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size(), -1)[group.rank()].contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return _part(gradient, ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _part(x, group)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.group), None
