"""Log-probabilities and entropies of an LM head whose vocabulary is sharded over a group of ranks.

Each rank computes the logits of its rows of the head, one chunk of tokens at a time, and the ranks
exchange three numbers per token. logprobs.py has the backward pass.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import Unpack

from hone.ops.autograd import Context
from hone.ops.collectives import Group, copy_to_group
from hone.ops.logprobs import (
    LinearLogProbs,
    LogitOptions,
    Statistics,
    chunk_slices,
    matmul_fp32,
    scaled_logits,
    softmax_entropy,
)


def shard_start(rows: int, group: Group) -> int:
    """Returns the first row of this rank's shard of `rows`; all shards but the last are equally large."""
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
    start = shard_start(weight.shape[0], group)
    weight, bias = _to_local(weight), logit_options["bias"]
    logit_options["bias"] = None if bias is None else _to_local(bias)
    log_probs, entropy = vocab_parallel_log_probs(
        hidden, weight, target, start=start, group=group, with_entropy=with_entropy, **logit_options
    )
    outputs = {"log_probs": log_probs}
    if with_entropy:
        outputs["entropy"] = entropy
    if with_sum_pi_squared:
        logit_options["bias"] = (
            None if logit_options["bias"] is None else logit_options["bias"].detach()
        )
        outputs["sum_pi_squared"] = vocab_parallel_sum_pi_squared(
            hidden.detach(), weight.detach(), group=group, **logit_options
        )
    return outputs


def _to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
    factor = logit_options["logit_scale"] / logit_options["temperature"]
    hidden = copy_to_group(hidden, group)
    return VocabParallelLogProbs.apply(
        hidden, weight, bias, local_target, factor, softcap, with_entropy, use_kernel, group
    )


@torch.no_grad()
def vocab_parallel_sum_pi_squared(
    hidden: Tensor, weight: Tensor, *, group: Group, **logit_options: Unpack[LogitOptions]
) -> Tensor:
    """Returns Σ p² over the whole vocabulary, [M] float32, without gradient."""
    factor = logit_options["logit_scale"] / logit_options["temperature"]
    lse, squares = torch.empty(2, hidden.shape[0], dtype=torch.float32, device=hidden.device)
    for chunk in chunk_slices(hidden.shape[0], weight.shape[0], use_kernel=False):
        z, _ = scaled_logits(
            hidden[chunk], weight, logit_options["bias"], logit_options["softcap"], factor
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


def _combine_shards(local: Statistics, target: Tensor, group: Group) -> Statistics:
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


class VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,  # row of this shard, -1 if the target is in another shard
        factor: float,
        softcap: float | None,
        with_entropy: bool,
        use_kernel: bool,
        group: Group,
    ) -> tuple[Tensor, Tensor]:
        def compute_statistics(hidden: Tensor, target: Tensor) -> Statistics:
            if use_kernel:
                from hone.ops.logprobs_triton import logit_statistics

                return logit_statistics(matmul_fp32(hidden, weight), target, factor, with_entropy)
            z, _ = scaled_logits(hidden, weight, bias, softcap, factor)
            lse = torch.logsumexp(z, -1)
            log_probs = z.gather(-1, target[:, None]).squeeze(-1) - lse
            return (
                log_probs,
                lse,
                softmax_entropy(z, lse) if with_entropy else torch.zeros_like(lse),
            )

        slices = chunk_slices(hidden.shape[0], weight.shape[0], use_kernel=use_kernel)
        empty = hidden.new_zeros(0, dtype=torch.float32)
        clamped_target = target.clamp(min=0)
        chunk_statistics = [
            compute_statistics(hidden[chunk], clamped_target[chunk]) for chunk in slices
        ] or [(empty,) * 3]
        log_prob, lse, entropy = (
            torch.cat(column) for column in zip(*chunk_statistics, strict=True)
        )
        log_prob, lse, entropy = _combine_shards((log_prob, lse, entropy), target, group)
        ctx.save_for_backward(bias, hidden, weight, target, lse, entropy)
        ctx.factor, ctx.softcap, ctx.use_kernel = factor, softcap, use_kernel
        ctx.set_materialize_grads(False)
        if not with_entropy:
            entropy.zero_()
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    backward = staticmethod(LinearLogProbs.backward)
