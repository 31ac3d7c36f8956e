"""Log-probabilities and entropies from hidden states, one chunk of tokens at a time.

The full logits [tokens, vocabulary] are never materialized: the backward pass recomputes each
chunk. All arithmetic is float32. On a GPU, an LM head without bias and soft cap uses a fused
kernel.

`matmul_fp32` and `linear_fp32` return float32 products of 16-bit matrices. On a GPU, these products are
never rounded to 16 bits. Logits and the residual stream use them, so that log-probs of rollout and trainer
differ less.

In shapes, M is the number of tokens, V the vocabulary size and d the hidden size. `g` is a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.autograd import Context

_CHUNK_LOGITS = 2**24
"""Logits per chunk: 64 MiB in float32, with which a matrix product reaches its full speed."""
_GPU_CHUNK_LOGITS = 2**27
"""Logits per chunk of the GPU kernel; a chunk has a multiple of 128 tokens."""
_MAX_KERNEL_BLOCK = 4096
"""The maximum number of logits that a kernel reads at once."""

Statistics = tuple[Tensor, Tensor, Tensor]
"""log p(target), logsumexp of the logits (`lse`) and entropy; each [M] float32."""


class LogitOptions(TypedDict):
    """How logits are computed from the output of the LM head."""

    temperature: float
    bias: Tensor | None
    softcap: float | None
    logit_scale: float


def linear_log_probs(
    hidden: Tensor,  # [M, d]
    weight: Tensor,  # [V, d]
    target: Tensor,  # [M]
    *,
    temperature: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    with_entropy: bool = False,
    compute_statistics: Callable[[Tensor, Tensor], Statistics] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns log p(target) and entropy of softmax(logits / temperature), both [M] float32.

    Entropies are zero unless `with_entropy`, because they need another pass over the vocabulary.
    `compute_statistics(hidden, target)` replaces the forward computation of a chunk.
    """
    use_kernel = hidden.is_cuda and bias is None and softcap is None
    logit_factor = logit_scale / temperature
    return LinearLogProbs.apply(
        hidden,
        weight,
        bias,
        target,
        logit_factor,
        softcap,
        with_entropy,
        use_kernel,
        compute_statistics,
    )


@torch.no_grad()
def linear_sum_pi_squared(
    hidden: Tensor,  # [M, d]
    weight: Tensor,  # [V, d]
    *,
    temperature: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """Returns Σ p² of softmax(logits / temperature), [M] float32, without gradient."""
    total = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    for chunk in chunk_slices(hidden.shape[0], weight.shape[0], use_kernel=False):
        z, _ = scaled_logits(hidden[chunk], weight, bias, softcap, logit_scale / temperature)
        total[chunk] = torch.softmax(z, -1).square().sum(-1)
    return total


def softmax_entropy(z: Tensor, lse: Tensor) -> Tensor:
    """Returns the entropy [M] of softmax(z), where z is [M, V] and `lse` is its logsumexp."""
    return lse - torch.linalg.vecdot(torch.sub(z, lse[:, None]).exp_(), z)


def chunk_slices(tokens: int, vocab_size: int, *, use_kernel: bool) -> list[slice]:
    """Returns the slices of tokens whose logits are computed at once."""
    if use_kernel:
        size = max(128, _GPU_CHUNK_LOGITS // vocab_size // 128 * 128)
    else:
        size = max(8, _CHUNK_LOGITS // vocab_size)
    return [slice(i, min(i + size, tokens)) for i in range(0, tokens, size)]


def scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, logit_factor: float
) -> tuple[Tensor, Tensor | None]:
    """Returns float32 logits · `logit_factor`, and the tanh of a soft cap, which the backward pass needs."""
    z = matmul_fp32(hidden, weight)
    if bias is not None:
        z += bias
    if softcap is None:
        return (z if logit_factor == 1.0 else z.mul_(logit_factor)), None
    tanh = torch.tanh(z.div_(softcap))
    return tanh * (softcap * logit_factor), tanh


class LinearLogProbs(torch.autograd.Function):
    """`linear_log_probs` as an autograd function; `logit_factor` is logit_scale / temperature."""

    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        logit_factor: float,
        softcap: float | None,
        with_entropy: bool,
        use_kernel: bool,
        compute_statistics: Callable[[Tensor, Tensor], Statistics] | None,
        combine_shards: Callable[[Statistics, Tensor], Statistics] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Computes the statistics of all chunks.

        With a sharded vocabulary, `combine_shards` combines the statistics of the ranks, and a target in the
        shard of another rank is -1.
        """

        def plain_statistics(hidden: Tensor, target: Tensor) -> Statistics:
            z, _ = scaled_logits(hidden, weight, bias, softcap, logit_factor)
            lse = torch.logsumexp(z, -1)
            log_probs = z.gather(-1, target[:, None]).squeeze(-1) - lse
            entropy = softmax_entropy(z, lse) if with_entropy else torch.zeros_like(lse)
            return log_probs, lse, entropy

        def gpu_statistics(hidden: Tensor, target: Tensor) -> Statistics:
            return kernel_statistics(
                matmul_fp32(hidden, weight), target, logit_factor, with_entropy
            )

        compute = compute_statistics or (gpu_statistics if use_kernel else plain_statistics)
        slices = chunk_slices(hidden.shape[0], weight.shape[0], use_kernel=use_kernel)
        empty = hidden.new_zeros(0, dtype=torch.float32)
        local_target = target if combine_shards is None else target.clamp(min=0)
        chunks = [compute(hidden[chunk], local_target[chunk]) for chunk in slices]
        chunks = chunks or [(empty,) * 3]
        log_probs, lse, entropy = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        if combine_shards is not None:
            log_probs, lse, entropy = combine_shards((log_probs, lse, entropy), target)
        ctx.save_for_backward(bias, hidden, weight, target, lse, entropy)
        ctx.logit_factor, ctx.softcap, ctx.use_kernel = logit_factor, softcap, use_kernel
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy.zero_())
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        bias, hidden, weight, target, *statistics = ctx.saved_tensors
        g_hidden = torch.empty_like(hidden)
        g_weight = g_bias = None
        if bias is not None:
            g_bias = torch.zeros_like(bias, dtype=torch.float32)
        for chunk in chunk_slices(hidden.shape[0], weight.shape[0], use_kernel=ctx.use_kernel):
            targets, lse, entropy = (x[chunk] for x in (target, *statistics))
            g_log_prob, g_entropy = (None if g is None else g[chunk].contiguous() for g in grads)
            if ctx.use_kernel:
                z = matmul_fp32(hidden[chunk], weight)
                g = _kernel_gradient(
                    z, targets, lse, entropy, g_log_prob, g_entropy, ctx.logit_factor, hidden.dtype
                )
            else:
                z, tanh = scaled_logits(hidden[chunk], weight, bias, ctx.softcap, ctx.logit_factor)
                g = _plain_gradient(
                    z, tanh, targets, lse, entropy, g_log_prob, g_entropy, ctx.logit_factor
                )
                if g_bias is not None:
                    g_bias += g.sum(0)
                g = g.to(hidden.dtype)
            torch.mm(g, weight, out=g_hidden[chunk])
            if not ctx.needs_input_grad[1]:
                continue
            if g_weight is None:
                if ctx.use_kernel:
                    g_weight = matmul_fp32(g.t(), hidden[chunk].t())
                    continue
                g_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
            if ctx.use_kernel:
                add_product(g_weight, g.t(), hidden[chunk])
            elif g.dtype == g_weight.dtype:  # avoids a second tensor of the weight's size
                g_weight.addmm_(g.t(), hidden[chunk])
            else:
                g_weight += g.t() @ hidden[chunk]
        if ctx.needs_input_grad[1]:
            g_weight = torch.zeros_like(weight) if g_weight is None else g_weight.to(weight.dtype)
        if g_bias is not None:
            g_bias = g_bias.to(bias.dtype)
        return g_hidden, g_weight, g_bias, *[None] * 7


def _plain_gradient(
    z: Tensor,
    tanh: Tensor | None,
    target: Tensor,
    lse: Tensor,
    entropy: Tensor,
    g_log_prob: Tensor | None,
    g_entropy: Tensor | None,
    logit_factor: float,
) -> Tensor:
    """Returns the gradient of the LM head's output; overwrites z to save memory."""
    # d log p(target) / dz = onehot - p;   d entropy / dz = -p (log p + entropy)
    log_p = z.sub_(lse[:, None])
    p = log_p.exp()
    if g_entropy is None:
        assert g_log_prob is not None
        g = p.mul_(-g_log_prob[:, None])
    else:
        g = log_p.add_(entropy[:, None]).mul_(-g_entropy[:, None])
        if g_log_prob is not None:
            g -= g_log_prob[:, None]
        g *= p
    if g_log_prob is not None:  # a target is -1 if another rank's shard has it
        g_target = g_log_prob.masked_fill(target < 0, 0.0).to(g.dtype)
        g.scatter_add_(-1, target.clamp(min=0)[:, None], g_target[:, None])
    g *= logit_factor
    return g if tanh is None else g.mul_(1 - tanh.square())


def kernel_statistics(
    logits: Tensor,  # [M, V]
    target: Tensor,  # [M]
    logit_factor: float,
    with_entropy: bool,
) -> Statistics:
    """Computes the statistics of logits · logit_factor on a GPU."""
    from hone.ops import training_triton

    rows, vocab_size = logits.shape
    log_prob, lse, entropy = torch.zeros(3, rows, dtype=torch.float32, device=logits.device)
    training_triton.logit_statistics[(rows,)](
        logits, target, log_prob, lse, entropy, logit_factor, vocab_size,
        BLOCK=_kernel_block(vocab_size), ENTROPY=with_entropy, num_warps=8,
    )  # fmt: skip
    return log_prob, lse, entropy


def _kernel_gradient(
    logits: Tensor,  # [M, V]
    target: Tensor,
    lse: Tensor,
    entropy: Tensor,
    g_log_prob: Tensor | None,
    g_entropy: Tensor | None,
    logit_factor: float,
    dtype: torch.dtype,
) -> Tensor:
    """Computes the gradient of the logits on a GPU; overwrites the logits if they have `dtype`."""
    from hone.ops import training_triton

    rows, vocab_size = logits.shape
    out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    block = _kernel_block(vocab_size)
    training_triton.logits_to_gradient[(rows, -(-vocab_size // block))](
        logits, out, target, lse, entropy,
        g_log_prob if g_log_prob is not None else lse,
        g_entropy if g_entropy is not None else lse,
        logit_factor, vocab_size, BLOCK=block,
        LOG_PROB=g_log_prob is not None, ENTROPY=g_entropy is not None, num_warps=4,
    )  # fmt: skip
    return out


def _kernel_block(vocab_size: int) -> int:
    """Returns the number of logits that a kernel reads at once; a power of 2."""
    next_power_of_2: int = 1 << (vocab_size - 1).bit_length()
    return min(_MAX_KERNEL_BLOCK, next_power_of_2)


def matmul_fp32(x: Tensor, weight: Tensor) -> Tensor:  # [M, d], [V, d] -> [M, V] float32
    """Returns x · Wᵀ in float32; it has no gradient on a GPU."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return (x @ weight.t()).float()  # on a CPU, the product is rounded to 16 bits


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:  # [V, d] float32, [V, M], [M, d]
    """Computes total += a · b, on a GPU without an intermediate tensor."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(a @ b)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:  # [..., d], [V, d] -> [..., V] float32
    """Returns x · Wᵀ in float32; gradients are computed in the dtype of x, as in F.linear."""
    if not x.is_cuda:
        return F.linear(x, weight).float()
    return _LinearFp32.apply(x, weight)


class _LinearFp32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat, weight)
        return matmul_fp32(flat, weight).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        g = grads[0].reshape(len(x), -1).to(x.dtype)
        g_x = (g @ weight).view(*grads[0].shape[:-1], -1) if ctx.needs_input_grad[0] else None
        return g_x, g.t() @ x if ctx.needs_input_grad[1] else None
