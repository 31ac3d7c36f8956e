"""Writes the scores of each reward part (rule, reward model, agent loop) and their weighted sum.

Extras that a scorer returns next to its score become columns, and replace data columns of that name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence, Sized
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from hone.agents.collate import (
    is_last_row,
    last_row_values,
    trajectory_indices,
    trajectory_rewards,
    turn_rewards,
)
from hone.algorithms.credit import assign_credit
from hone.columns import REWARD_PREFIX, declaration, reward_column, write
from hone.config.reward import RewardModelConfig
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.rewards.calling import accepted_names
from hone.rewards.failures import NO_GROUND_TRUTH, RewardError
from hone.rewards.managers.rule import RuleRewardManager, move_to_policy_tokens
from hone.rewards.scorer_code import unwrap_function
from hone.text import short_repr
from hone.trainer.ppo.roles import RewardModel
from hone.types import Function, JsonValue
from hone.workers.reward_model import RewardModelWorker

AGENT, RULE, MODEL, PROCESS = "agent", "rule", "model", "process"

Extras: TypeAlias = Mapping[str, Sequence[JsonValue]]
"""Values that a score function returned next to its score, by name; one value per row."""
FAILURE_COLUMN = "reward_failure"
"""The extra with the reason why a row could not be scored; None for a scored row."""


def has_model_style(reward_model: object) -> bool:
    """Returns whether a row's `reward_model` column has style `model`: the reward model scores such a row."""
    return isinstance(reward_model, Mapping) and reward_model.get("style") == MODEL


def _score_parts(
    batch: DataProto,
    reward_fn: Function,
    model: RewardModel | None,
    route_by_style: bool,
    scores_steps: bool,
) -> tuple[dict[str, Tensor], Extras]:
    """Returns the token scores [B, T] of each part, and extras; an agent loop's score replaces the rule's.

    With a reward model, no rule scores rows of style `model`; with `route_by_style`, an outcome reward model
    scores only these. Only the last row of a trajectory is scored; with `scores_steps`, the model scores all.
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
        mask = is_last & is_model_style if route_by_style else is_last | scores_steps
        if isinstance(model, RuleRewardManager):
            parts[MODEL], model_extras = _score_rows(batch, mask, model)
            rule_failures, model_failures = (x.get(FAILURE_COLUMN) for x in (extras, model_extras))
            extras = {**{name: v for name, v in model_extras.items() if name != "score"}, **extras}
            if rule_failures is not None and model_failures is not None:
                pairs = zip(rule_failures, model_failures, strict=True)
                extras[FAILURE_COLUMN] = [rule or model for rule, model in pairs]
        elif not mask.any():
            parts[MODEL] = torch.zeros(batch.batch["responses"].shape)
        else:
            selected_batch = batch if mask.all() else batch[mask]
            output = model.call(RewardModelWorker.compute_rm_score, selected_batch)
            if output.has_column("step_mask"):
                write(batch, "step_mask", _expand_rows(output.batch["step_mask"], mask))
                parts[PROCESS] = _expand_rows(output.batch["step_rewards"], mask)
            else:
                parts[MODEL] = _expand_rows(output.batch["rm_scores"], mask)
        if MODEL in parts:
            write(batch, "rm_scores", parts[MODEL])
    return parts, extras


def _score_rows(batch: DataProto, mask: np.ndarray, reward_fn: Function) -> tuple[Tensor, Extras]:
    """Returns the manager's scores [B, T] and extras of the selected rows; other rows have 0 and None."""
    if not mask.any() and len(batch):
        return torch.zeros(batch.batch["responses"].shape), {}
    selected_batch = batch if mask.all() else batch[mask]
    rewards, row_extras = _call_manager(reward_fn, selected_batch)
    extras: dict[str, list[JsonValue]] = {}
    for name, values in row_extras.items():
        row_values = iter(values)
        extras[name] = [next(row_values) if is_selected else None for is_selected in mask]
    return _expand_rows(move_to_policy_tokens(selected_batch, rewards), mask), extras


def _call_manager(reward_fn: Function, batch: DataProto) -> tuple[Tensor, Extras]:
    """Returns rewards [B, T] and extras; a manager of TinyZero's form takes the batch and returns rewards."""
    call = reward_fn if inspect.isroutine(reward_fn) else type(reward_fn).__call__
    names, shape = accepted_names(call), tuple(batch.batch["responses"].shape)
    options = {"return_dict": True} if names is None or "return_dict" in names else {}
    result = reward_fn(batch, **options)
    if not isinstance(result, Mapping):
        result = {"reward_tensor": result}
    rewards, extras = result.get("reward_tensor"), result.get("reward_extra_info") or {}
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


def _expand_rows(scores: Tensor, mask: np.ndarray) -> Tensor:
    """Expands the scores of the selected rows to [B, T], with 0 in the other rows."""
    expanded = torch.zeros((len(mask), *scores.shape[1:]), dtype=scores.dtype)
    expanded[torch.from_numpy(mask)] = scores
    return expanded


def _check_extras(extras: Extras, reward_fn: Function) -> None:
    """Raises an error if an extra has the name of a column that the training loop writes."""
    for name in extras:
        column = declaration(name)
        if column is not None and name != FAILURE_COLUMN:
            scorer = unwrap_function(getattr(reward_fn, "compute_score", None) or reward_fn)
            scorer_name = getattr(scorer, "__name__", type(scorer).__name__)
            raise RewardError(
                f"the score function {scorer_name} returns {name!r}, which is a column of step "
                f"{column.step!r} ({column.meaning}); return it under another name"
            )


def extra_numbers(batch: DataProto, name: str, failure_score: float) -> list[float]:
    """Returns the scorer's extra `name` per row: `failure_score` for a failed row, and 0 for a row that is
    not the last of its trajectory."""
    arrays, missing = batch.non_tensor_batch, [None] * len(batch)
    is_last = is_last_row(batch)
    numbers = []
    for row, (value, failure) in enumerate(
        zip(arrays.get(name, missing), arrays.get(FAILURE_COLUMN, missing), strict=True)
    ):
        if value is None and (failure is not None or not is_last[row]):
            value = failure_score if is_last[row] else 0.0
        try:
            numbers.append(float(value))
        except (TypeError, ValueError, OverflowError) as error:
            source = arrays.get("data_source", missing)[row]
            raise RewardError(
                f"row {row} (data_source {source!r}) has no number under {name!r}, got {value!r}; "
                "the score function must return one for every row that it scores"
            ) from error
    return numbers


def has_rule_score(batch: DataProto) -> Tensor:
    """Returns [N] bool: whether a rule scored the trajectory, with the ground truth that it needs."""
    arrays, missing = batch.non_tensor_batch, [None] * len(batch)
    failures, columns = arrays.get(FAILURE_COLUMN, missing), arrays.get("reward_model", missing)
    pairs = zip(failures, columns, strict=True)
    flags = [reason != NO_GROUND_TRUTH and not has_model_style(column) for reason, column in pairs]
    return torch.from_numpy(last_row_values(batch, np.array(flags, dtype=bool)))


def has_extra(batch: DataProto, name: str) -> bool:
    """Returns whether the scorer returns the extra `name`; True if it failed on every row."""
    failures = batch.non_tensor_batch.get(FAILURE_COLUMN, np.empty(0, dtype=object))
    last_failures = failures[is_last_row(batch)] if len(failures) else failures
    all_failed = len(last_failures) > 0 and all(failure is not None for failure in last_failures)
    return name in batch.meta_info.get("reward_extra_names", ()) or all_failed


def score(
    batch: DataProto,
    reward_fn: Function,
    reward_model: RewardModel | None,
    config: RewardModelConfig,
    route_by_style: bool = False,
) -> DataProto:
    """Writes the score of each part, their weighted sum, and the extras as columns."""
    scores_steps = config.type == "prm"
    parts, extras = _score_parts(batch, reward_fn, reward_model, route_by_style, scores_steps)
    weights = {MODEL: config.modeling_reward_coef, RULE: config.verifiable_reward_coef}
    total: Tensor | None = None
    for part, scores in parts.items():
        if part == PROCESS:
            step_mask, trajectory = batch.batch["step_mask"], trajectory_indices(batch)
            scores = assign_credit(scores, step_mask, config.credit_assignment, trajectory)
            # The column has weighted rewards, since the strict minimum subtracts the column from the sum.
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


def pop_metrics(*managers: object) -> dict[str, float]:
    """Returns the metrics of the managers since the last call; a user's manager may have none."""
    return {
        name: value
        for manager in managers
        if hasattr(manager, "pop_metrics")
        for name, value in manager.pop_metrics().items()
    }
