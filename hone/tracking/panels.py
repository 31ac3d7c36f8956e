"""The panels of PURE's workspace, in sections, for `hone wandb-workspace` and `hone report`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

PURE_METRIC = "high_level_scores/repeat_score/mean"
"""A metric that is present only in runs with `trainer.response_metrics`."""


@dataclass(frozen=True)
class Panel:
    """One chart of one metric, or of all metrics that match a pattern."""

    title: str
    metric: str
    is_pattern: bool = False
    """Whether `metric` is a regular expression, in the RE2 syntax of the tracker's server."""
    y_min: float | None = None
    """The lowest value of the y axis; None fits the axis to the data."""
    expression: str | None = None
    """The expression that a tracker draws instead of the metric."""


@dataclass(frozen=True)
class Section:
    name: str
    panels: tuple[Panel, ...]
    is_open: bool

    def metrics_among(self, names: Iterable[str]) -> list[str]:
        """Returns the metrics of a run that the section shows, in the order of its panels."""
        names = list(names)
        metrics: list[str] = []
        for panel in self.panels:
            pattern = panel.metric if panel.is_pattern else f"^{re.escape(panel.metric)}$"
            metrics += [name for name in names if re.search(pattern, name)]
        return list(dict.fromkeys(metrics))


def _mean_panels(prefix: str, *names: str) -> tuple[Panel, ...]:
    return tuple(Panel(name.replace("/", " "), f"{prefix}/{name}/mean") for name in names)


def _panels_of_subsets(title: str, metric: str) -> tuple[Panel, ...]:
    """Returns a panel for all responses, for the correct ones and for the incorrect ones."""
    subsets = ("whole", "correct", "incorrect")
    return tuple(Panel(f"{title}, {subset}", metric.format(subset)) for subset in subsets)


_PANELS: dict[str, tuple[Panel, ...]] = {
    "Validation ACC": (
        Panel("MATH500", r"^val-core/.*math.?500.*/mean@\d+$", is_pattern=True, y_min=0.7),
        Panel("AIME2024", r"^val-core/.*aime.*/mean@\d+$", is_pattern=True),
        Panel("all", r"^val-core/.*/mean@\d+$", is_pattern=True),
    ),
    "Reward & Return": (
        *_mean_panels("instant_rewards", "verifiable_reward", "outcome_reward", "kl"),
        Panel("sequence reward", "critic/rewards/mean"),
        Panel("return", "critic/returns/mean"),
    ),
    "High-Level Pattern": (
        *_mean_panels("high_level_scores", "repeat_score", "reflection_pattern_score"),
        *_panels_of_subsets("response length", "response_length/{}/mean"),
    ),
    "Group ACC": (
        Panel("pass@n, whole", "group_info/pass_at_n/whole_batch/mean"),
        Panel("pass@n, retained", "group_info/pass_at_n/retained_batch/mean"),
        Panel("avg@n, whole", "group_info/avg_n/whole_batch/mean"),
        Panel("avg@n, retained", "group_info/avg_n/retained_batch/mean"),
    ),
    "Stability": (
        *_panels_of_subsets("responses at the length limit", "response_length/{}/clip_ratio"),
        *_panels_of_subsets("high repeatness", "high_level_scores/high_repeatness_ratio/{}"),
        Panel("alarms", "alarms/raised"),
    ),
    "Misc": (
        Panel("seconds per step", "timing_s/step"),
        Panel("seconds of generation", "timing_s/gen"),
        Panel("seconds of the update", "timing_s/update_actor"),
        Panel("reward model agrees with rule", "instant_rewards/orm_match_vr"),
        Panel("steps per response", "num_of_steps/mean"),
        Panel("retained share", "curriculum_learning/retain_ratio"),
        Panel("runtime (h)", "_runtime", expression="${_runtime}/3600"),
    ),
    "Loss": (
        Panel("policy loss", "actor/pg_loss"),
        Panel("entropy", "actor/entropy"),
        Panel("importance ratio", "actor/avg_ratio"),
    ),
}
SECTIONS = tuple(Section(name, panels, name != "Loss") for name, panels in _PANELS.items())
