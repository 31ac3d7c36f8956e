"""Provides verl's `metric_utils` and `utils.metric`, with verl's names and arguments.

The training loop uses credit.py and metrics.py instead. validation.py computes best@n and maj@n exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from hone.ops.rows import masked_mean, masked_sum
from hone.protocol import DataProto
from hone.trainer.ppo.credit import data_metrics, split_attention_mask
from hone.trainer.ppo.metrics import time_per_token
from hone.trainer.ppo.validation import process_validation_metrics
from hone.types import Fields, Row

__all__ = ["process_validation_metrics"]

Number: TypeAlias = int | float | Tensor | np.ndarray

T = TypeVar("T")


class AggregationType(Enum):
    """How the values of a metric are reduced to one number."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


class Metric:
    """The values of a metric and their reduction over micro-batches and ranks."""

    def __init__(
        self, aggregation: str | AggregationType, value: Number | Sequence[Number] | None = None
    ) -> None:
        self.aggregation = AggregationType(aggregation)
        self.values: list[int | float] = []
        if isinstance(value, Sequence):
            self.extend(value)
        elif value is not None:
            self.append(value)

    def append(self, value: Number | Metric) -> None:
        if isinstance(value, Metric):
            self.extend(value)
        elif isinstance(value, Tensor | np.ndarray):
            if np.prod(value.shape, dtype=int) != 1:
                raise ValueError(f"a metric takes one number at a time, not shape {value.shape}")
            self.values.append(value.item())
        else:
            self.values.append(value)

    def extend(self, values: Metric | Iterable[Number]) -> None:
        if isinstance(values, Metric):
            if values.aggregation is not self.aggregation:
                raise ValueError(
                    f"{values.aggregation} values cannot join {self.aggregation} values"
                )
            values = values.values
        for value in values:
            self.append(value)

    def aggregate(self) -> float:
        return float(getattr(np, self.aggregation.value)(self.values))

    @classmethod
    def aggregate_dp(cls, metric_lists: Sequence[Metric]) -> float:
        """Reduces over ranks; SUM and MEAN first average each value over the ranks."""
        kind = metric_lists[0].aggregation
        if len({len(metric.values) for metric in metric_lists}) != 1:
            raise ValueError("the ranks have different numbers of values")
        values = np.array([metric.values for metric in metric_lists])
        if kind in (AggregationType.SUM, AggregationType.MEAN):
            values = values.mean(axis=0)
        return float(getattr(np, kind.value)(values))

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Number], aggregation: str | AggregationType
    ) -> dict[str, Metric]:
        return {name: cls(aggregation, value) for name, value in data.items()}

    def init_list(self) -> Metric:
        """Returns a metric without values, with the same reduction."""
        return Metric(self.aggregation)


def reduce_metrics(metrics: Fields) -> dict[str, float]:
    """Reduces lists to numbers in place: the maximum if the name contains `max`, the minimum for `min`,
    else the mean; NaN for an empty list. A `Metric` has its own reduction.
    """
    for name, values in metrics.items():
        if isinstance(values, Metric):
            metrics[name] = values.aggregate()
            continue
        numbers = np.asarray(values, dtype=np.float64)
        reduction = next((kind for kind in ("max", "min") if kind in name), "mean")
        metrics[name] = float(getattr(np, reduction)(numbers)) if numbers.size else float("nan")
    return metrics


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Returns metrics of scores, rewards, advantages and lengths, and of values if `use_critic`."""
    widths = [part.shape[1] for part in split_attention_mask(batch)]
    metrics = data_metrics(batch, max_prompt_length=widths[0], max_response_length=widths[1])
    critic_prefixes = ("critic/values/", "critic/vf_explained_var")
    if use_critic:
        return metrics
    return {k: v for k, v in metrics.items() if not k.startswith(critic_prefixes)}


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Returns seconds per phase, and milliseconds per token for phases that process tokens."""
    generated, total = split_attention_mask(batch)[1].sum(), batch.batch["attention_mask"].sum()
    tokens = {"generated_tokens": float(generated), "total_tokens": float(total)}
    per_token = time_per_token(timing_raw, **tokens)
    return {f"timing_s/{phase}": seconds for phase, seconds in timing_raw.items()} | per_token


def compute_throughout_metrics(
    batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int
) -> dict[str, float]:
    """Returns the tokens and seconds of a step, and tokens per second per device."""
    tokens, seconds = sum(batch.meta_info["global_token_num"]), timing_raw["step"]
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / (seconds * n_gpus),
    }


def compute_variance_proxy_metrics(
    batch: DataProto, gradient_norm: float | None = None
) -> dict[str, float]:
    """Returns estimates of the policy gradient's signal and noise; empty without `sum_pi_squared`.

    The squared norm of a response's gradient is estimated as the squared mean advantage times a sum over the
    tokens of 1 - 2 pi + sum_pi_squared, where pi is the probability of the token.
    """
    columns = batch.batch
    if not {"sum_pi_squared", "old_log_probs", "advantages"} <= set(columns.keys()):
        return {}
    mask = columns["response_mask"]
    token_norms = 1 - 2 * columns["old_log_probs"].exp() + columns["sum_pi_squared"]  # [B, T]
    squared_advantages = masked_mean(columns["advantages"], mask, -1) ** 2
    weighted_norms, mean_weights = token_norms, torch.ones_like(squared_advantages)
    if "rollout_is_weights" in columns:
        importance_weights = columns["rollout_is_weights"]
        token_norms = token_norms * (importance_weights > 0)  # a rejected token has no gradient
        weighted_norms = token_norms * importance_weights**2
        mean_weights = masked_mean(importance_weights, mask, -1)
    power = mean_weights**2 * squared_advantages * masked_sum(token_norms, mask, -1).clamp(min=0)
    total = float(power.mean())
    signal = 0.0 if gradient_norm is None else gradient_norm**2
    has_noise = gradient_norm is not None and len(batch) > 1
    noise = max(0.0, (total - signal) / (len(batch) - 1)) if has_noise else 0.0
    return {
        "variance_proxy/proxy1_signal_strength": signal,
        "variance_proxy/proxy2_total_power": total,
        "variance_proxy/proxy3_pure_noise": noise,
        "variance_proxy/expected_a_squared": float(squared_advantages.mean()),
        "variance_proxy/expected_w": float(masked_sum(weighted_norms, mask, -1).mean()),
    }


def bootstrap_metric(
    data: Sequence[T],
    subset_size: int,
    reduce_fns: Sequence[Callable[[list[T]], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Returns mean and standard deviation of each reduction over bootstrap subsets."""
    rng = np.random.default_rng(seed)
    index_subsets = rng.integers(len(data), size=(n_bootstrap, subset_size))
    subsets = [[data[index] for index in indices] for indices in index_subsets]
    results = [[reduce(subset) for subset in subsets] for reduce in reduce_fns]
    return [(float(np.mean(values)), float(np.std(values))) for values in results]


def calc_maj_val(data: Sequence[Row], vote_key: str, val_key: str) -> float:
    """Returns the first value of the most frequent answer; ties go to the earliest answer."""
    winner = Counter(row[vote_key] for row in data).most_common(1)[0][0]
    return float(next(row[val_key] for row in data if row[vote_key] == winner))
