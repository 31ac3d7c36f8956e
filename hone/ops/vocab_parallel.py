"""Log-probabilities and entropies of a head whose vocabulary is sharded over a group of ranks.

Each rank computes the logits of its rows of the head, one chunk of tokens at a time, and the ranks exchange
three numbers per token. Backward is that of logprobs.py with the statistics of the whole vocabulary.
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
    """Returns the outputs of a policy, each [M] float32, from DTensors of the head's weight and bias."""
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
    """Returns what `linear_log_probs` returns for the whole head; `start` is this shard's first token."""
    bias, softcap = rule["bias"], rule["softcap"]
    own = target - start
    own = own.masked_fill((own < 0) | (own >= weight.shape[0]), -1)
    fused = hidden.is_cuda and bias is None and softcap is None
    factor = rule["logit_scale"] / rule["temperature"]
    hidden = copy_to(hidden, group)
    return VocabParallelLogProbs.apply(
        hidden, weight, bias, own, factor, softcap, with_entropy, fused, group
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
    top = _maximum(norm, group)
    mass = torch.exp(norm - top)
    sums = torch.stack([mass, squares * mass.square()])
    dist.all_reduce(sums, group=group)
    return sums[1] / sums[0].square()


def _maximum(x: Tensor, group: Group) -> Tensor:
    top = x.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    return top


def _joined(local: Statistics, target: Tensor, group: Group) -> Statistics:
    """Combines the statistics of the shards into those of the whole vocabulary."""
    log_prob, norm, entropy = local
    top = _maximum(norm, group)
    mass = torch.exp(norm - top)
    own = (log_prob + (norm - top)).masked_fill(target < 0, 0.0)
    sums = torch.stack([mass, own, mass * ((norm - top) - entropy)])
    dist.all_reduce(sums, group=group)
    total, logit, mean = sums
    rest = total.log()
    return logit - rest, top + rest, rest - mean / total


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
        safe = target.clamp(min=0)
        computed = [statistics(hidden[part], safe[part]) for part in parts] or [(empty,) * 3]
        log_prob, norm, entropy = (torch.cat(column) for column in zip(*computed, strict=True))
        log_prob, norm, entropy = _joined((log_prob, norm, entropy), target, group)
        ctx.save_for_backward(bias, hidden, weight, target, norm, entropy)
        ctx.factor, ctx.softcap, ctx.fused = factor, softcap, fused
        ctx.set_materialize_grads(False)
        if not with_entropy:
            entropy.zero_()
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    backward = staticmethod(LinearLogProbs.backward)
