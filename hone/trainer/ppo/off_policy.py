"""Measures and corrects the difference between rollout and trainer log-probs of the same tokens."""

from __future__ import annotations

from hone.algorithms.correction import correct
from hone.algorithms.policy_losses.policy_loss import log_prob_gap_metrics
from hone.columns import require, write
from hone.config.algorithm import RolloutCorrectionConfig
from hone.protocol import DataProto


def correct_for_rollout(batch: DataProto, correction: RolloutCorrectionConfig) -> dict[str, float]:
    """Writes importance weights, and a `loss_mask` without rejected tokens; returns metrics."""
    weights, mask, metrics = correct(
        require(batch, "old_log_probs"),
        require(batch, "rollout_log_probs"),
        require(batch, "response_mask"),
        correction,
    )
    write(batch, "loss_mask", mask)
    if weights is not None:
        write(batch, "rollout_is_weights", weights)
    return metrics


def agreement_metrics(batch: DataProto) -> dict[str, float]:
    """Returns metrics of the difference between rollout and trainer log-probs of the same tokens."""
    if not (batch.has_column("rollout_log_probs") and batch.has_column("old_log_probs")):
        return {}
    columns = batch.batch
    mask = columns["response_mask"].bool()
    if not mask.any():
        return {}
    trainer, rollout = columns["old_log_probs"], columns["rollout_log_probs"]
    gaps = log_prob_gap_metrics(trainer, rollout, mask)
    probability_gap = (trainer.exp() - rollout.exp())[mask].abs()
    return {
        **{f"rollout_corr/{name}": value.item() for name, value in gaps.items()},
        "training/rollout_probs_diff_mean": probability_gap.mean().item(),
        "training/rollout_probs_diff_max": probability_gap.max().item(),
    }
