"""The functions of verl's `rollout_corr_helper`, with verl's arguments and results.

Thresholds of k1 options bound the ratio train/rollout, not its logarithm.
"""

from __future__ import annotations

from torch import Tensor

from hone.algorithms.correction import (
    agreement_metrics,
    correct,
    rejection_mask,
    rejection_metrics,
    weight_metrics,
)
from hone.config.algorithm import RolloutCorrectionConfig
from hone.config.block import setting
from hone.config.ranges import REJECTION_OPTIONS, split_list
from hone.ops.rows import count_unmasked, zero_outside_mask
from hone.protocol import DataProto
from hone.types import Fields, Settings

SUPPORTED_ROLLOUT_RS_OPTIONS = frozenset(REJECTION_OPTIONS)
_PREFIX = "rollout_corr/"


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """Returns the column `rollout_is_weights` or None, the mask after rejection, and metrics."""
    weights, loss_mask, metrics = correct(
        old_log_prob,
        rollout_log_prob,
        response_mask,
        {
            "rollout_is": rollout_is if rollout_is_threshold is not None else None,
            "rollout_is_threshold": rollout_is_threshold,
            "rollout_is_batch_normalize": rollout_is_batch_normalize,
            "rollout_rs": rollout_rs,
            "rollout_rs_threshold": rollout_rs_threshold,
        },
    )
    batch = None if weights is None else DataProto.from_dict({"rollout_is_weights": weights})
    return batch, loss_mask, metrics


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Returns weights [B, T] from log(train/rollout), and their metrics without prefix."""
    batch, _, metrics = compute_rollout_correction_and_rejection_mask(
        log_ratio,
        log_ratio.new_zeros(log_ratio.shape),
        response_mask,
        rollout_is,
        rollout_is_threshold,
        rollout_is_batch_normalize,
    )
    if batch is None:
        raise ValueError(f"rollout_is={rollout_is!r}: use 'token' or 'sequence' and a threshold")
    prefix = _PREFIX + "rollout_is_"
    return batch.batch["rollout_is_weights"], {
        key.removeprefix(_PREFIX): value for key, value in metrics.items() if key.startswith(prefix)
    }


def compute_is_metrics(
    rollout_is_weights: Tensor,
    raw_rollout_is_weights: Tensor,
    log_ratio_for_metrics: Tensor,
    response_mask: Tensor,
    rollout_is: str,
    rollout_is_threshold: float,
    rollout_is_threshold_lower: float | None = None,
) -> dict[str, float]:
    """Returns metrics of weights; for sequence weights, `log_ratio_for_metrics` is [B, 1]."""
    mask = response_mask.bool()
    log_ratio = log_ratio_for_metrics
    if rollout_is == "sequence":
        log_ratio = (log_ratio / count_unmasked(mask, -1).clamp(min=1).unsqueeze(-1)).expand_as(
            mask
        )
    low = rollout_is_threshold_lower
    bounds = (rollout_is_threshold,) if low is None else (low, rollout_is_threshold)
    metrics = weight_metrics(
        zero_outside_mask(rollout_is_weights, mask),
        zero_outside_mask(log_ratio, mask),
        mask,
        rollout_is,
        bounds,
    )
    return {key: float(value) for key, value in metrics.items()}


def apply_bypass_mode(
    batch: DataProto,
    rollout_corr_config: Settings | None = None,
    policy_loss_config: Fields | None = None,
) -> None:
    """Uses the rollout's log-probs as old log-probs, and sets the loss and its settings, in place."""
    if not batch.has_column("rollout_log_probs"):
        raise ValueError(
            "bypass_mode needs rollout_log_probs in the batch; set "
            "actor_rollout_ref.rollout.calculate_log_probs=true"
        )
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    if policy_loss_config is not None:
        policy_loss_config["loss_mode"] = "bypass_mode"
        policy_loss_config["rollout_correction"] = rollout_corr_config


apply_rollout_correction = apply_bypass_mode  # verl 0.6's name


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: float | str | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Returns the mask without rejected tokens, and rejection metrics without prefix."""
    if not split_list(rollout_rs):
        raise ValueError("rollout_rs is empty; set an option such as token_k1")
    mask = response_mask.bool()
    keep_mask, results = rejection_mask(log_ratio, mask, rollout_rs, rollout_rs_threshold)
    metrics = rejection_metrics(results, keep_mask, mask)
    return response_mask * keep_mask, {key: float(value) for key, value in metrics.items()}


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """Returns metrics of the gap between rollout and trainer log-probs; without rollout log-probs, returns
    only the perplexity of the trainer."""
    mask = response_mask.bool()
    trainer = zero_outside_mask(old_log_prob.detach(), mask)
    rollout = (
        trainer if rollout_log_prob is None else zero_outside_mask(rollout_log_prob.detach(), mask)
    )
    metrics = agreement_metrics(trainer, rollout, mask)
    return {
        key: float(value)
        for key, value in metrics.items()
        if rollout_log_prob is not None or key.startswith("training_")
    }


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """Returns the metrics of `compute_offpolicy_metrics` with the prefix `rollout_corr/`."""
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    return {_PREFIX + key: value for key, value in metrics.items()}


def compute_rollout_correction_and_add_to_batch(
    batch: DataProto, rollout_corr_config: Settings
) -> tuple[DataProto, dict[str, float]]:
    """Applies rejection to `response_mask` in place and adds `rollout_is_weights`, as verl's trainer does."""
    names = (
        "rollout_is",
        "rollout_is_threshold",
        "rollout_is_batch_normalize",
        "rollout_rs",
        "rollout_rs_threshold",
    )
    weights, loss_mask, metrics = compute_rollout_correction_and_rejection_mask(
        batch.batch["old_log_probs"],
        batch.batch["rollout_log_probs"],
        batch.batch["response_mask"],
        **{name: setting(rollout_corr_config, name, RolloutCorrectionConfig) for name in names},
    )
    batch.batch["response_mask"] = loss_mask
    return (batch if weights is None else batch.union(weights)), metrics
