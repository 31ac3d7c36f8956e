"""Validation: every held-out row, the last partial batch included, and what n attempts are worth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hone.ops.at_n import best_at, majority_at, sizes, worst_at


@dataclass
class Group:
    """All attempts at one prompt."""

    source: str
    variables: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    answers: list[Hashable] = field(default_factory=list)


def validation_metrics(
    sources: list[str], uids: list[str], variables: Mapping[str, list[Any]]
) -> dict[str, float]:
    """`val-core/<source>/<variable>/…` for the core variable (acc, else reward), `val-aux/…` else."""
    groups: dict[str, Group] = {}
    predictions = variables.get("pred")
    numeric = {name: values for name, values in variables.items() if _is_numeric(values)}
    for row, (source, uid) in enumerate(zip(sources, uids, strict=True)):
        group = groups.setdefault(uid, Group(source))
        for name, values in numeric.items():
            group.variables[name].append(float(values[row]))
        if predictions is not None:
            group.answers.append(str(predictions[row]))
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(sources):
        of_source = [g for g in groups.values() if g.source == source]
        core = "acc" if "acc" in numeric else "reward"
        for name in numeric:
            statistics = _statistics([(g.variables[name], g.answers) for g in of_source])
            largest = max(len(g.variables[name]) for g in of_source)
            for statistic, value in statistics.items():
                is_core = name == core and _attempts(statistic) == largest
                prefix = "val-core" if is_core else "val-aux"
                metrics[f"{prefix}/{source}/{name}/{statistic}"] = value
    return metrics


def _statistics(groups: list[tuple[list[float], list[Hashable]]]) -> dict[str, float]:
    """Mean over prompts of each statistic over a prompt's attempts."""
    collected: dict[str, list[float]] = defaultdict(list)
    for values, answers in groups:
        n_all = len(values)
        collected[f"mean@{n_all}"].append(float(np.mean(values)))
        if n_all == 1:
            continue
        collected[f"std@{n_all}"].append(float(np.std(values)))
        for n in sizes(n_all):
            collected[f"best@{n}/mean"].append(best_at(values, n))
            collected[f"worst@{n}/mean"].append(worst_at(values, n))
            if answers:
                collected[f"maj@{n}/mean"].append(majority_at(values, answers, n))
    return {name: float(np.mean(values)) for name, values in collected.items()}


def _attempts(statistic: str) -> int:
    return int(statistic.split("@")[1].split("/")[0])


def _is_numeric(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(v, (bool, int, float, np.number)) for v in values)
