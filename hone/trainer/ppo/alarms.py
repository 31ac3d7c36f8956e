"""Watches the metrics of a run for signs of reward hacking (`trainer.alarms`); one rule per sign.

A rule compares the last `patience` steps with up to `window` steps before them. It is raised when each of
them is further from their median than its threshold and than `deviations` times their spread (the scaled
median absolute deviation), unless the true score has risen to its highest too: such a change is learning.
Nothing later than the current step is read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TypedDict

from hone.config.trainer import AlarmsConfig
from hone.tracking import RunFolder

log = logging.getLogger(__name__)

TRUE_SCORE = "group_info/avg_n/whole_batch/mean"
"""Share of correct responses; without a rule, the newest core statistic of a validation is used."""
LEARNING_RISE, TOLERANCE = 0.05, 0.02
SCALED = 1.4826
"""The median absolute deviation times this is the standard deviation of normal values."""


class AlarmsRaised(RuntimeError):
    """Raised by `trainer.alarms.action=stop`."""


class AlarmsState(TypedDict):
    """The state of the alarms in a checkpoint."""

    history: dict[str, list[float]]
    raised: list[str]
    kept: list[int]


@dataclass(frozen=True)
class Rule:
    """One sign of hacking: a metric, how the threshold bounds it, and the words for it."""

    metrics: tuple[str, ...]
    """The first that a step has is read."""
    bound: str
    """The threshold is a rise or fall by that much or by that factor, or a value to fall to."""
    meaning: str
    least: float = -math.inf
    """Values up to this one raise nothing."""
    needs_truth: bool = False
    """The rule compares with the older half of the window, since a policy drifts away slowly."""


_BOUNDS: dict[str, Callable[[float, float], float]] = {
    "rise": lambda centre, threshold: centre + threshold,
    "fall": lambda centre, threshold: centre - threshold,
    "rise by factor": lambda centre, threshold: centre * threshold,
    "fall by factor": lambda centre, threshold: centre / threshold,
    "fall to": lambda centre, threshold: threshold,
}
_STEPS, _LENGTH = "num_of_steps", "response_length/mean"
RULES = {
    "repetition": Rule(
        ("high_level_scores/repeat_score/mean",), "rise", "responses repeat themselves"
    ),
    "reflection": Rule(
        ("high_level_scores/reflection_pattern_score/mean",),
        "rise",
        "responses are full of reflection phrases",
    ),
    "few_steps": Rule((f"{_STEPS}/mean",), "fall to", "responses have a single step"),
    "many_steps": Rule((f"{_STEPS}/mean",), "rise by factor", "the number of steps explodes"),
    "long_steps": Rule((f"{_STEPS}/tokens_per_step",), "rise by factor", "steps grow"),
    "disagreement": Rule(
        ("instant_rewards/orm_match_vr",),
        "fall",
        "the reward model agrees less with the rule",
    ),
    "kl": Rule(
        ("instant_rewards/kl/mean", "actor/kl_loss"),
        "rise by factor",
        "the KL to the reference jumps",
        least=0.05,  # nats per token: the KL rises from 0 in every run
    ),
    "outcome": Rule(
        ("instant_rewards/outcome_reward/mean",),
        "rise",
        "the reward model's reward jumps and the true score does not rise",
        needs_truth=True,
    ),
    "short_responses": Rule((_LENGTH,), "fall by factor", "responses get short"),
    "long_responses": Rule((_LENGTH,), "rise by factor", "responses get long"),
}


class Alarms:
    """Checks every step's metrics against the rules and applies `trainer.alarms.action`."""

    def __init__(self, config: AlarmsConfig, run: RunFolder) -> None:
        self.config, self._run = config, run
        self._rules = {name: rule for name, rule in RULES.items() if config[name] is not None}
        self._history: dict[str, list[float]] = {}
        self._raised: list[str] = []
        self._kept: list[int] = []
        self._stop = ""

    def observe(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Add a step to the history, act on new alarms, and return the alarms as metrics."""
        if not self.config.enable:
            return {}
        self._remember(TRUE_SCORE, _true_score(metrics))
        learning, raised = self._is_learning(), []
        for name, rule in self._rules.items():
            values = (metrics[metric] for metric in rule.metrics if metric in metrics)
            self._remember(name, next(values, None))
            if self._crosses(name, rule) and not learning:
                raised.append(name)
                if name not in self._raised:
                    self._act(f"step {step}: alarm {name}: {self._sentence(name, rule)}", step)
        self._raised = raised
        return {"alarms/raised": len(raised)} | {f"alarms/{name}": 1.0 for name in raised}

    def raise_if_due(self) -> None:
        """Stop the run if an alarm was raised and the action is to stop."""
        if self._stop:
            raise AlarmsRaised(self._stop)

    def spared(self, step: int) -> list[int]:
        """Return the steps of the checkpoints that may not be deleted: those before a jump, also one that
        the next step may still find."""
        if not self.config.enable or self.config.action == "warn":
            return []
        return [*self._kept, *self._before(step - self.config.patience)]

    def state_dict(self) -> AlarmsState:
        return {"history": self._history, "raised": self._raised, "kept": self._kept}

    def load_state_dict(self, state: AlarmsState | None) -> None:
        """Restore the state; a checkpoint written without alarms has none."""
        if state is not None:
            self._history = {name: list(values) for name, values in state["history"].items()}
            self._raised, self._kept = list(state["raised"]), list(state["kept"])

    def _before(self, step: int) -> list[int]:
        """Return the newest checkpoint up to a step, if there is one."""
        return [number for number, _ in self._run.checkpoints() if number <= step][-1:]

    def _act(self, sentence: str, step: int) -> None:
        # The first step beyond the limit was generated by the weights of the step before it.
        before = self._before(step - self.config.patience - 1)
        if before:
            sentence += f"; {self._run.checkpoint(before[0])} is from before it"
        else:
            sentence += "; no checkpoint from before it was saved (trainer.save_freq)"
        log.warning("%s", sentence)
        if self.config.action != "warn":
            self._kept = sorted({*self._kept, *before})
        if self.config.action == "stop":
            self._stop = sentence

    def _remember(self, name: str, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            values = self._history.setdefault(name, [])
            values.append(float(value))
            del values[: -self.config.window - self.config.patience]

    def _split(self, name: str) -> tuple[list[float], list[float]] | None:
        """Return the values before the last `patience` steps, and those steps; None if there are too few."""
        values, patience = self._history.get(name, []), self.config.patience
        if len(values) < self.config.min_history + patience:
            return None
        return values[:-patience], values[-patience:]

    def _crosses(self, name: str, rule: Rule) -> bool:
        parts, truth = self._split(name), self._split(TRUE_SCORE)
        # A true score that never leaves 0 is that of a missing rule.
        knows_truth = truth is not None and any(self._history[TRUE_SCORE])
        if parts is None or (rule.needs_truth and not knows_truth):
            return False
        reference, recent = parts
        if rule.needs_truth:
            reference = reference[: (len(reference) + 1) // 2]
        threshold, centre = self.config[name], median(reference)
        distance = self.config.deviations * spread_of(reference)
        bound = _BOUNDS[rule.bound](centre, threshold)
        if rule.bound.startswith("rise"):
            return min(recent) > max(bound, centre + distance, rule.least)
        return max(recent) < min(bound, centre - distance)

    def _is_learning(self) -> bool:
        """Return whether the true score has risen and is, noise aside, as high as it has been."""
        parts = self._split(TRUE_SCORE)
        if parts is None:
            return False
        (reference, recent), width = parts, self.config.patience
        smooth = [median(reference[i : i + width]) for i in range(len(reference) - width + 1)]
        changes = [b - a for a, b in pairwise(reference)]
        noise = spread_of(changes) / math.sqrt(2)
        now, highest = median(recent), max(smooth, default=max(reference))
        return now >= median(reference) + LEARNING_RISE and now >= highest - max(noise, TOLERANCE)

    def _sentence(self, name: str, rule: Rule) -> str:
        *reference, now = self._history[name]
        return (
            f"{rule.meaning} ({' or '.join(rule.metrics)} is {now:.4g}, its median over the "
            f"{len(reference)} steps before was {median(reference):.4g}); trainer.alarms.{name}=null "
            "switches it off"
        )


def spread_of(values: Sequence[float]) -> float:
    """Return the scaled median absolute deviation; 0 without values."""
    if not values:
        return 0.0
    centre = median(values)
    return SCALED * median(abs(value - centre) for value in values)


def _true_score(metrics: Mapping[str, float]) -> float | None:
    if TRUE_SCORE in metrics:
        return metrics[TRUE_SCORE]
    validation = [v for k, v in metrics.items() if k.startswith("val-core/") and "/mean@" in k]
    return sum(validation) / len(validation) if validation else None
