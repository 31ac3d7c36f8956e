"""Computes PURE's metrics of a step: reward parts, repetition, reflection, groups and lengths.

Since repetition is slow to compute, these metrics are enabled only with a reward model, a curriculum,
`trainer.alarms`, `reward_manager=prime` or `trainer.response_metrics`.
"""

from __future__ import annotations

import re

import numpy as np
import torch
from torch import Tensor

from hone.agents.collate import is_last_row, last_row_values, trajectory_indices, trajectory_totals
from hone.algorithms.credit import STRICT_MIN
from hone.algorithms.kl import k3
from hone.columns import reward_column
from hone.config import PPOTrainerConfig
from hone.config.reward import RewardModelConfig
from hone.ops.rows import Groups, masked_mean
from hone.protocol import DataProto, object_array
from hone.rewards.failures import NO_GROUND_TRUTH
from hone.rewards.repetition import repeatness
from hone.tokenizer import Tokenizer
from hone.trainer.ppo.credit import (
    AGENT,
    MODEL,
    PROCESS,
    RULE,
    has_model_style,
    split_attention_mask,
)
from hone.trainer.ppo.extras import FAILURE_COLUMN
from hone.trainer.ppo.source import are_numbers, mean_max_min

CORRECT_THRESHOLD = 0.5
REFLECTION_PATTERN = re.compile(
    r"wait,|recheck[,\s]|retry[,\s]|try again|alternatively,|however,|rethink[,\s]|let's check|let's verify"
)
"""PURE's reflection patterns, counted in the lower-case response."""


def response_metrics(
    batch: DataProto, tokenizer: Tokenizer, config: PPOTrainerConfig, route_by_style: bool = False
) -> dict[str, float]:
    """Returns the metrics of one batch; metrics by correctness need a response of known correctness.

    If `route_by_style`, the reward model has scored only the rows of style `model`.
    """
    correct = correctness(batch, config)
    is_known = ~correct.isnan()
    row_masks = {"whole": torch.ones(len(batch), dtype=torch.bool)}
    if is_known.any():
        row_masks |= {"correct": correct == 1, "incorrect": correct == 0}
    is_filtered = config.algorithm.filter_groups.enable or config.curriculum_learning.enable
    metrics = {
        **_text_metrics(batch, tokenizer, row_masks, config.reward_model.high_repeat_threshold),
        **_length_metrics(batch, row_masks, config.data.max_response_length),
        **group_metrics(batch, correct, "retained_batch" if is_filtered else "whole_batch"),
    }
    if (rule_rewards := verifiable_rewards(batch, config)) is not None:
        rule_scores = trajectory_totals(batch, rule_rewards)[has_rule_score(batch)]
        metrics |= mean_max_min("instant_rewards/verifiable_reward", rule_scores)
    if (outcome := outcome_rewards(batch, config.reward_model)) is not None:
        missing = object_array([None] * len(batch))
        reward_models = last_row_values(batch, batch.non_tensor_batch.get("reward_model", missing))
        is_scored = torch.tensor(
            [has_model_style(value) or not route_by_style for value in reward_models]
        )
        metrics |= mean_max_min("instant_rewards/outcome_reward", outcome[is_scored])
        verdicts = correct[torch.from_numpy(is_last_row(batch))]
        is_compared = is_scored & ~verdicts.isnan()
        if is_compared.any():
            threshold = CORRECT_THRESHOLD if config.reward_model.type == "judge" else 0.0
            agrees = ((outcome > threshold) == (verdicts == 1))[is_compared]
            metrics["instant_rewards/orm_match_vr"] = agrees.float().mean().item()
    log_prob_columns = [*filter(batch.has_column, ("old_log_probs", "rollout_log_probs"))]
    if log_prob_columns and batch.has_column("ref_log_prob"):
        kl = k3(batch.batch[log_prob_columns[0]], batch.batch["ref_log_prob"])
        metrics["instant_rewards/kl/mean"] = masked_mean(kl, batch.batch["response_mask"]).item()
    return metrics


def filter_metrics(
    generated_batch: DataProto, retained_batch: DataProto, config: PPOTrainerConfig
) -> dict[str, float]:
    """Returns the metrics of a group filter: correctness before the filter and the share of retained rows."""
    return {
        **group_metrics(generated_batch, correctness(generated_batch, config), "whole_batch"),
        "curriculum_learning/original_batch_size": len(generated_batch),
        "curriculum_learning/filtered_batch_size": len(retained_batch),
        "curriculum_learning/retain_ratio": len(retained_batch) / max(len(generated_batch), 1),
    }


def verifiable_rewards(batch: DataProto, config: PPOTrainerConfig) -> Tensor | None:
    """Returns the unweighted score [B] of the rule, or of the agent loop; None if neither scores."""
    for part in (RULE, AGENT):
        is_blank = part == RULE and config.reward_manager.name == "blank"
        if batch.has_column(reward_column(part)) and not is_blank:
            scores: Tensor = batch.column(reward_column(part))
            return scores.sum(-1)
    return None


def has_rule_score(batch: DataProto) -> Tensor:
    """Returns [N] bool: whether a rule scored the trajectory, with the ground truth that it needs."""
    arrays, missing = batch.non_tensor_batch, [None] * len(batch)
    failures, columns = arrays.get(FAILURE_COLUMN, missing), arrays.get("reward_model", missing)
    pairs = zip(failures, columns, strict=True)
    flags = [reason != NO_GROUND_TRUTH and not has_model_style(column) for reason, column in pairs]
    return torch.from_numpy(last_row_values(batch, np.array(flags, dtype=bool)))


def outcome_rewards(batch: DataProto, config: RewardModelConfig) -> Tensor | None:
    """Returns the reward model's unweighted reward [N] of each trajectory.

    Step rewards are combined as in `credit_assignment`: by their minimum, or by their sum.
    """
    columns = batch.batch
    if batch.has_column(reward_column(MODEL)):
        return trajectory_totals(batch, columns[reward_column(MODEL)].sum(-1))
    if not batch.has_column(reward_column(PROCESS)) or config.modeling_reward_coef == 0:
        return None
    step_rewards: Tensor = columns[reward_column(PROCESS)] / config.modeling_reward_coef
    if config.credit_assignment != STRICT_MIN:
        return trajectory_totals(batch, step_rewards.sum(-1))
    minima = step_rewards.masked_fill(~columns["step_mask"].bool(), torch.inf).amin(-1)
    if (trajectory := trajectory_indices(batch)) is not None:
        minima = minima.new_full((int(trajectory.max()) + 1,), torch.inf).scatter_reduce(
            0, trajectory, minima, "amin"
        )
    return minima.masked_fill(minima.isinf(), 0.0)  # a trajectory without a step has 0


def correctness(batch: DataProto, config: PPOTrainerConfig) -> Tensor:
    """Returns [B]: 1 for a correct response, 0 for a wrong one, and NaN if it is not known.

    A response is correct if the scorer's `acc`, or else the score, is above 0.5. Correctness is not known if
    no rule applies, the ground truth is missing, scoring failed, or the row is not its trajectory's last.
    """
    arrays = batch.non_tensor_batch
    scores = verifiable_rewards(batch, config)
    if scores is None:
        return torch.full((len(batch),), torch.nan)
    if (indices := trajectory_indices(batch)) is not None:
        scores = trajectory_totals(batch, scores)[indices]
    numbers = scores.tolist()
    if "acc" in batch.meta_info.get("reward_extra_names", ()) and are_numbers(arrays["acc"]):
        pairs = zip(arrays["acc"], numbers, strict=True)
        numbers = [score if acc is None else float(acc) for acc, score in pairs]
    verdicts = (torch.tensor(numbers) > CORRECT_THRESHOLD).float()
    missing = [None] * len(batch)
    failures, columns = arrays.get(FAILURE_COLUMN, missing), arrays.get("reward_model", missing)
    for row, (failure, column) in enumerate(zip(failures, columns, strict=True)):
        if failure is not None or has_model_style(column):
            verdicts[row] = torch.nan
    verdicts[torch.from_numpy(~is_last_row(batch))] = torch.nan
    return verdicts


def group_metrics(batch: DataProto, correct: Tensor, name: str) -> dict[str, float]:
    """Returns mean, max and min over prompts of pass@n and of the share of correct responses."""
    is_known = ~correct.isnan()
    if not is_known.any():
        return {}
    groups = Groups.of(batch.non_tensor_batch["uid"][is_known.numpy()])
    return {
        **mean_max_min(f"group_info/pass_at_n/{name}", groups.max(correct[is_known])),
        **mean_max_min(f"group_info/avg_n/{name}", groups.mean(correct[is_known])),
    }


def reflection_score(text: str) -> int:
    """Returns the number of matches of PURE's reflection patterns in a response."""
    return len(REFLECTION_PATTERN.findall(text.lower()))


def _text_metrics(
    batch: DataProto, tokenizer: Tokenizer, row_masks: dict[str, Tensor], repeat_threshold: float
) -> dict[str, float]:
    """Returns metrics of the text that the policy sampled, without special tokens and observations."""
    masks = batch.batch["response_mask"].bool()
    pairs = zip(batch.batch["responses"], masks, strict=True)
    token_ids = [ids[mask].tolist() for ids, mask in pairs]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids]
    prefix = "high_level_scores"
    repeat_scores = torch.tensor(repeatness(texts))
    reflection_counts = torch.tensor([reflection_score(text) for text in texts])
    is_repetitive = (repeat_scores > repeat_threshold).float()
    return {
        **mean_max_min(f"{prefix}/repeat_score", repeat_scores),
        **mean_max_min(f"{prefix}/reflection_pattern_score", reflection_counts),
        **{
            f"{prefix}/high_repeatness_ratio/{part}": is_repetitive[is_in_part].mean().item()
            for part, is_in_part in row_masks.items()
            if is_in_part.any()
        },
    }


def _length_metrics(
    batch: DataProto, row_masks: dict[str, Tensor], max_length: int
) -> dict[str, float]:
    lengths = split_attention_mask(batch)[1].sum(-1)
    metrics: dict[str, float] = {}
    for part, is_in_part in row_masks.items():
        metrics |= mean_max_min(f"response_length/{part}", lengths[is_in_part])
        if is_in_part.any():
            clip_ratio = (lengths[is_in_part] >= max_length).float().mean().item()
            metrics[f"response_length/{part}/clip_ratio"] = clip_ratio
    if batch.has_column("step_mask"):
        steps = batch.batch["step_mask"].sum().item()
        tokens = batch.batch["response_mask"].sum().item()
        metrics["num_of_steps/tokens_per_step"] = tokens / max(steps, 1)
    return metrics
