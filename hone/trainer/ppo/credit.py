"""Computes the scores, rewards and advantages of a batch, and their metrics, in the driver process.

The score of a response is the weighted sum of its parts: rule or agent loop, reward model, turns and
trajectory. `balance` then orders the rows for the ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence, Sized

import numpy as np
import torch
from torch import Tensor

from hone.agents.collate import (
    is_last_row,
    last_row_values,
    trajectory_indices,
    trajectory_rewards,
    trajectory_totals,
    turn_rewards,
)
from hone.algorithms.advantages.estimator import TRAJECTORY_COLUMN, Estimator, Trajectories
from hone.algorithms.credit import assign_credit
from hone.algorithms.kl import FixedKLController, apply_kl_penalty
from hone.columns import REWARD_PARTS, REWARD_PREFIX, declaration, require, reward_column, write
from hone.config import PPOTrainerConfig
from hone.config.algorithm import AlgorithmConfig
from hone.config.reward import RewardModelConfig
from hone.ops.balancing import calculate_workload, get_seqlen_balanced_partitions
from hone.ops.rows import Groups, masked_mean, masked_whiten, split_at_response
from hone.plugins import PluginError, unwrap_function
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.rewards.failures import RewardError
from hone.rewards.managers.rule import RuleRewardManager, move_to_policy_tokens
from hone.rewards.scorer import accepted_names
from hone.text import short_repr
from hone.trainer.ppo.extras import FAILURE_COLUMN, Extras, extra_numbers, has_extra
from hone.trainer.ppo.metrics import balance_metrics, style_metrics
from hone.trainer.ppo.roles import RewardModel
from hone.trainer.ppo.source import are_numbers, env_metric_columns, mean_max_min
from hone.types import Fields, Function, JsonValue
from hone.workers.reward_model import RewardModelWorker

GROUPS_WITHOUT_SIGNAL = "reward/groups_without_signal"
AGENT, RULE, MODEL, PROCESS = REWARD_PARTS


def has_model_style(reward_model: object) -> bool:
    """Returns whether `reward_model.style` of a row is `model`, so that the reward model scores the row."""
    return isinstance(reward_model, Mapping) and reward_model.get("style") == MODEL


def score(
    batch: DataProto,
    reward_fn: Function,
    reward_model: RewardModel | None,
    config: RewardModelConfig,
    route_by_style: bool = False,
) -> DataProto:
    """Writes as columns the score of each part, their weighted sum, and the extras of the score functions."""
    is_process_model = config.type == "prm"
    parts, extras = _score_parts(batch, reward_fn, reward_model, route_by_style, is_process_model)
    weights = {MODEL: config.modeling_reward_coef, RULE: config.verifiable_reward_coef}
    total: Tensor | None = None
    for part, scores in parts.items():
        if part == PROCESS:
            step_mask, trajectory = batch.batch["step_mask"], trajectory_indices(batch)
            scores = assign_credit(scores, step_mask, config.credit_assignment, trajectory)
            # The column has its weight, because RLOO subtracts the column from the weighted sum.
            scores = scores * config.modeling_reward_coef
        if part != AGENT:  # the agent loop's part is a column already
            write(batch, reward_column(part), scores)
        weighted_scores = scores * weights.get(part, 1.0)
        total = weighted_scores if total is None else total + weighted_scores
    assert total is not None
    for kind, coefficients, compute_rewards in (
        ("turn", config.turn_reward_coef, turn_rewards),
        ("trajectory", config.trajectory_reward_coef, trajectory_rewards),
    ):
        for name, weight in coefficients.items():
            scores = compute_rewards(batch, name)
            write(batch, f"{REWARD_PREFIX}{kind}/{name}", scores)
            total = total + scores * weight
    write(batch, "token_level_scores", total)
    # Every batch has the failure column, so that batches of several rounds can be concatenated.
    for name, values in {FAILURE_COLUMN: [None] * len(batch), **extras}.items():
        batch.set_column(name, object_array(list(values)))
    batch.meta_info["reward_extra_names"] = sorted(extras)
    return batch


def _score_parts(
    batch: DataProto,
    reward_fn: Function,
    model: RewardModel | None,
    route_by_style: bool,
    is_process_model: bool,
) -> tuple[dict[str, Tensor], Extras]:
    """Returns the token scores [B, T] of each part, and the extras of the score functions.

    The score of an agent loop replaces the rule's. If the run has a reward model, no rule scores the rows of
    style `model`. If `route_by_style`, the reward model scores only the rows of style `model`. Rule and
    reward model score the last row of each trajectory; a process reward model scores all rows.
    """
    parts: dict[str, Tensor] = {}
    extras: Extras = {}
    is_last = is_last_row(batch)
    is_model_style = np.zeros(len(batch), dtype=bool)
    if model is not None:
        styles = batch.non_tensor_batch.get("reward_model", [None] * len(batch))
        is_model_style = np.array([has_model_style(value) for value in styles], dtype=bool)
    if batch.has_column(reward_column(AGENT)):
        parts[AGENT] = batch.batch[reward_column(AGENT)]
    else:
        parts[RULE], extras = _score_rows(batch, is_last & ~is_model_style, reward_fn)
        _check_extras(extras, reward_fn)
    if model is not None:
        row_mask = is_last & is_model_style if route_by_style else is_last | is_process_model
        if isinstance(model, RuleRewardManager):
            parts[MODEL], model_extras = _score_rows(batch, row_mask, model)
            rule_failures = extras.get(FAILURE_COLUMN)
            model_failures = model_extras.get(FAILURE_COLUMN)
            extras = {**{name: v for name, v in model_extras.items() if name != "score"}, **extras}
            if rule_failures is not None and model_failures is not None:
                reasons = zip(rule_failures, model_failures, strict=True)
                extras[FAILURE_COLUMN] = [by_rule or by_model for by_rule, by_model in reasons]
        elif not row_mask.any():
            parts[MODEL] = torch.zeros(batch.batch["responses"].shape)
        else:
            selected_batch = batch if row_mask.all() else batch[row_mask]
            output = model.call(RewardModelWorker.compute_rm_score, selected_batch)
            if output.has_column("step_mask"):
                write(batch, "step_mask", _expand_rows(output.batch["step_mask"], row_mask))
                parts[PROCESS] = _expand_rows(output.batch["step_rewards"], row_mask)
            else:
                parts[MODEL] = _expand_rows(output.batch["rm_scores"], row_mask)
        if MODEL in parts:
            write(batch, "rm_scores", parts[MODEL])
    return parts, extras


def _score_rows(
    batch: DataProto, row_mask: np.ndarray, reward_fn: Function
) -> tuple[Tensor, Extras]:
    """Returns the manager's scores [B, T] and extras of the selected rows; other rows have 0 and None."""
    if not row_mask.any() and len(batch):
        return torch.zeros(batch.batch["responses"].shape), {}
    selected_batch = batch if row_mask.all() else batch[row_mask]
    rewards, row_extras = _call_manager(reward_fn, selected_batch)
    extras: dict[str, list[JsonValue]] = {}
    for name, values in row_extras.items():
        row_values = iter(values)
        extras[name] = [next(row_values) if is_selected else None for is_selected in row_mask]
    return _expand_rows(move_to_policy_tokens(selected_batch, rewards), row_mask), extras


def _call_manager(reward_fn: Function, batch: DataProto) -> tuple[Tensor, Extras]:
    """Returns rewards [B, T] and extras; TinyZero's managers only take the batch and return rewards."""
    function = reward_fn if inspect.isroutine(reward_fn) else type(reward_fn).__call__
    argument_names = accepted_names(function)  # None: the manager accepts every name
    takes_option = argument_names is None or "return_dict" in argument_names
    result = reward_fn(batch, **({"return_dict": True} if takes_option else {}))
    if not isinstance(result, Mapping):
        result = {"reward_tensor": result}
    rewards, extras = result.get("reward_tensor"), result.get("reward_extra_info") or {}
    shape = tuple(batch.batch["responses"].shape)
    manager = f"the reward manager {getattr(reward_fn, '__name__', type(reward_fn).__name__)}"
    if not isinstance(rewards, Tensor) or tuple(rewards.shape) != shape:
        returned = f"{type(rewards).__name__} of shape {tuple(getattr(rewards, 'shape', ()))}"
        raise RewardError(
            f"{manager} returned a {returned} as rewards; return a tensor of shape {shape}"
        )
    if not rewards.isfinite().all():
        row = int((~rewards.isfinite()).any(-1).nonzero()[0])
        raise RewardError(
            f"{manager} returned a reward for row {row} that is not finite; return a number for every row"
        )
    for name, values in extras.items():
        if not isinstance(values, Sized) or isinstance(values, str) or len(values) != len(batch):
            raise RewardError(
                f"{manager} returned {short_repr(values)} as reward_extra_info[{name!r}]; return one value "
                f"for each of the {len(batch)} rows"
            )
    return rewards.detach().float().cpu(), extras


def _expand_rows(scores: Tensor, row_mask: np.ndarray) -> Tensor:
    """Expands the scores of the selected rows to [B, T], with 0 in the other rows."""
    expanded = torch.zeros((len(row_mask), *scores.shape[1:]), dtype=scores.dtype)
    expanded[torch.from_numpy(row_mask)] = scores
    return expanded


def _check_extras(extras: Extras, reward_fn: Function) -> None:
    """Raises an error if an extra has the name of a column that the training loop writes."""
    for name in extras:
        column = declaration(name)
        if column is not None and name != FAILURE_COLUMN:
            scorer = unwrap_function(getattr(reward_fn, "compute_score", None) or reward_fn)
            scorer_name = getattr(scorer, "__name__", type(scorer).__name__)
            raise RewardError(
                f"the score function {scorer_name} returns {name!r}, which is a column of the batch "
                f"({column.meaning}); return it under another name"
            )


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


def estimate_advantages(batch: DataProto, estimator: Estimator, config: PPOTrainerConfig) -> None:
    """Writes `advantages` and `returns`; the estimator receives the columns that it declares."""
    failure_score = config.reward_model.reward_kwargs.failure_score
    columns: Fields = {}
    for name in estimator.requires:
        part = name.removeprefix(REWARD_PREFIX)
        may_be_extra = name.startswith(REWARD_PREFIX) and not batch.has_column(name)
        if may_be_extra and has_extra(batch, part):  # a value of `reward_extra_info`
            columns[name] = torch.tensor(extra_numbers(batch, part, failure_score))  # [B]
        else:
            columns[name] = require(batch, name)  # [B, T]
    advantages, returns = run_estimator(batch, estimator, columns)
    if config.algorithm.adv_norm:
        advantages = masked_whiten(advantages, require(batch, "response_mask"))
    write(batch, "advantages", advantages)
    write(batch, "returns", returns)


def run_estimator(batch: DataProto, estimator: Estimator, columns: Fields) -> tuple[Tensor, Tensor]:
    """Returns advantages and returns [B, T] from `columns` and the estimator's optional columns."""
    mask = require(batch, "response_mask")
    optional_columns = filter(batch.has_column, (TRAJECTORY_COLUMN, *estimator.uses))
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


def balance(
    batch: DataProto, ranks: int, rows_per_update: Sequence[int], *, by_length: bool
) -> tuple[DataProto, dict[str, float]]:
    """Writes `global_row`, and orders the rows by rank, so that each rank has its part of every mini-batch.

    `global_row` is the index of the row before the reordering. If trajectories have several rows, it is the
    index of the trajectory. Mini-batches are formed by `global_row`, so they are the same as with one rank.
    """
    row_trajectories = trajectory_indices(batch)
    global_rows = torch.arange(len(batch)) if row_trajectories is None else row_trajectories
    write(batch, "global_row", global_rows)
    if ranks == 1:
        return batch, {}
    lengths = batch.batch["attention_mask"].sum(1)
    if row_trajectories is not None or len(batch) % ranks:
        # The rows of a mini-batch may not divide evenly, so the ranks take rows in turn, longest first.
        update_numbers = global_rows // min(rows_per_update)
        sorted_rows = torch.from_numpy(np.lexsort((-lengths.numpy(), update_numbers.numpy())))
        return batch.select_idxs(torch.cat([sorted_rows[rank::ranks] for rank in range(ranks)])), {}
    # Every mini-batch is a number of whole blocks, and each rank gets an equal part of each block.
    block_rows = math.gcd(len(lengths), *rows_per_update)
    block_rows = block_rows if block_rows % ranks == 0 else len(lengths)
    rank_rows: list[list[int]] = [[] for _ in range(ranks)]
    for block in torch.arange(len(lengths)).split(block_rows):
        rank_positions = torch.arange(len(block)).view(ranks, -1).tolist()
        if by_length:
            workloads = calculate_workload(lengths[block].tolist())
            rank_positions = get_seqlen_balanced_partitions(workloads, ranks, equal_size=True)
        for row_indices, positions in zip(rank_rows, rank_positions, strict=True):
            row_indices += block[positions].tolist()
    metrics = balance_metrics(lengths, rank_rows)
    return batch.select_idxs(torch.tensor([row for rows in rank_rows for row in rows])), metrics


def data_metrics(
    batch: DataProto, max_prompt_length: int, max_response_length: int
) -> dict[str, float]:
    """Returns metrics of scores, rewards, advantages, lengths and turns of one batch."""
    columns, arrays = batch.batch, batch.non_tensor_batch
    mask = columns["response_mask"].bool()
    prompt_length, response_length = (part.sum(1) for part in split_attention_mask(batch))
    is_long_prompt = prompt_length >= max_prompt_length
    is_long_response = response_length >= max_response_length
    scores = trajectory_totals(batch, columns["token_level_scores"].sum(-1))
    rewards = trajectory_totals(batch, columns["token_level_rewards"].sum(-1))
    metrics = {
        **mean_max_min("critic/score", scores),
        **mean_max_min("critic/rewards", rewards),
        **mean_max_min("critic/advantages", columns["advantages"][mask]),
        **mean_max_min("critic/returns", columns["returns"][mask]),
        **mean_max_min("response_length", response_length),
        **mean_max_min("prompt_length", prompt_length),
        "response_length/clip_ratio": is_long_response.float().mean().item(),
        "prompt_length/clip_ratio": is_long_prompt.float().mean().item(),
        "reward/mean": scores.mean().item(),
    }
    if (indices := trajectory_indices(batch)) is not None:
        metrics |= mean_max_min("trajectory_rows", indices.bincount())
    if batch.has_column("values"):
        values, returns = columns["values"][mask], columns["returns"][mask]
        metrics |= mean_max_min("critic/values", values)
        if len(values) > 1:  # one value has no variance
            error = torch.var(returns - values) / (torch.var(returns) + 1e-5)
            metrics["critic/vf_explained_var"] = 1.0 - error.item()
    if batch.has_column("entropys"):
        metrics["actor/entropy"] = masked_mean(columns["entropys"], mask).item()
    if batch.has_column("step_mask"):
        step_counts = trajectory_totals(batch, columns["step_mask"].sum(-1))
        metrics |= mean_max_min("num_of_steps", step_counts)
    if batch.has_column("rm_scores") and "reward_model" in arrays:
        metrics |= style_metrics(scores, last_row_values(batch, arrays["reward_model"]))
    # A data set may also have a column `acc`; only the `acc` of a scorer or an agent loop is reported.
    keys = ("reward_extra_names", "loop_columns")
    has_acc = any("acc" in batch.meta_info.get(key, ()) for key in keys)
    if has_acc and are_numbers(arrays.get("acc", ())):
        accuracies = [float(value) for value in arrays["acc"] if value is not None]
        metrics["accuracy"] = sum(accuracies) / len(accuracies)
    for name in ("num_turns", "tool_call_counts", "tool_failures"):
        counts = [float(count) for count in arrays.get(name, ()) if count is not None]
        metrics |= mean_max_min(name, torch.tensor(counts))
    for name in env_metric_columns(batch):
        policy_tokens = int(mask.sum())
        metrics["state_tokens/total"] = policy_tokens
        metrics["state_tokens/coverage"] = policy_tokens / max(int(response_length.sum()), 1)
        numbers = torch.tensor([float(value) for value in arrays[name] if value is not None])
        if name == "env/number_of_actions":
            metrics |= mean_max_min(name, numbers)
        else:
            metrics[name] = numbers.mean().item()
    return metrics


def signal_metrics(batch: DataProto) -> dict[str, float]:
    """Returns the share of groups with one score for all responses; empty if no group has two responses."""
    scores = trajectory_totals(batch, require(batch, "token_level_scores").sum(-1))
    groups = Groups.of(last_row_values(batch, batch.non_tensor_batch["uid"]))
    has_several_responses = groups.sizes > 1
    if not has_several_responses.any():
        return {}
    has_equal_scores = (groups.max(scores) == groups.min(scores))[has_several_responses]
    return {GROUPS_WITHOUT_SIGNAL: has_equal_scores.double().mean().item()}


def pop_manager_metrics(*managers: object) -> dict[str, float]:
    """Returns the metrics of the managers since the last call; a user's manager may have none."""
    metrics: dict[str, float] = {}
    for manager in managers:
        if hasattr(manager, "pop_metrics"):
            metrics |= manager.pop_metrics()
    return metrics


def split_attention_mask(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Returns the attention masks of prompts [B, P] and responses [B, T]."""
    return split_at_response(batch.batch["attention_mask"], batch.batch["responses"])
