"""Computes rewards, importance weights and advantages on the driver, and orders rows for the update."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hone.agents.collate import (
    is_last_row,
    last_row_values,
    trajectory_indices,
    trajectory_totals,
)
from hone.algorithms.advantages.estimator import TRAJECTORY_COLUMN, Estimator, Trajectories
from hone.algorithms.correction import correct
from hone.algorithms.credit import implicit_rewards, ranking_accuracy
from hone.algorithms.kl import FixedKLController, apply_kl_penalty
from hone.algorithms.row_selection import pf_ppo_rows
from hone.columns import REWARD_PREFIX, require, write
from hone.config import PPOTrainerConfig
from hone.config.algorithm import AlgorithmConfig, PFPPOConfig, RolloutCorrectionConfig
from hone.controller import WorkerGroup
from hone.ops.balancing import calculate_workload, get_seqlen_balanced_partitions
from hone.ops.counter_rng import fold_seed
from hone.ops.statistics import Groups, masked_whiten
from hone.plugins import PluginError
from hone.protocol import DataProto
from hone.rewards.failures import RewardError
from hone.trainer.ppo.metrics import mean_over_ranks
from hone.trainer.ppo.scoring import AGENT, RULE, extra_numbers, has_extra
from hone.types import Fields
from hone.workers.process_reward_model import GROUP, OUTCOME, ImplicitRewardModelWorker

_BATCH_ROW = "batch_row"
"""The index of the row in the batch, which `balance` reorders."""


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
    columns: Fields = {}
    for name in estimator.requires:
        extra = name.removeprefix(REWARD_PREFIX)
        if batch.has_column(name) or name == extra or not has_extra(batch, extra):
            columns[name] = require(batch, name)  # [B, T]
        else:  # a reward part without a column is an extra of the score function
            columns[name] = torch.tensor(extra_numbers(batch, extra, failure_score))  # [B]
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


def greedy_baselines(batch: DataProto, greedy_batch: DataProto) -> Tensor:
    """Returns ReMax's baseline [B], the score of the greedy response to each row's prompt."""
    scores = trajectory_totals(greedy_batch, require(greedy_batch, "token_level_scores").sum(-1))
    uids = last_row_values(greedy_batch, greedy_batch.non_tensor_batch["uid"])
    score_of_uid = dict(zip(uids, scores.tolist(), strict=True))
    return torch.tensor([score_of_uid[uid] for uid in batch.non_tensor_batch["uid"]])


def resample(batch: DataProto, pf_ppo: PFPPOConfig, *, seed: int, step: int) -> DataProto:
    """Resamples the trajectories by score (PF-PPO), deterministically from (seed, step)."""
    generator = torch.Generator().manual_seed(fold_seed(seed, "pf_ppo", step))
    scores = trajectory_totals(batch, require(batch, "token_level_scores").sum(-1))
    indices = pf_ppo_rows(scores, pf_ppo.reweight_method, pf_ppo.weight_pow, generator)
    if (row_trajectories := trajectory_indices(batch)) is not None:
        indices = torch.cat(
            [(row_trajectories == trajectory).nonzero().squeeze(1) for trajectory in indices]
        )
    return batch.select_idxs(indices)


def balance(
    batch: DataProto, ranks: int, rows_per_update: Sequence[int], *, by_length: bool
) -> tuple[DataProto, dict[str, float]]:
    """Writes `step_row`, and orders the rows by rank, so that each rank has its part of every mini-batch.

    `step_row` is the index of each row (of each trajectory, if trajectories have several rows) before the
    reordering. It assigns rows to mini-batches, so the updates are the same as with one rank.
    """
    row_trajectories = trajectory_indices(batch)
    step_rows = torch.arange(len(batch)) if row_trajectories is None else row_trajectories
    write(batch, "step_row", step_rows)
    if ranks == 1:
        return batch, {}
    lengths = batch.batch["attention_mask"].sum(1)
    if row_trajectories is not None or len(batch) % ranks:
        # The rows of a mini-batch may not divide evenly, so the ranks take rows in turn, longest first.
        update_numbers = step_rows // min(rows_per_update)
        sorted_rows = torch.from_numpy(np.lexsort((-lengths.numpy(), update_numbers.numpy())))
        return batch.select_idxs(torch.cat([sorted_rows[rank::ranks] for rank in range(ranks)])), {}
    block_rows = math.gcd(len(lengths), *rows_per_update)
    block_rows = block_rows if block_rows % ranks == 0 else len(lengths)
    rank_rows: list[list[int]] = [[] for _ in range(ranks)]
    for block in torch.arange(len(lengths)).split(block_rows):
        parts = torch.arange(len(block)).view(ranks, -1).tolist()
        if by_length:
            workloads = calculate_workload(lengths[block].tolist())
            parts = get_seqlen_balanced_partitions(workloads, ranks, equal_size=True)
        for rows, part in zip(rank_rows, parts, strict=True):
            rows += block[part].tolist()
    metrics = _length_metrics(lengths, rank_rows)
    return batch.select_idxs(torch.tensor([row for rows in rank_rows for row in rows])), metrics


def _length_metrics(lengths: Tensor, rank_rows: Sequence[Sequence[int]]) -> dict[str, float]:
    """Returns the tokens per rank before the reordering, and after it, with the rows `rank_rows`."""
    ranks = len(rank_rows)
    tokens_before = lengths.view(ranks, -1).sum(1).tolist()
    tokens_after = [lengths[list(rows)].sum().item() for rows in rank_rows]
    return {
        "global_seqlen/min": float(min(tokens_before)),
        "global_seqlen/max": float(max(tokens_before)),
        "global_seqlen/minmax_diff": float(max(tokens_before) - min(tokens_before)),
        "global_seqlen/balanced_min": float(min(tokens_after)),
        "global_seqlen/balanced_max": float(max(tokens_after)),
        "global_seqlen/mean": lengths.sum().item() / ranks,
    }


def train_implicit_reward_model(
    batch: DataProto, workers: WorkerGroup[ImplicitRewardModelWorker], config: PPOTrainerConfig
) -> None:
    """Updates the reward model, and writes `reward/implicit` [B, T] and the metrics of the update."""
    settings, mask = config.reward_model, require(batch, "response_mask")
    labels, uid = outcome_labels(batch, config), batch.non_tensor_batch["uid"]
    rows = batch.select()
    columns = {OUTCOME: labels, GROUP: Groups.of(uid).ids, _BATCH_ROW: torch.arange(len(batch))}
    for name, values in columns.items():
        rows.set_column(name, values)
    ranks, by_length = workers.data_parallel_size, config.trainer.balance_batch
    rows, _ = balance(rows, ranks, [settings.mini_batch_size], by_length=by_length)
    num_step_rows = int(rows.batch["step_row"].max()) + 1
    output = workers.call(ImplicitRewardModelWorker.update_rm, rows, num_step_rows=num_step_rows)
    log_ratios = output.batch["log_ratio"][rows.batch[_BATCH_ROW].argsort()]
    beta, granularity = settings.model.beta_train, settings.prime_granularity
    rewards = implicit_rewards(
        log_ratios, mask, beta=beta, granularity=granularity, norm=settings.prime_norm
    )
    write(batch, "reward/implicit", rewards)
    total_ratios = trajectory_totals(batch, log_ratios.sum(-1))
    is_last = is_last_row(batch)
    last_labels, last_uids = labels[torch.from_numpy(is_last)], uid[is_last]
    accuracies = ranking_accuracy(beta * total_ratios, last_labels, last_uids)
    step_metrics = batch.meta_info.setdefault("metrics", {})
    step_metrics |= mean_over_ranks(output.meta_info["metrics"])
    step_metrics["reward_model/reward"] = float(trajectory_totals(batch, rewards.sum(-1)).mean())
    step_metrics["reward_model/raw_reward"] = float(total_ratios.mean())
    step_metrics["reward_model/dpo_acc"], step_metrics["reward_model/dpo_acc_abs"] = accuracies


def outcome_labels(batch: DataProto, config: PPOTrainerConfig) -> Tensor:  # [B] in 0 … 1
    """Returns the label of each response: the scorer's `acc` if there is one, else the response's score."""
    if has_extra(batch, "acc"):
        numbers = extra_numbers(batch, "acc", config.reward_model.reward_kwargs.failure_score)
        labels = torch.tensor(numbers, dtype=torch.float32)
    else:
        part = RULE if batch.has_column(f"reward/{RULE}") else AGENT
        labels = require(batch, f"reward/{part}").sum(-1).float()
    if (trajectory := trajectory_indices(batch)) is not None:
        labels = trajectory_totals(batch, labels)[trajectory]
    out_of_range = labels[(labels < 0) | (labels > 1)].tolist()
    if out_of_range:
        raise RewardError(
            f"reward_model.type=prime trains on outcomes from 0 to 1, but a score is {out_of_range[0]:g}; "
            "return scores in that range, or an additional `acc`"
        )
    return labels
