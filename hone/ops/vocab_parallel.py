"""Log-probabilities and entropies of a head whose vocabulary is sharded over a group of ranks.

Each rank computes the logits of its rows of the head, one chunk of tokens at a time, and the ranks
exchange three numbers per token. The backward pass is that of logprobs.py.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import Unpack

from hone.ops.autograd import Context
from hone.ops.collectives import Group, copy_to
from hone.ops.logprobs import LinearLogProbs, LogitRule, Statistics, _chunks, _logits, entropy_of
from hone.ops.wide_product import wide_product


def shard_start(rows: int, group: Group) -> int:
    """Returns the first row of this rank's shard of `rows`; all shards but the last are equal."""
    return min(rows, -(-rows // group.size()) * group.rank())


def vocab_parallel_outputs(
    hidden: Tensor,  # [M, d]
    weight: Tensor,  # [V, d], sharded
    target: Tensor,  # [M]
    *,
    group: Group,
    with_entropy: bool,
    with_sum_pi_squared: bool,
    **rule: Unpack[LogitRule],
) -> dict[str, Tensor]:
    """Returns the outputs of a policy, each [M] float32; weight and bias may be DTensors."""
    start = shard_start(weight.shape[0], group)
    weight, bias = _local(weight), rule["bias"]
    rule["bias"] = None if bias is None else _local(bias)
    log_probs, entropy = vocab_parallel_log_probs(
        hidden, weight, target, start=start, group=group, with_entropy=with_entropy, **rule
    )
    outputs = {"log_probs": log_probs}
    if with_entropy:
        outputs["entropy"] = entropy
    if with_sum_pi_squared:
        rule["bias"] = None if rule["bias"] is None else rule["bias"].detach()
        outputs["sum_pi_squared"] = vocab_parallel_sum_pi_squared(
            hidden.detach(), weight.detach(), group=group, **rule
        )
    return outputs


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def vocab_parallel_log_probs(
    hidden: Tensor,  # [M, d], the same on every rank
    weight: Tensor,  # [V / ranks, d]
    target: Tensor,  # [M]
    *,
    start: int,
    group: Group,
    with_entropy: bool = False,
    **rule: Unpack[LogitRule],
) -> tuple[Tensor, Tensor]:
    """Returns `linear_log_probs` of the whole head; `start` is this shard's first token."""
    bias, softcap = rule["bias"], rule["softcap"]
    index = target - start
    index = index.masked_fill((index < 0) | (index >= weight.shape[0]), -1)
    fused = hidden.is_cuda and bias is None and softcap is None
    factor = rule["logit_scale"] / rule["temperature"]
    hidden = copy_to(hidden, group)
    return VocabParallelLogProbs.apply(
        hidden, weight, bias, index, factor, softcap, with_entropy, fused, group
    )


@torch.no_grad()
def vocab_parallel_sum_pi_squared(
    hidden: Tensor, weight: Tensor, *, group: Group, **rule: Unpack[LogitRule]
) -> Tensor:
    """Returns Σ p² over the whole vocabulary, [M] float32, without gradient."""
    factor = rule["logit_scale"] / rule["temperature"]
    norm, squares = torch.empty(2, hidden.shape[0], dtype=torch.float32, device=hidden.device)
    for part in _chunks(hidden.shape[0], weight.shape[0], fused=False):
        z, _ = _logits(hidden[part], weight, rule["bias"], rule["softcap"], factor)
        norm[part] = torch.logsumexp(z, -1)
        squares[part] = torch.softmax(z, -1).square().sum(-1)
    max_norm = _max_over_ranks(norm, group)
    exp_sum = torch.exp(norm - max_norm)
    sums = torch.stack([exp_sum, squares * exp_sum.square()])
    dist.all_reduce(sums, group=group)
    return sums[1] / sums[0].square()


def _max_over_ranks(x: Tensor, group: Group) -> Tensor:
    largest = x.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest


def _combine_shards(local: Statistics, target: Tensor, group: Group) -> Statistics:
    """Combines the statistics of the shards into those of the whole vocabulary."""
    log_prob, norm, entropy = local
    max_norm = _max_over_ranks(norm, group)
    exp_sum = torch.exp(norm - max_norm)
    target_logit = (log_prob + (norm - max_norm)).masked_fill(target < 0, 0.0)
    sums = torch.stack([exp_sum, target_logit, exp_sum * ((norm - max_norm) - entropy)])
    dist.all_reduce(sums, group=group)
    total, logit, mean = sums
    log_total = total.log()
    return logit - log_total, max_norm + log_total, log_total - mean / total


class VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,  # in this shard, or -1
        factor: float,
        softcap: float | None,
        with_entropy: bool,
        fused: bool,
        group: Group,
    ) -> tuple[Tensor, Tensor]:
        def statistics(hidden: Tensor, target: Tensor) -> Statistics:
            if fused:
                from hone.ops.logprobs_triton import logit_statistics

                return logit_statistics(wide_product(hidden, weight), target, factor, with_entropy)
            z, _ = _logits(hidden, weight, bias, softcap, factor)
            norm = torch.logsumexp(z, -1)
            log_probs = z.gather(-1, target[:, None]).squeeze(-1) - norm
            return log_probs, norm, entropy_of(z, norm) if with_entropy else torch.zeros_like(norm)

        parts = _chunks(hidden.shape[0], weight.shape[0], fused=fused)
        empty = hidden.new_zeros(0, dtype=torch.float32)
        safe_target = target.clamp(min=0)
        chunks = [statistics(hidden[part], safe_target[part]) for part in parts] or [(empty,) * 3]
        log_prob, norm, entropy = (torch.cat(column) for column in zip(*chunks, strict=True))
        log_prob, norm, entropy = _combine_shards((log_prob, norm, entropy), target, group)
        ctx.save_for_backward(bias, hidden, weight, target, norm, entropy)
        ctx.factor, ctx.softcap, ctx.fused = factor, softcap, fused
        ctx.set_materialize_grads(False)
        if not with_entropy:
            entropy.zero_()
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    backward = staticmethod(LinearLogProbs.backward)
