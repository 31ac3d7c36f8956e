"""Computes the metrics of a step, with verl's names."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from hone.agents.collate import last_row_values, trajectory_indices, trajectory_totals
from hone.columns import require
from hone.ops.rows import Groups, masked_mean, split_at_response
from hone.protocol import DataProto
from hone.tracking.markers import TIMING_PREFIX
from hone.types import JsonValue

log = logging.getLogger(__name__)

GROUPS_WITHOUT_SIGNAL = "reward/groups_without_signal"


class StepWarnings:
    """Warns of skipped updates, and of batches in which all responses of each group have the same score.

    Of consecutive batches without a difference of scores, only the first is reported.
    """

    def __init__(self, *, is_group_relative: bool) -> None:
        self._is_group_relative = is_group_relative
        self._had_no_signal = False
        self._skipped_counts: dict[str, float] = {}

    def warn_of_skipped_updates(self, metrics: Mapping[str, float], step: int) -> None:
        """Warns if an update was skipped because its gradient was not finite."""
        for name in ("actor/skipped_updates", "critic/skipped_updates"):
            if metrics.get(name, 0.0) > self._skipped_counts.get(name, 0.0):
                self._skipped_counts[name] = metrics[name]
                log.warning(
                    "step %d: a gradient was not finite, so the update was skipped (%s=%d); lower "
                    "optim.lr or grad_clip, and look for NaN in the rewards, if this repeats",
                    step,
                    name,
                    metrics[name],
                )

    def check_group_signal(self, batch: DataProto, step: int) -> dict[str, float]:
        """Returns the fraction of groups with equal scores, and warns if it is 1.

        The result is empty if every group has only one response.
        """
        scores = trajectory_totals(batch, require(batch, "token_level_scores").sum(-1))
        groups = Groups.of(last_row_values(batch, batch.non_tensor_batch["uid"]))
        has_several_responses = groups.sizes > 1
        if not has_several_responses.any():
            return {}
        has_equal_scores = (groups.max(scores) == groups.min(scores))[has_several_responses]
        has_no_signal = bool(has_equal_scores.all())
        if has_no_signal and not self._had_no_signal and self._is_group_relative:
            log.warning(
                "step %d: in each of the %d groups all responses have the same score, so the step "
                "teaches nothing; use prompts that are neither too easy nor too hard, a score with "
                "more levels, more responses per prompt (actor_rollout_ref.rollout.n), or "
                "algorithm.filter_groups.enable=true",
                step,
                len(has_equal_scores),
            )
        self._had_no_signal = has_no_signal
        return {GROUPS_WITHOUT_SIGNAL: has_equal_scores.double().mean().item()}


def mean_over_ranks(metrics: Mapping[str, float | list[float]]) -> dict[str, float]:
    """Averages the metrics of workers over ranks; a list has one value per rank."""
    return {
        name: float(sum(value) / len(value)) if isinstance(value, list) else float(value)
        for name, value in metrics.items()
    }


def pop_manager_metrics(*managers: object) -> dict[str, float]:
    """Returns the metrics of the managers since the last call; a user's manager may have none."""
    return {
        name: value
        for manager in managers
        if hasattr(manager, "pop_metrics")
        for name, value in manager.pop_metrics().items()
    }


def mean_max_min(name: str, values: Tensor) -> dict[str, float]:
    """Returns mean, max and min; empty if there are no values."""
    if values.numel() == 0:
        return {}
    values = values.float()
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def split_attention_mask(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Returns the attention masks of prompts [B, P] and responses [B, T]."""
    return split_at_response(batch.batch["attention_mask"], batch.batch["responses"])


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
        accuracies = [float(a) for a in arrays["acc"] if a is not None]
        metrics["accuracy"] = sum(accuracies) / len(accuracies)
    for name in ("num_turns", "tool_call_counts", "tool_failures"):
        counts = torch.tensor([float(n) for n in arrays.get(name, ()) if n is not None])
        metrics |= mean_max_min(name, counts)
    for name in environment_columns(batch):
        policy_tokens = int(mask.sum())
        metrics["state_tokens/total"] = policy_tokens
        metrics["state_tokens/coverage"] = policy_tokens / max(int(response_length.sum()), 1)
        numbers = torch.tensor([float(n) for n in arrays[name] if n is not None])
        if name == "env/number_of_actions":
            metrics |= mean_max_min(name, numbers)
        else:
            metrics[name] = numbers.mean().item()
    return metrics


def style_metrics(scores: Tensor, reward_models: Iterable[JsonValue]) -> dict[str, float]:
    """Returns the mean score and the share of trajectories of each `reward_model.style`."""
    styles = [m.get("style") if isinstance(m, dict) else None for m in reward_models]
    is_model = torch.tensor([style == "model" for style in styles])
    metrics: dict[str, float] = {}
    for style, is_in_style in (("model", is_model), ("rule", ~is_model)):
        if is_in_style.any():
            metrics[f"reward/style_{style}/mean"] = scores[is_in_style].mean().item()
            metrics[f"reward/style_{style}/share"] = is_in_style.float().mean().item()
    return metrics


def environment_columns(batch: DataProto) -> list[str]:
    """Returns the names of numeric columns that agent loops wrote with the prefix `env/`."""
    names = [n for n in batch.meta_info.get("loop_columns", ()) if n.startswith("env/")]
    return [name for name in names if are_numbers(batch.non_tensor_batch[name])]


def are_numbers(values: Iterable[JsonValue]) -> bool:
    """Returns whether there are values besides None, and all of them are numbers that fit a float."""
    numbers = [v for v in values if v is not None]
    return bool(numbers) and all(
        abs(v) <= sys.float_info.max
        if isinstance(v, int)
        else isinstance(v, (float, np.bool_, np.number))
        for v in numbers
    )


def agreement_metrics(batch: DataProto) -> dict[str, float]:
    """Returns metrics of the difference between rollout and trainer log-probs of the same tokens."""
    if not (batch.has_column("rollout_log_probs") and batch.has_column("old_log_probs")):
        return {}
    columns = batch.batch
    mask = columns["response_mask"].bool()
    trainer_log_probs, rollout_log_probs = columns["old_log_probs"], columns["rollout_log_probs"]
    log_prob_gap = (trainer_log_probs - rollout_log_probs)[mask]
    if log_prob_gap.numel() == 0:
        return {}
    probability_gap = (trainer_log_probs.exp() - rollout_log_probs.exp())[mask].abs()
    return {
        "rollout_corr/kl": -log_prob_gap.mean().item(),
        "rollout_corr/log_prob_abs_diff_mean": log_prob_gap.abs().mean().item(),
        "rollout_corr/log_prob_abs_diff_max": log_prob_gap.abs().max().item(),
        "rollout_corr/k3_kl": (log_prob_gap.exp() - 1 - log_prob_gap).mean().item(),
        "training/rollout_probs_diff_mean": probability_gap.mean().item(),
        "training/rollout_probs_diff_max": probability_gap.max().item(),
    }


def routing_metrics(batch: DataProto, model_path: str) -> dict[str, float]:
    """Returns the load balance of the experts in each layer, over response tokens."""
    if not batch.has_column("routed_experts"):
        return {}
    from hone.models.load import load_config
    from hone.models.routing import expert_load_metrics, routing_shape

    shape = routing_shape(load_config(model_path))  # (experts, experts per token)
    if shape is None:
        return {}
    experts, prompt_width = batch.batch["routed_experts"], batch.batch["prompts"].shape[1]
    return expert_load_metrics(experts[:, prompt_width:], batch.batch["response_mask"], shape[0])


class Timers:
    """Measures the phases of a step: `with timers.timer("gen"): …`, and `drain()` once per step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Adds the elapsed seconds of the block to the timer, even if the block raises."""
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def drain(self) -> dict[str, float]:
        """Returns the seconds of each timer as metrics, and resets the timers."""
        metrics = {TIMING_PREFIX + name: seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
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


def traffic_metrics(counters: Iterable[Counter[str]]) -> dict[str, float]:
    """Returns the bytes per method since the last call and their sum; clears the counters."""
    total: Counter[str] = Counter({"weights": 0})  # reported even if it is 0
    for counter in {id(counter): counter for counter in counters}.values():
        total.update(counter)
        counter.clear()
    metrics = {
        f"traffic/{key}_bytes": float(count)
        for key, count in total.items()
        if count or key == "weights"
    }
    return metrics | {"traffic/step_bytes": float(total.total())}
