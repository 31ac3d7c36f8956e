"""Computes the metrics of answers, routed rows, experts and ranks, and the throughput of a step."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from hone.agents.collate import last_row_indices
from hone.protocol import DataProto
from hone.tracking.timer import TIMING_PREFIX
from hone.types import JsonValue

DISTINCT_ANSWERS = "reward/distinct_answers"


def distinct_answers(batch: DataProto) -> dict[str, float]:
    """Returns (distinct answers - 1) / (expected answers - 1), at most 1; empty if one answer is expected.

    The answer of a prompt is its most frequent response. As many answers are expected as there are distinct
    ground truths; without ground truths, as there are prompts.
    """
    arrays, last_rows = batch.non_tensor_batch, last_row_indices(batch)
    masks, responses = (batch.batch[name] for name in ("response_mask", "responses"))
    counts: defaultdict[str, Counter[tuple[int, ...]]] = defaultdict(Counter)
    truths: dict[str, str] = {}
    for row in range(len(batch)) if last_rows is None else last_rows.tolist():
        uid = str(arrays["uid"][row])
        counts[uid][tuple(responses[row][masks[row].bool()].tolist())] += 1
        reward_model = arrays["reward_model"][row] if "reward_model" in arrays else None
        truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
        if truth is not None:
            truths[uid] = json.dumps(truth, sort_keys=True, default=str)
    num_expected = len(set(truths.values())) if truths else len(counts)
    if num_expected < 2:
        return {}
    num_distinct = len({count.most_common(1)[0][0] for count in counts.values()})
    return {DISTINCT_ANSWERS: min((num_distinct - 1) / (num_expected - 1), 1.0)}


def style_metrics(scores: Tensor, reward_models: Iterable[JsonValue]) -> dict[str, float]:
    """Returns the mean score and the share of trajectories of each `reward_model.style`."""
    styles = [value.get("style") if isinstance(value, dict) else None for value in reward_models]
    is_model = torch.tensor([style == "model" for style in styles])
    metrics: dict[str, float] = {}
    for style, is_in_style in (("model", is_model), ("rule", ~is_model)):
        if is_in_style.any():
            metrics[f"reward/style_{style}/mean"] = scores[is_in_style].mean().item()
            metrics[f"reward/style_{style}/share"] = is_in_style.float().mean().item()
    return metrics


def routing_metrics(batch: DataProto, model_path: str) -> dict[str, float]:
    """Returns the load balance of the experts in each layer, over response tokens."""
    from hone.models.load import load_config
    from hone.models.routing import expert_load_metrics, routing_shape

    shape = routing_shape(load_config(model_path))
    if shape is None:  # the model has no experts
        return {}
    num_experts, _ = shape
    experts, prompt_width = batch.batch["routed_experts"], batch.batch["prompts"].shape[1]
    return expert_load_metrics(experts[:, prompt_width:], batch.batch["response_mask"], num_experts)


def balance_metrics(lengths: Tensor, rank_rows: Sequence[Sequence[int]]) -> dict[str, float]:
    """Returns the tokens per rank before and after `balance`, which assigned the rows `rank_rows`."""
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


def pop_timing(seconds: MutableMapping[str, float]) -> dict[str, float]:
    """Returns the seconds of each timer as metrics, and resets the timers."""
    metrics = {TIMING_PREFIX + name: value for name, value in seconds.items()}
    seconds.clear()
    return metrics


def time_per_token(
    seconds: Mapping[str, float], *, generated_tokens: float, total_tokens: float
) -> dict[str, float]:
    """Returns milliseconds per token of each phase; generation counts only generated tokens."""
    phases = ("gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
    tokens = dict.fromkeys(phases, total_tokens) | {"gen": generated_tokens}
    return {
        f"timing_per_token_ms/{phase}": seconds[phase] * 1000 / count if count else 0.0
        for phase, count in tokens.items()
        if phase in seconds
    }


def throughput_metrics(
    batch: DataProto, timing: Mapping[str, float], ranks: int
) -> dict[str, float]:
    """Returns tokens and seconds of a step, tokens per second per rank, and milliseconds per token."""
    tokens = int(batch.batch["attention_mask"].sum())
    generated_tokens = int(batch.batch["response_mask"].sum())
    seconds = timing.get(f"{TIMING_PREFIX}step", 0.0)
    phases = {name.removeprefix(TIMING_PREFIX): value for name, value in timing.items()}
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds / ranks if seconds else 0.0,
        **time_per_token(phases, generated_tokens=generated_tokens, total_tokens=tokens),
    }
