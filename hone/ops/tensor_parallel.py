"""Collectives of a tensor-parallel group with their gradients, and log-probs of a sharded vocabulary.

`copy_to_group` and `sum_over_group` are each the backward pass of the other, as are `gather_last_dim` and
`split_last_dim`. For log-probs, each rank computes the logits of its rows of the LM head, one chunk of
tokens at a time, and the ranks exchange three numbers per token. logprobs.py has the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import Unpack

from hone.ops.autograd import Context
from hone.ops.logprobs import (
    LinearLogProbs,
    LogitOptions,
    Statistics,
    chunk_slices,
    scaled_logits,
)

Group = dist.ProcessGroup
GroupFunction = Callable[[Tensor, Group], Tensor]


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Returns x, which must be equal on all ranks; the gradient is summed over the ranks."""
    return _Collective.apply(x, group, _view, _all_reduce)


def sum_over_group(x: Tensor, group: Group) -> Tensor:
    """Returns the sum of x over the ranks; the gradient of x is the gradient of the sum."""
    return _Collective.apply(x, group, _all_reduce, _view)


def gather_last_dim(x: Tensor, group: Group) -> Tensor:
    """Returns the tensors of all ranks, which have equal shapes, joined in the last dimension."""
    return _Collective.apply(x, group, _all_gather, _local_part)


def split_last_dim(x: Tensor, group: Group) -> Tensor:
    """Returns this rank's part of the last dimension of x; x must be equal on all ranks."""
    return _Collective.apply(x, group, _local_part, _all_gather)


class _Collective(torch.autograd.Function):
    """Computes `forward_function(x, group)`, and the gradient with `backward_function`."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        group: Group,
        forward_function: GroupFunction,
        backward_function: GroupFunction,
    ) -> Tensor:
        ctx.group, ctx.backward_function = group, backward_function
        return forward_function(x, group)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_function(gradient, ctx.group), None, None, None


def _view(x: Tensor, _: Group) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(x: Tensor, group: Group) -> Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts, -1)


def _local_part(x: Tensor, group: Group) -> Tensor:
    """Returns this rank's part of the last dimension."""
    return x.chunk(group.size(), -1)[group.rank()].contiguous()


def shard_start(rows: int, group: Group) -> int:
    """Returns the first row of this rank's shard of `rows`; all shards but the last have the same size."""
    return min(rows, -(-rows // group.size()) * group.rank())


def vocab_parallel_outputs(
    hidden: Tensor,  # [M, d]
    weight: Tensor,  # [V, d], sharded
    target: Tensor,  # [M]
    *,
    group: Group,
    with_entropy: bool,
    with_sum_pi_squared: bool,
    **logit_options: Unpack[LogitOptions],
) -> dict[str, Tensor]:
    """Returns log_probs, entropy and sum_pi_squared as requested, each [M] float32.

    Weight and bias may be DTensors.
    """
    start, bias = shard_start(weight.shape[0], group), logit_options["bias"]
    weight = weight.to_local() if isinstance(weight, DTensor) else weight
    logit_options["bias"] = bias.to_local() if isinstance(bias, DTensor) else bias
    log_probs, entropy = vocab_parallel_log_probs(
        hidden, weight, target, start=start, group=group, with_entropy=with_entropy, **logit_options
    )
    outputs = {"log_probs": log_probs}
    if with_entropy:
        outputs["entropy"] = entropy
    if with_sum_pi_squared:
        outputs["sum_pi_squared"] = vocab_parallel_sum_pi_squared(
            hidden, weight, group=group, **logit_options
        )
    return outputs


def vocab_parallel_log_probs(
    hidden: Tensor,  # [M, d], the same on every rank
    weight: Tensor,  # [V / ranks, d]
    target: Tensor,  # [M]
    *,
    start: int,
    group: Group,
    with_entropy: bool = False,
    **logit_options: Unpack[LogitOptions],
) -> tuple[Tensor, Tensor]:
    """Returns what `linear_log_probs` returns for the whole head.

    `start` is the first token id of this rank's shard.
    """
    bias, softcap = logit_options["bias"], logit_options["softcap"]
    local_target = target - start
    local_target = local_target.masked_fill(
        (local_target < 0) | (local_target >= weight.shape[0]), -1
    )
    use_kernel = hidden.is_cuda and bias is None and softcap is None
    logit_factor = logit_options["logit_scale"] / logit_options["temperature"]
    hidden = copy_to_group(hidden, group)
    return LinearLogProbs.apply(
        hidden, weight, bias, local_target, logit_factor, softcap, with_entropy, use_kernel, None,
        partial(_combine_shards, group=group),
    )  # fmt: skip


@torch.no_grad()
def vocab_parallel_sum_pi_squared(
    hidden: Tensor, weight: Tensor, *, group: Group, **logit_options: Unpack[LogitOptions]
) -> Tensor:
    """Returns Σ p² over the whole vocabulary, [M] float32, without gradient."""
    logit_factor = logit_options["logit_scale"] / logit_options["temperature"]
    lse, squares = torch.empty(2, hidden.shape[0], dtype=torch.float32, device=hidden.device)
    for chunk in chunk_slices(hidden.shape[0], weight.shape[0], use_kernel=False):
        z, _ = scaled_logits(
            hidden[chunk], weight, logit_options["bias"], logit_options["softcap"], logit_factor
        )
        lse[chunk] = torch.logsumexp(z, -1)
        squares[chunk] = torch.softmax(z, -1).square().sum(-1)
    max_lse = _max_over_ranks(lse, group)
    exp_sum = torch.exp(lse - max_lse)
    sums = torch.stack([exp_sum, squares * exp_sum.square()])
    dist.all_reduce(sums, group=group)
    return sums[1] / sums[0].square()


def _max_over_ranks(x: Tensor, group: Group) -> Tensor:
    maximum = x.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    return maximum


def _combine_shards(local: Statistics, target: Tensor, *, group: Group) -> Statistics:
    """Combines the statistics of the shards into those of the whole vocabulary."""
    log_prob, lse, entropy = local
    max_lse = _max_over_ranks(lse, group)
    exp_sum = torch.exp(lse - max_lse)
    # The logits here are relative to max_lse.
    local_logit = (log_prob + (lse - max_lse)).masked_fill(target < 0, 0.0)
    sums = torch.stack([exp_sum, local_logit, exp_sum * ((lse - max_lse) - entropy)])
    dist.all_reduce(sums, group=group)
    exp_total, target_logit, weighted_logits = sums
    log_total = exp_total.log()
    return target_logit - log_total, max_lse + log_total, log_total - weighted_logits / exp_total
