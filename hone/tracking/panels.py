"""The panels of PURE's workspace, in sections, for `hone wandb-workspace` and `hone report`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

PURE_METRIC = "high_level_scores/repeat_score/mean"
"""Only runs with `trainer.response_metrics` have this metric."""


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
    is_open: bool = True

    def metrics_among(self, names: Iterable[str]) -> list[str]:
        """Returns the metrics of a run that the section shows, in the order of its panels."""
        candidates = list(names)
        matches = (
            name
            for panel in self.panels
            for name in candidates
            if (re.search(panel.metric, name) if panel.is_pattern else name == panel.metric)
        )
        return list(dict.fromkeys(matches))


def _mean_panels(prefix: str, *names: str) -> tuple[Panel, ...]:
    return tuple(Panel(name.replace("/", " "), f"{prefix}/{name}/mean") for name in names)


_SUBSETS = ("whole", "correct", "incorrect")
SECTIONS = (
    Section(
        "Validation ACC",
        (
            Panel("MATH500", r"^val-core/.*math.?500.*/mean@\d+$", is_pattern=True, y_min=0.7),
            Panel("AIME2024", r"^val-core/.*aime.*/mean@\d+$", is_pattern=True),
            Panel("all", r"^val-core/.*/mean@\d+$", is_pattern=True),
        ),
    ),
    Section(
        "Reward & Return",
        (
            *_mean_panels("instant_rewards", "verifiable_reward", "outcome_reward", "kl"),
            Panel("sequence reward", "critic/rewards/mean"),
            Panel("return", "critic/returns/mean"),
        ),
    ),
    Section(
        "High-Level Pattern",
        (
            *_mean_panels("high_level_scores", "repeat_score", "reflection_pattern_score"),
            *(
                Panel(f"response length, {subset}", f"response_length/{subset}/mean")
                for subset in _SUBSETS
            ),
        ),
    ),
    Section(
        "Group ACC",
        tuple(
            Panel(f"{title}, {batch.partition('_')[0]}", f"group_info/{name}/{batch}/mean")
            for name, title in (("pass_at_n", "pass@n"), ("avg_n", "avg@n"))
            for batch in ("whole_batch", "retained_batch")
        ),
    ),
    Section(
        "Stability",
        (
            *(
                Panel(
                    f"responses at the length limit, {subset}",
                    f"response_length/{subset}/clip_ratio",
                )
                for subset in _SUBSETS
            ),
            *(
                Panel(
                    f"high repeatness, {subset}",
                    f"high_level_scores/high_repeatness_ratio/{subset}",
                )
                for subset in _SUBSETS
            ),
            Panel("alarms", "alarms/raised"),
        ),
    ),
    Section(
        "Misc",
        (
            Panel("seconds per step", "timing_s/step"),
            Panel("seconds of generation", "timing_s/gen"),
            Panel("seconds of the update", "timing_s/update_actor"),
            Panel("reward model agrees with rule", "instant_rewards/orm_match_vr"),
            Panel("steps per response", "num_of_steps/mean"),
            Panel("retained share", "curriculum_learning/retain_ratio"),
            Panel("runtime (h)", "_runtime", expression="${_runtime}/3600"),
        ),
    ),
    Section(
        "Loss",
        (
            Panel("policy loss", "actor/pg_loss"),
            Panel("entropy", "actor/entropy"),
            Panel("importance ratio", "actor/avg_ratio"),
        ),
        is_open=False,
    ),
)
