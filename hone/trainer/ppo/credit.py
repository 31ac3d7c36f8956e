"""Computes rewards (minus the KL penalty), importance weights and advantages, on the driver."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from hone.agents.collate import (
    DERIVED_COLUMNS,
    is_last_row,
    last_row_values,
    trajectory_indices,
    trajectory_totals,
)
from hone.algorithms.advantages.estimator import TRAJECTORY_COLUMN, Estimator, Trajectories
from hone.algorithms.correction import correct
from hone.algorithms.kl import FixedKLController, apply_kl_penalty
from hone.algorithms.row_selection import pf_ppo_rows
from hone.columns import REWARD_PREFIX, require, write
from hone.config.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from hone.ops.counter_rng import fold_seed
from hone.ops.masked import masked_whiten
from hone.plugins import PluginError
from hone.protocol import DataProto
from hone.trainer.ppo.scoring import extra_numbers, has_extra
from hone.types import Fields


def apply_kl_in_reward(
    batch: DataProto, algorithm: AlgorithmConfig, controller: FixedKLController
) -> dict[str, float]:
    """Writes `token_level_rewards`: the scores, minus the KL penalty if configured."""
    if not algorithm.use_kl_in_reward:
        write(batch, "token_level_rewards", require(batch, "token_level_scores").clone())
        return {}
    rewards, metrics = penalize_kl(batch, controller, algorithm.kl_penalty)
    write(batch, "token_level_rewards", rewards)
    return metrics


def penalize_kl(
    batch: DataProto, controller: FixedKLController, kl_penalty: str
) -> tuple[Tensor, dict[str, float]]:
    """Returns scores − coefficient · KL [B, T] and metrics, and updates the KL controller."""
    coefficient = controller.value
    rewards, current_kl = apply_kl_penalty(
        require(batch, "token_level_scores"),
        require(batch, "old_log_probs"),
        require(batch, "ref_log_prob"),
        require(batch, "response_mask"),
        coefficient,
        kl_penalty,
    )
    num_trajectories = int(is_last_row(batch).sum())
    controller.update(current_kl=float(current_kl), n_steps=num_trajectories)
    return rewards, {
        "actor/reward_kl_penalty": float(current_kl),
        "actor/reward_kl_penalty_coeff": coefficient,
    }


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


def estimate_advantages(
    batch: DataProto, estimator: Estimator, *, whiten: bool, failure_score: float
) -> None:
    """Writes `advantages` and `returns`; the estimator receives the columns that it declares.

    `failure_score` replaces a reward part of a row whose scoring failed.
    """
    columns = {c: _required_column(batch, c, failure_score) for c in estimator.requires}
    advantages, returns = run_estimator(batch, estimator, columns)
    if whiten:
        advantages = masked_whiten(advantages, require(batch, "response_mask"))
    write(batch, "advantages", advantages)
    write(batch, "returns", returns)


def run_estimator(batch: DataProto, estimator: Estimator, columns: Fields) -> tuple[Tensor, Tensor]:
    """Returns advantages and returns [B, T] from `columns` and the estimator's optional columns."""
    mask = require(batch, "response_mask")
    optional_columns = [c for c in (TRAJECTORY_COLUMN, *estimator.uses) if batch.has_column(c)]
    trajectories = Trajectories(
        require(batch, "token_level_rewards"),
        mask,
        batch.non_tensor_batch.get("uid"),
        columns | {column: batch.column(column) for column in optional_columns},
    )
    advantages, returns = estimator(trajectories)
    for name, values in (("advantages", advantages), ("returns", returns)):
        shape = tuple(getattr(values, "shape", ()))
        if shape != tuple(mask.shape):
            raise PluginError(
                f"the estimator returned {name} of shape {shape} for a response mask of "
                f"{tuple(mask.shape)}; give one number per token, 0 outside the mask"
            )
    return advantages, returns


def _required_column(batch: DataProto, name: str, failure_score: float) -> Tensor:
    """Returns a column [B, T]; for a reward part without a column, the score function's extra [B]."""
    extra = name.removeprefix(REWARD_PREFIX)
    if batch.has_column(name) or name == extra or not has_extra(batch, extra):
        return require(batch, name)
    return torch.tensor(extra_numbers(batch, extra, failure_score))


def write_derived_columns(batch: DataProto, names: Set[str]) -> None:
    """Writes the columns of `names` that are derived from other columns."""
    for name in names & DERIVED_COLUMNS.keys():
        write(batch, name, DERIVED_COLUMNS[name](batch))


def greedy_baselines(batch: DataProto, greedy_batch: DataProto) -> Tensor:
    """Returns ReMax's baseline [B], the score of the greedy response to each row's prompt."""
    scores = trajectory_totals(
        greedy_batch, require(greedy_batch, "token_level_scores").sum(-1)
    ).tolist()
    uids = last_row_values(greedy_batch, greedy_batch.non_tensor_batch["uid"])
    score_of_uid = dict(zip(uids, scores, strict=True))
    return torch.tensor([score_of_uid[uid] for uid in batch.non_tensor_batch["uid"]])


def resample(batch: DataProto, algorithm: AlgorithmConfig, *, seed: int, step: int) -> DataProto:
    """Resamples the trajectories by score (PF-PPO), deterministically from (seed, step)."""
    if not algorithm.use_pf_ppo:
        return batch
    generator = torch.Generator().manual_seed(fold_seed(seed, "pf_ppo", step))
    scores = trajectory_totals(batch, require(batch, "token_level_scores").sum(-1))
    pf_ppo = algorithm.pf_ppo
    indices = pf_ppo_rows(scores, pf_ppo.reweight_method, pf_ppo.weight_pow, generator)
    if (row_trajectories := trajectory_indices(batch)) is not None:
        indices = torch.cat(
            [(row_trajectories == trajectory).nonzero().squeeze(1) for trajectory in indices]
        )
    return batch.select_idxs(indices)
