"""Tells which groups of scored trajectories to keep; baselines of ReMax; resampling of PF-PPO."""

from __future__ import annotations

import torch

from hone.agents.collate import last_row_values, trajectory_indices, trajectory_totals
from hone.algorithms.row_selection import (
    interquartile,
    keep_informative,
    pf_ppo_rows,
    remove_extreme,
)
from hone.columns import require
from hone.config import PPOTrainerConfig
from hone.ops.counter_rng import fold_seed
from hone.ops.rows import Groups
from hone.protocol import DataProto
from hone.trainer.ppo.credit import split_attention_mask
from hone.trainer.ppo.extras import extra_numbers, has_extra
from hone.trainer.ppo.response_metrics import has_rule_score, verifiable_rewards


def keep_mask(batch: DataProto, config: PPOTrainerConfig) -> torch.Tensor | None:
    """Returns a [B] bool mask of rows whose groups pass the filters; None without a configured filter."""
    uids = last_row_values(batch, batch.non_tensor_batch["uid"])
    keep: torch.Tensor | None = None
    filters, curriculum = config.algorithm.filter_groups, config.curriculum_learning
    if filters.enable:
        keep = keep_informative(metric_values(batch, filters.metric or "reward", config), uids)
    if curriculum.enable:
        rewards = verifiable_rewards(batch, config)
        if rewards is not None:
            passes_curriculum = torch.ones(len(uids), dtype=torch.bool)
            # Trajectories that no rule scores pass: the reward model's score is still a signal.
            is_scored = has_rule_score(batch)
            scored_rewards = trajectory_totals(batch, rewards)[is_scored]
            scored_uids = uids[is_scored.numpy()]
            if curriculum.fn_name == "interquartile":
                passes_curriculum[is_scored] = interquartile(
                    scored_rewards, scored_uids, **curriculum.fn_params
                )
            else:
                passes_curriculum[is_scored] = remove_extreme(scored_rewards, scored_uids)
            keep = passes_curriculum if keep is None else keep & passes_curriculum
    row_trajectories = trajectory_indices(batch)
    return keep if keep is None or row_trajectories is None else keep[row_trajectories]


def passes_prime_filters(batch: DataProto, config: PPOTrainerConfig) -> torch.Tensor:
    """Returns a bool per group, in order of appearance: whether it passes PRIME's two filters."""
    data, uids = config.data, batch.non_tensor_batch["uid"]
    groups = Groups.of(uids)
    is_preferred = torch.ones(groups.count, dtype=torch.bool)
    if data.filter_accuracy:
        scores = metric_values(batch, "score", config)
        means = Groups.of(last_row_values(batch, uids)).mean(scores)
        is_preferred &= (means >= data.accuracy_lower_bound) & (means <= data.accuracy_upper_bound)
    if data.filter_truncate:
        lengths = split_attention_mask(batch)[1].sum(-1)
        is_preferred &= groups.max(lengths) < data.max_response_length
    return is_preferred


def metric_values(batch: DataProto, name: str, config: PPOTrainerConfig) -> torch.Tensor:
    """Returns the metric `name` of each trajectory: its score, or an extra of the scorer."""
    if name in ("reward", "score", "seq_reward", "seq_final_reward"):
        scores: torch.Tensor = require(batch, "token_level_scores")
        return trajectory_totals(batch, scores.sum(-1))
    if name not in batch.non_tensor_batch and not has_extra(batch, name):
        raise KeyError(
            f"algorithm.filter_groups.metric={name} is not a column of the batch; use reward, or one of "
            f"{', '.join(batch.meta_info.get('reward_extra_names', [])) or 'the reward extras'}"
        )
    numbers = extra_numbers(batch, name, config.reward_model.reward_kwargs.failure_score)
    return trajectory_totals(batch, torch.tensor(numbers, dtype=torch.float64))


def greedy_baselines(batch: DataProto, greedy_batch: DataProto) -> torch.Tensor:
    """Returns ReMax's baseline [B], the score of the greedy response to each row's prompt."""
    scores = trajectory_totals(greedy_batch, require(greedy_batch, "token_level_scores").sum(-1))
    uids = last_row_values(greedy_batch, greedy_batch.non_tensor_batch["uid"])
    score_of_uid = dict(zip(uids, scores.tolist(), strict=True))
    return torch.tensor([score_of_uid[uid] for uid in batch.non_tensor_batch["uid"]])


def resample(batch: DataProto, config: PPOTrainerConfig, *, step: int) -> DataProto:
    """Resamples the trajectories by score (PF-PPO); the result depends on `trainer.seed` and the step."""
    pf_ppo, seed = config.algorithm.pf_ppo, fold_seed(config.trainer.seed, "pf_ppo", step)
    generator = torch.Generator().manual_seed(seed)
    scores = trajectory_totals(batch, require(batch, "token_level_scores").sum(-1))
    indices = pf_ppo_rows(scores, pf_ppo.reweight_method, pf_ppo.weight_pow, generator)
    if (row_trajectories := trajectory_indices(batch)) is not None:
        indices = torch.cat(
            [(row_trajectories == trajectory).nonzero().squeeze(1) for trajectory in indices]
        )
    return batch.select_idxs(indices)
