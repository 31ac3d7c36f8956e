"""Trains PRIME's implicit reward model, and computes a reward per token from the model's log-probs."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.agents.collate import is_last_row, trajectory_indices, trajectory_totals
from hone.algorithms.credit import implicit_rewards, ranking_accuracy
from hone.columns import require, write
from hone.config import PPOTrainerConfig
from hone.controller import WorkerGroup
from hone.ops.rows import Groups
from hone.protocol import DataProto
from hone.rewards.failures import RewardError
from hone.trainer.ppo.credit import AGENT, RULE, balance
from hone.trainer.ppo.extras import extra_numbers, has_extra
from hone.trainer.ppo.source import mean_over_ranks
from hone.workers.process_reward_model import GROUP, OUTCOME, ImplicitRewardModelWorker

_BATCH_ROW = "batch_row"
"""The index of the row in the batch, which `balance` reorders."""


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
    total_rows = int(rows.batch["global_row"].max()) + 1
    output = workers.call(ImplicitRewardModelWorker.update_rm, rows, total_rows=total_rows)
    log_ratios = output.batch["log_ratio"][rows.batch[_BATCH_ROW].argsort()]
    beta, granularity = settings.model.beta_train, settings.prime_granularity
    rewards = implicit_rewards(
        log_ratios, mask, beta=beta, granularity=granularity, norm=settings.prime_norm
    )
    write(batch, "reward/implicit", rewards)
    total_ratios = trajectory_totals(batch, log_ratios.sum(-1))
    is_last = is_last_row(batch)
    last_labels, last_uids = labels[torch.from_numpy(is_last)], uid[is_last]
    pair_accuracy, sign_accuracy = ranking_accuracy(beta * total_ratios, last_labels, last_uids)
    step_metrics = batch.meta_info.setdefault("metrics", {})
    step_metrics |= mean_over_ranks(output.meta_info["metrics"])
    step_metrics["reward_model/reward"] = float(trajectory_totals(batch, rewards.sum(-1)).mean())
    step_metrics["reward_model/raw_reward"] = float(total_ratios.mean())
    step_metrics["reward_model/dpo_acc"] = pair_accuracy
    step_metrics["reward_model/dpo_acc_abs"] = sign_accuracy


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
