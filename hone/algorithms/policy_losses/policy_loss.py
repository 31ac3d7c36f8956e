"""The base of all policy losses, which masks inputs, applies weights and aggregates; PPO's loss.

A loss is a function from per-token inputs to per-token values. Inputs outside the mask are 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hone.algorithms.policy_losses import LOSS_ARGUMENTS
from hone.config.actor import ActorConfig, current_batch_info
from hone.config.block import setting
from hone.config.errors import unknown_argument
from hone.ops.rows import masked_mean, masked_sum, zero_outside_mask
from hone.plugins import PluginError
from hone.types import Fields, Function, Settings

RATIO_EXPONENT_BOUND = 20.0

NamedTensors = dict[str, Tensor]
"""Tensors [B, T], or scalar means of them, by name."""
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""Old log-probs, log-probs, advantages and the response mask."""
LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@dataclass(frozen=True)
class BatchCounts:
    """Counts of one mini-batch, summed over all micro-batches and ranks."""

    tokens: float
    """Number of tokens in the loss mask."""
    sequences: float
    """Number of rows with at least one token in the loss mask."""
    width: float | None = None
    """The maximum response length: the divisor of `seq-mean-token-sum-norm` if the config has no
    `loss_scale_factor`. None uses the mask's width, which depends on padding."""

    @classmethod
    def from_mask(cls, loss_mask: Tensor, width: float | None = None) -> BatchCounts:
        """Returns the counts of one mask."""
        mask = loss_mask.bool()
        return cls(float(mask.sum()), float(mask.any(dim=-1).sum()), width)


_counts: ContextVar[BatchCounts | None] = ContextVar("hone_batch_counts", default=None)


@contextmanager
def batch_counts(counts: BatchCounts) -> Iterator[None]:
    """Sets the counts that `agg_loss` divides by and that `config.global_batch_info` returns."""
    counts_token = _counts.set(counts)
    info_token = current_batch_info.set(
        {"batch_num_tokens": counts.tokens, "global_batch_size": counts.sequences}
    )
    try:
        yield
    finally:
        current_batch_info.reset(info_token)
        _counts.reset(counts_token)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Returns this micro-batch's share of the mini-batch loss, times `dp_size`; 0 for an empty mask.

    `dp_size` is for engines that average gradients over ranks. Counts come from the arguments, else from
    `batch_counts`, else from `loss_mask`, which must then be the mask of the whole mini-batch.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(
            f"loss_agg_mode={loss_agg_mode!r} is unknown; use one of {', '.join(LOSS_AGG_MODES)}"
        )
    if loss_mask.is_floating_point() and not ((loss_mask == 0) | (loss_mask == 1)).all():
        raise ValueError(
            "agg_loss: loss_mask has values other than 0 and 1; multiply weights into loss_mat instead"
        )
    counts = _counts.get()
    if loss_agg_mode == "token-sum":
        return masked_sum(loss_mat, loss_mask) * dp_size
    if loss_agg_mode == "token-mean":
        total = masked_sum(loss_mat, loss_mask)
        tokens = _first_not_none(batch_num_tokens, counts.tokens if counts else None)
        divisor = _divisor(tokens, loss_mask.bool().sum(), dp_size, "batch_num_tokens")
        return total / divisor * dp_size

    reduce_row = masked_mean if loss_agg_mode == "seq-mean-token-mean" else masked_sum
    total = reduce_row(loss_mat, loss_mask, -1).sum()  # a row without tokens adds 0
    rows = _first_not_none(global_batch_size, counts.sequences if counts else None)
    local_rows = loss_mask.bool().any(dim=-1).sum()
    loss = total / _divisor(rows, local_rows, dp_size, "global_batch_size") * dp_size
    if loss_agg_mode == "seq-mean-token-sum-norm":
        width = _first_not_none(loss_scale_factor, counts.width if counts else None)
        width = max(loss_mask.shape[-1], 1) if width is None else width
        if not width > 0:
            raise ValueError(f"loss_scale_factor={width} divides the loss and must be above 0")
        loss = loss / width
    return loss


def _first_not_none(*values: float | Tensor | None) -> float | Tensor | None:
    """Returns the first value that is not None."""
    return next((value for value in values if value is not None), None)


def _divisor(
    count: float | Tensor | None, local_count: Tensor, dp_size: int, name: str
) -> float | Tensor:
    """Returns `count`, or `local_count` if `count` is None; at least 1."""
    if count is None:
        if dp_size > 1:
            raise ValueError(
                f"agg_loss got dp_size={dp_size} but no {name}, and this rank's mask is not the whole "
                f"mini-batch; pass {name}, or call agg_loss inside `batch_counts(BatchCounts(...))`"
            )
        count = local_count
    return torch.clamp(count, min=1) if isinstance(count, Tensor) else max(float(count), 1.0)


@dataclass(frozen=True)
class Tokens:
    """The inputs of a loss; every tensor is [B, T] and 0 outside the mask."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    mask: Tensor  # bool
    config: Settings | None
    weights: Tensor | None = None  # rollout importance weights
    prepared: NamedTensors = field(default_factory=dict)  # these rows of the result of `prepare`
    extras: Mapping[str, Settings] = field(default_factory=dict)  # further keyword arguments

    @property
    def log_ratio(self) -> Tensor:
        return self.log_prob - self.old_log_prob

    def setting(self, key: str) -> Any:
        """Returns the value of a dotted key of the actor's config, which verl's programs pass as a dict."""
        if isinstance(self.config, ActorConfig):
            return attrgetter(key)(self.config)
        return setting(self.config, key, ActorConfig)

    def clip_bounds(self) -> tuple[float, float]:
        """Returns clip_ratio_low and clip_ratio_high; each defaults to clip_ratio."""
        low, high = self.setting("clip_ratio_low"), self.setting("clip_ratio_high")
        return (
            self.setting("clip_ratio") if low is None else low,
            self.setting("clip_ratio") if high is None else high,
        )


_KEYWORDS = ("loss_agg_mode", "config", "rollout_is_weights", "prepared")

TokenLoss = Callable[[Tokens], tuple[Tensor, NamedTensors]]
PrepareTokens = Callable[[Tokens], NamedTensors]


@dataclass(frozen=True)
class PolicyLoss:
    """A per-token loss that can be called in verl's form."""

    name: str
    per_token: TokenLoss
    """Maps Tokens to per-token loss and per-token metrics."""
    agg_mode: str | None = None
    """The aggregation that is part of the loss's definition and overrides `loss_agg_mode`, if any."""
    default_agg_mode: str = "token-mean"
    """The aggregation of a call without `loss_agg_mode`; the trainer always passes `loss_agg_mode`."""
    extra_keywords: tuple[str, ...] = ()
    """Names of further keyword arguments of the loss; `Tokens.extras` holds their values."""
    applies_weights: bool = False
    """Whether the loss applies the rollout importance weights itself."""
    prepare_tokens: PrepareTokens | None = None
    """Computes columns from the whole mini-batch, for a loss that needs its statistics."""

    @property
    def needs_batch_statistics(self) -> bool:
        return self.prepare_tokens is not None

    @torch.no_grad()
    def prepare(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        config: Settings | None = None,
    ) -> NamedTensors:
        """Returns columns of the whole mini-batch; each micro-batch gets its rows of them as `prepared`."""
        if self.prepare_tokens is None:
            return {}
        inputs = (old_log_prob, log_prob, advantages, response_mask)
        return self.prepare_tokens(_masked_tokens(inputs, config))

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str | None = None,
        config: Settings | None = None,
        rollout_is_weights: Tensor | None = None,
        *,
        prepared: NamedTensors | None = None,
        **extras: Settings,
    ) -> tuple[Tensor, NamedTensors]:
        """Returns the micro-batch's share of the loss, and the metrics' token means over this call's mask."""
        inputs = (old_log_prob, log_prob, advantages, response_mask)
        tokens = self.tokens(inputs, config, rollout_is_weights, prepared=prepared, **extras)
        return self.reduce(tokens, *self.per_token(tokens), loss_agg_mode)

    def tokens(
        self,
        inputs: Inputs,
        config: Settings | None,
        weights: Tensor | None,
        *,
        prepared: NamedTensors | None = None,
        **extras: Settings,
    ) -> Tokens:
        """Returns the input of `per_token`; raises on an unknown keyword."""
        keywords = (*_KEYWORDS, *self.extra_keywords)
        if unknown_names := set(extras) - set(keywords):
            raise unknown_argument(f"policy loss {self.name}", min(unknown_names), keywords)
        if self.prepare_tokens is not None and prepared is None:
            prepared = self.prepare(*inputs, config)
        tokens = _masked_tokens(inputs, config)
        if weights is not None:
            weights = zero_outside_mask(weights, tokens.mask).detach()
        return replace(tokens, prepared=prepared or {}, extras=extras, weights=weights)

    def reduce(
        self, tokens: Tokens, losses: Tensor, token_metrics: NamedTensors, loss_agg_mode: str | None
    ) -> tuple[Tensor, NamedTensors]:
        """Returns the aggregated loss, and the token means of the metrics of `per_token`."""
        if tokens.weights is not None and not self.applies_weights:
            losses = losses * tokens.weights
        mode = self.agg_mode or loss_agg_mode or self.default_agg_mode
        scale = tokens.setting("loss_scale_factor")
        total = agg_loss(losses, tokens.mask, mode, loss_scale_factor=scale)
        metrics = {
            key: masked_mean(value.detach().to(losses.dtype), tokens.mask)
            for key, value in token_metrics.items()
        }
        return total, metrics


def _masked_tokens(inputs: Inputs, config: Settings | None) -> Tokens:
    mask = inputs[3].bool()
    old_log_prob, log_prob, advantages = (zero_outside_mask(x, mask) for x in inputs[:3])
    return Tokens(old_log_prob.detach(), log_prob, advantages.detach(), mask, config)


def bounded_log_ratio(tokens: Tokens) -> Tensor:
    """Returns log(π/π_old), bounded so that its exponential is finite."""
    return tokens.log_ratio.clamp(-RATIO_EXPONENT_BOUND, RATIO_EXPONENT_BOUND)


def surrogate_losses(tokens: Tokens, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Returns −A·r and −A·clip(r) for the ratio r [B, T]."""
    low, high = tokens.clip_bounds()
    return -tokens.advantages * ratio, -tokens.advantages * ratio.clamp(1 - low, 1 + high)


def standard_metrics(
    tokens: Tokens,
    clipped: Tensor | None = None,
    clipped_below: Tensor | None = None,
    log_ratio: Tensor | None = None,
) -> NamedTensors:
    """Returns the four per-token metrics of every loss; `log_ratio` replaces `tokens.log_ratio` in ppo_kl."""
    zeros = torch.zeros_like(tokens.mask)
    clipped = zeros if clipped is None else clipped
    clipped_below = zeros if clipped_below is None else clipped_below
    return {
        "actor/pg_clipfrac": clipped,
        "actor/ppo_kl": -(tokens.log_ratio if log_ratio is None else log_ratio),
        "actor/pg_clipfrac_lower": clipped_below,
        "actor/avg_ratio": bounded_log_ratio(tokens).exp(),
    }


def log_prob_gap_metrics(trainer: Tensor, rollout: Tensor, mask: Tensor) -> NamedTensors:
    """Returns metrics of the gap between trainer and rollout log-probs, over all tokens in the mask."""
    gap = zero_outside_mask(trainer - rollout, mask)
    k3 = gap.clamp(-RATIO_EXPONENT_BOUND, RATIO_EXPONENT_BOUND).exp() - gap - 1
    return {
        "kl": -masked_mean(gap, mask),
        "k3_kl": masked_mean(k3, mask),
        "log_prob_abs_diff_mean": masked_mean(gap.abs(), mask),
        # The added 0 is the maximum of an empty batch.
        "log_prob_abs_diff_max": pad(gap.abs().flatten(), (0, 1)).max(),
    }


def ppo_clip(tokens: Tokens) -> tuple[Tensor, NamedTensors]:
    """PPO (1707.06347): max(−A·r, −A·clip(r)), r = π/π_old; at most −A·clip_ratio_c if A < 0 (1912.09729)."""
    max_ratio = tokens.setting("clip_ratio_c")
    if max_ratio <= 1:
        raise ValueError(
            f"clip_ratio_c={max_ratio} must be above 1: "
            "it bounds the ratio where the advantage is negative"
        )
    log_ratio = bounded_log_ratio(tokens)
    unclipped, clipped = surrogate_losses(tokens, log_ratio.exp())
    ppo_loss = torch.maximum(unclipped, clipped)
    max_loss = -tokens.advantages * max_ratio
    is_negative = tokens.advantages < 0
    loss = torch.where(is_negative, torch.minimum(max_loss, ppo_loss), ppo_loss)
    is_dual_clipped = (ppo_loss > max_loss) & is_negative
    return loss, standard_metrics(tokens, clipped > unclipped, is_dual_clipped, log_ratio)


vanilla = PolicyLoss("vanilla", ppo_clip)


_OLD_METRICS = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
"""The metrics that a loss of verl 0.5 returns after the loss."""


def call_custom_loss(
    function: Function, inputs: Inputs, config: ActorConfig, weights: Tensor | None, extras: Fields
) -> tuple[Tensor, NamedTensors]:
    """Calls a user's loss by verl's argument names.

    The loss gets only the arguments that it has. Importance weights are an error for a loss without such an
    argument, because it would train something else.
    """
    name = getattr(function, "__name__", type(function).__name__)
    values_of_call = (*inputs, config.policy_loss_agg_mode, config, weights)
    keywords = dict(zip(LOSS_ARGUMENTS, values_of_call, strict=True))
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        keywords = {keyword: v for keyword, v in keywords.items() if keyword in parameters}
    if weights is not None and "rollout_is_weights" not in keywords:
        raise PluginError(
            f"the policy loss {name} has no argument rollout_is_weights, but "
            "algorithm.rollout_correction.rollout_is sets importance weights; add it, or set rollout_is=null"
        )
    result = function(**keywords, **extras)
    if isinstance(result, tuple) and len(result) == 1 + len(_OLD_METRICS):
        result = (result[0], dict(zip(_OLD_METRICS, result[1:], strict=True)))
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)
    if not is_pair or result[0].dim():
        raise PluginError(
            f"the policy loss {name} returned {_describe(result)}; return (loss, metrics), with the loss "
            "aggregated by agg_loss and a dict of metrics"
        )
    return result


def _describe(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of shape {list(result.shape)}"
    if isinstance(result, tuple):
        return f"({', '.join(map(_describe, result))})"
    return f"a {type(result).__name__}"
