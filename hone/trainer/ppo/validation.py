"""Generates the responses of validation, and computes metrics over n responses (attempts) per prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import SupportsFloat

import numpy as np
import torch

from hone.agents.collate import last_row_values, trajectory_totals
from hone.agents.joining import pad_and_concat
from hone.ops import at_n
from hone.protocol import DataProto
from hone.rewards.scorer import vote_of
from hone.tracking.console import Bar
from hone.trainer.ppo.source import are_numbers, env_metric_columns, mean_max_min
from hone.types import JsonValue


def run_validation(
    prompts: Iterable[Mapping[str, np.ndarray]],
    generate: Callable[[Mapping[str, np.ndarray]], DataProto],
    samples: int,
    bar: Bar,
) -> tuple[dict[str, float], DataProto]:
    """Generates and scores every batch of prompts; returns the metrics and all trajectories."""
    sources: list[str] = []
    uids: list[str] = []
    turn_counts: list[float] = []
    variables: dict[str, list[JsonValue]] = {}
    batches = []
    for prompt_batch in prompts:
        batch = generate(prompt_batch)
        arrays = batch.non_tensor_batch
        names = [*batch.meta_info["reward_extra_names"], *env_metric_columns(batch)]
        values = {name: list(last_row_values(batch, arrays[name])) for name in names}
        scores = batch.batch["token_level_scores"].sum(-1)
        values["reward"] = trajectory_totals(batch, scores).tolist()
        batch_uids = list(last_row_values(batch, arrays["uid"]))
        for name in {*variables, *values}:  # a missing value is None
            column = variables.setdefault(name, [None] * len(uids))
            column += values.get(name, [None] * len(batch_uids))
        sources += list(last_row_values(batch, arrays["data_source"]))
        uids += batch_uids
        turn_counts += [float(n) for n in arrays.get("num_turns", ()) if n is not None]
        batches.append(batch)
        bar.advance(len(batch_uids) // samples)
    metrics = validation_metrics(sources, uids, variables)
    metrics |= mean_max_min("val-aux/num_turns", torch.tensor(turn_counts))
    return metrics, pad_and_concat(batches)


@dataclass
class Group:
    """All attempts at one prompt."""

    source: str
    variables: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The value of each attempt, by variable; attempts without a value are left out."""
    answers: list[Hashable | None] = field(default_factory=list)
    """The answer of each attempt, for majority votes."""


def validation_metrics(
    sources: Sequence[str], uids: Sequence[str], variables: Mapping[str, Sequence[JsonValue]]
) -> dict[str, float]:
    """Returns metrics named `val-core/<source>/<variable>/<statistic>` or `val-aux/…`.

    Core metrics are mean, best and majority over all attempts of the core variable (acc, else reward).
    """
    metrics: dict[str, float] = {}
    for source, source_metrics in process_validation_metrics(sources, uids, variables).items():
        core_variable = "acc" if "acc" in source_metrics else "reward"
        for name, statistics in source_metrics.items():
            # A statistic is named like mean@8 or best@4/std; core statistics have the most attempts.
            attempts = [int(statistic.split("@")[1].split("/")[0]) for statistic in statistics]
            core_prefixes = [f"{kind}@{max(attempts)}" for kind in ("mean", "best", "maj")]
            for statistic, value in statistics.items():
                is_core_statistic = statistic.split("/")[0] in core_prefixes
                is_core = name == core_variable and is_core_statistic
                prefix = "val-core" if is_core else "val-aux"
                metrics[f"{prefix}/{source}/{name}/{statistic}"] = value
    return metrics


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[JsonValue]],
    seed: int = 42,
    expected_acc_counts: Mapping[tuple[str, str], int] | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns values by source, variable and statistic, for numeric variables.

    Name and arguments are verl's. `seed` is unused: best@n, worst@n and maj@n are computed exactly, not by
    bootstrap. `expected_acc_counts` is the number of attempts by (source, uid); missing attempts count as
    wrong in `acc`.
    """
    groups: dict[tuple[str, str], Group] = {}
    predictions = infos_dict.get("pred")
    numeric_names = sorted(name for name, values in infos_dict.items() if are_numbers(values))
    for row, (source, uid) in enumerate(zip(data_sources, sample_uids, strict=True)):
        group = groups.setdefault((source, uid), Group(source))
        for name in numeric_names:
            if isinstance(value := infos_dict[name][row], SupportsFloat):
                group.variables[name].append(float(value))
        if predictions is not None:
            group.answers.append(vote_of(predictions[row]))
    sources_with_acc = {group.source for group in groups.values() if group.variables.get("acc")}
    for (source, uid), count in (expected_acc_counts or {}).items():
        if source in sources_with_acc:
            variables = groups.setdefault((source, uid), Group(source)).variables
            variables["acc_success_only"] = list(variables["acc"])
            variables["acc"] += [0.0] * (count - len(variables["acc"]))
    result: dict[str, dict[str, dict[str, float]]] = {}
    for source in dict.fromkeys(data_sources):
        source_groups = [group for group in groups.values() if group.source == source]
        result[source] = {}
        for name in sorted(set().union(*(group.variables for group in source_groups))):
            attempts = max(len(group.variables[name]) for group in source_groups)
            pairs = [(group.variables[name], group.answers) for group in source_groups]
            result[source][name] = _statistics([pair for pair in pairs if pair[0]], attempts)
    return result


def _statistics(
    groups: Sequence[tuple[list[float], list[Hashable | None]]], attempts: int
) -> dict[str, float]:
    """Returns the mean over prompts of each statistic; `groups` has the values and answers of each prompt.

    A prompt with missing values (the score function failed) counts only in `mean@n`.
    """
    prompt_values: dict[str, list[float]] = defaultdict(list)
    for values, answers in groups:
        prompt_values[f"mean@{attempts}"].append(float(np.mean(values)))
        if attempts == 1 or len(values) < attempts:
            continue
        prompt_values[f"std@{attempts}"].append(float(np.std(values)))
        for n in at_n.attempt_counts(attempts):
            prompt_values[f"best@{n}/mean"].append(at_n.best_at(values, n))
            prompt_values[f"best@{n}/std"].append(at_n.best_std_at(values, n))
            prompt_values[f"worst@{n}/mean"].append(at_n.worst_at(values, n))
            prompt_values[f"worst@{n}/std"].append(at_n.worst_std_at(values, n))
            if len(answers) == len(values):
                prompt_values[f"maj@{n}/mean"].append(at_n.majority_at(values, answers, n))
                prompt_values[f"maj@{n}/std"].append(at_n.majority_std_at(values, answers, n))
    return {name: float(np.mean(values)) for name, values in prompt_values.items()}
