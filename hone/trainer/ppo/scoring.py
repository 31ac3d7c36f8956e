"""Scores from every source, each in its own column, and their configured sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hone.columns import reward_column, write
from hone.config.reward import RewardModelConfig
from hone.data.dataset import SINGLE_TURN_AGENT
from hone.protocol import DataProto
from hone.protocol.rows import object_array

AGENT, RULE, MODEL, PROCESS = "agent", "rule", "model", "process"
_NEEDS_NO_RULE = {"reward_model": {"style": "model"}}


def check_sources(reward_fn: Any, dataset: Any, *, default_loop: str) -> None:
    """Stop where a row's data source has no score; rows that another loop plays may bring their own."""
    if not hasattr(reward_fn, "check_rows") or not hasattr(dataset, "store"):
        return
    columns = (reward_fn.reward_fn_key, "reward_model", "agent_name")
    kept = set(dataset.positions)

    def needs_rule(position: int, row: Mapping[str, Any]) -> bool:
        loop = row.get("agent_name") or default_loop
        return position in kept and loop == SINGLE_TURN_AGENT

    rows = (
        row if needs_rule(position, row) else _NEEDS_NO_RULE
        for position, row in enumerate(dataset.store.scan(columns))
    )
    reward_fn.check_rows(rows, dataset.store.where)


def score_parts(
    batch: DataProto, reward_fn: Any, reward_model: Any
) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """Token scores [B, T] by part, and extra facts a row. A loop's own score stands for the rule."""
    parts: dict[str, Tensor] = {}
    extras: Mapping[str, Any] = {}
    if batch.has_column("rm_scores"):
        parts[AGENT] = batch.batch["rm_scores"]
    else:
        result = reward_fn(batch, return_dict=True)
        parts[RULE] = result["reward_tensor"]
        extras = result.get("reward_extra_info", {})
    if reward_model is not None:
        scored = reward_model.compute_rm_score(batch)
        by_steps = scored.has_column("step_mask")
        if by_steps:
            write(batch, "step_mask", scored.batch["step_mask"])
        parts[PROCESS if by_steps else MODEL] = scored.batch["rm_scores"]
    return parts, extras


def write_scores(
    batch: DataProto,
    parts: Mapping[str, Tensor],
    extras: Mapping[str, Any],
    config: RewardModelConfig,
) -> None:
    """Write `reward/<part>`, their weighted sum, and the extras as columns."""
    weights = {MODEL: config.modeling_reward_coef, RULE: config.verifiable_reward_coef}
    total: Tensor | None = None
    for part, scores in parts.items():
        if (
            part == PROCESS
        ):  # its column is what enters the sum: the strict minimum takes it out again
            scores = scores * config.modeling_reward_coef
        write(batch, reward_column(part), scores)
        weighted = scores * weights.get(part, 1.0)
        total = weighted if total is None else total + weighted
    assert total is not None
    write(batch, "token_level_scores", total)
    for name, values in extras.items():
        if not batch.has_column(name):
            batch.set_column(name, object_array(list(values)))
    batch.meta_info["reward_extra_names"] = sorted(extras)
