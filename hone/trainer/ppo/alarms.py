"""Watches the metrics of a run for signs of reward hacking (`trainer.alarms`); one rule per sign.

A rule compares the last `patience` steps with the reference, which is up to `window` earlier steps. An alarm
is raised if each of the last steps differs from the reference's median by more than the threshold, and by
more than `deviations` times the reference's scaled median absolute deviation. No alarm is raised if the true
score has risen to its highest value, since the policy is then learning.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from hone.config.trainer import AlarmsConfig
from hone.errors import UserError
from hone.tracking import RunFolder
from hone.trainer.ppo.credit import GROUPS_WITHOUT_SIGNAL
from hone.trainer.ppo.metrics import DISTINCT_ANSWERS
from hone.types import Settings

log = logging.getLogger(__name__)

TRUE_SCORE_METRIC = "group_info/avg_n/whole_batch/mean"
"""The share of correct responses. In a step without this metric, the validation score replaces it."""
MIN_LEARNING_RISE = 0.05
"""The smallest rise of the true score that counts as learning."""
SCORE_TOLERANCE = 0.02
"""A learning policy's true score is at most this far below its highest value."""
MAX_CONSTANT_ANSWERS, CONSTANT_STEPS_TO_WARN = 0.1, 3
"""Answers are constant if so many consecutive steps have at most this share of distinct answers."""
MAD_SCALE = 1.4826
"""The standard deviation of a normal distribution divided by its median absolute deviation."""


class AlarmsRaised(UserError, RuntimeError):
    """Raised after an alarm if `trainer.alarms.action=stop`."""


@dataclass(frozen=True)
class Rule:
    """One sign of reward hacking: a metric, the kind of bound, and a description."""

    description: str
    bound_name: str
    """A key of `_BOUNDS`: how the bound follows from the median and the threshold."""
    metrics: tuple[str, ...]
    """Alternative names of the metric; the first that a step has is read."""
    min_value: float = -math.inf
    """An alarm needs a value above this minimum."""
    needs_true_score: bool = False
    """Whether the rule applies only if the true score is known. Such a rule compares with the older half of
    the reference, since the metric drifts slowly."""


_BOUNDS: dict[str, Callable[[float, float], float]] = {
    "rise": lambda centre, threshold: centre + threshold,
    "fall": lambda centre, threshold: centre - threshold,
    "rise by factor": lambda centre, threshold: centre * threshold,
    "fall by factor": lambda centre, threshold: centre / threshold,
    "fall to": lambda centre, threshold: threshold,
}
RULES = {
    "repetition": Rule(
        "responses repeat themselves", "rise", ("high_level_scores/repeat_score/mean",)
    ),
    "reflection": Rule(
        "responses are full of reflection phrases",
        "rise",
        ("high_level_scores/reflection_pattern_score/mean",),
    ),
    "few_steps": Rule("responses have a single step", "fall to", ("num_of_steps/mean",)),
    "many_steps": Rule("the number of steps explodes", "rise by factor", ("num_of_steps/mean",)),
    "long_steps": Rule("steps grow", "rise by factor", ("num_of_steps/tokens_per_step",)),
    "disagreement": Rule(
        "the reward model agrees less with the rule", "fall", ("instant_rewards/orm_match_vr",)
    ),
    "kl": Rule(
        "the KL to the reference jumps",
        "rise by factor",
        ("instant_rewards/kl/mean", "actor/kl_loss"),
        min_value=0.05,  # nats per token: the KL rises from 0 in every run
    ),
    "outcome": Rule(
        "the reward model's reward jumps and the true score does not rise",
        "rise",
        ("instant_rewards/outcome_reward/mean",),
        needs_true_score=True,
    ),
    "short_responses": Rule("responses get short", "fall by factor", ("response_length/mean",)),
    "long_responses": Rule("responses get long", "rise by factor", ("response_length/mean",)),
}


class Alarms:
    """Checks every step's metrics against the rules and applies `trainer.alarms.action`."""

    def __init__(self, config: AlarmsConfig, run: RunFolder) -> None:
        self.config, self._run = config, run
        self._rules = {name: rule for name, rule in RULES.items() if config[name] is not None}
        self._history: dict[str, list[float]] = {}
        self._raised_alarms: list[str] = []
        self._protected_steps: list[int] = []
        self._stop_message = ""

    def observe(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Adds a step to the history, applies the action to new alarms, and returns the alarms as metrics."""
        if not self.config.enable:
            return {}
        self._record(TRUE_SCORE_METRIC, _true_score(metrics))
        is_learning, alarm_names = self._is_learning(), []
        for name, rule in self._rules.items():
            value = next((metrics[key] for key in rule.metrics if key in metrics), None)
            self._record(name, value)
            if self._is_raised(name, rule) and not is_learning:
                alarm_names.append(name)
                if name not in self._raised_alarms:
                    self._apply_action(name, rule, step)
        self._raised_alarms = alarm_names
        return {"alarms/raised": len(alarm_names)} | {f"alarms/{name}": 1.0 for name in alarm_names}

    def raise_if_stopped(self) -> None:
        """Raises an error if an alarm was raised and the action is `stop`."""
        if self._stop_message:
            raise AlarmsRaised(self._stop_message)

    def protected_steps(self, step: int) -> list[int]:
        """Returns the steps whose checkpoints must not be deleted.

        An alarm protects the last checkpoint from before its `patience` steps. An alarm at the next step
        protects the newest of `old_steps`; a later alarm may protect the first checkpoint after `old_steps`.
        """
        if not self.config.enable or self.config.action == "warn":
            return []
        steps = [number for number, _ in self._run.checkpoints()]
        old_steps = [number for number in steps if number <= step - self.config.patience]
        return [*self._protected_steps, *old_steps[-1:], *steps[len(old_steps) :][:1]]

    def state_dict(self) -> Settings:
        raised, protected_steps = self._raised_alarms, self._protected_steps
        return {"history": self._history, "raised": raised, "kept": protected_steps}

    def load_state_dict(self, state: Settings | None) -> None:
        """Restores the state, which is None in a checkpoint that was written without alarms."""
        if state is not None:
            self._history = {name: list(values) for name, values in state["history"].items()}
            self._raised_alarms, self._protected_steps = list(state["raised"]), list(state["kept"])

    def _apply_action(self, name: str, rule: Rule, step: int) -> None:
        *reference, current = self._history[name]
        message = (
            f"step {step}: alarm {name}: {rule.description} ({' or '.join(rule.metrics)} is {current:.4g}, "
            f"its median over the {len(reference)} steps before was {median(reference):.4g}); "
            f"trainer.alarms.{name}=null switches it off"
        )
        # The weights of step N wrote the responses of step N + 1, so the step before the signs counts too.
        last_good_step = step - self.config.patience - 1
        earlier_steps = [n for n, _ in self._run.checkpoints() if n <= last_good_step][-1:]
        if earlier_steps:
            message += f"; {self._run.checkpoint(earlier_steps[0])} is from before it"
        else:
            message += "; no checkpoint from before it was saved (trainer.save_freq)"
        log.warning("%s", message)
        if self.config.action != "warn":
            self._protected_steps = sorted({*self._protected_steps, *earlier_steps})
        if self.config.action == "stop":
            self._stop_message = message

    def _record(self, name: str, value: float | None) -> None:
        """Adds a finite value to the history, which has at most `window + patience` values."""
        if value is not None and math.isfinite(value):
            values = self._history.setdefault(name, [])
            values.append(float(value))
            del values[: -self.config.window - self.config.patience]

    def _reference_and_recent(self, name: str) -> tuple[list[float], list[float]] | None:
        """Returns the reference and the last `patience` values of a metric; None if there are too few."""
        values, patience = self._history.get(name, []), self.config.patience
        if len(values) < self.config.min_history + patience:
            return None
        return values[:-patience], values[-patience:]

    def _is_raised(self, name: str, rule: Rule) -> bool:
        """Returns whether all recent values are beyond the bound and the noise of the reference."""
        values = self._reference_and_recent(name)
        true_scores = self._reference_and_recent(TRUE_SCORE_METRIC)
        # A true score that is always 0 means that the data have no rule.
        has_true_score = true_scores is not None and any(self._history[TRUE_SCORE_METRIC])
        if values is None or (rule.needs_true_score and not has_true_score):
            return False
        reference, recent_values = values
        if rule.needs_true_score:
            reference = reference[: (len(reference) + 1) // 2]
        threshold, centre = self.config[name], median(reference)
        noise_distance = self.config.deviations * scaled_mad(reference)
        bound = _BOUNDS[rule.bound_name](centre, threshold)
        if rule.bound_name.startswith("rise"):
            return min(recent_values) > max(bound, centre + noise_distance, rule.min_value)
        return max(recent_values) < min(bound, centre - noise_distance)

    def _is_learning(self) -> bool:
        """Returns whether the true score has risen and is, within its noise, at its highest value."""
        values = self._reference_and_recent(TRUE_SCORE_METRIC)
        if values is None:
            return False
        (reference, recent_values), patience = values, self.config.patience
        num_windows = len(reference) - patience + 1
        smoothed_scores = [median(reference[i : i + patience]) for i in range(num_windows)]
        highest_score = max(smoothed_scores, default=max(reference))
        noise = scaled_mad([b - a for a, b in pairwise(reference)]) / math.sqrt(2)
        current_score = median(recent_values)
        has_risen = current_score >= median(reference) + MIN_LEARNING_RISE
        return has_risen and current_score >= highest_score - max(noise, SCORE_TOLERANCE)


class StepWarnings:
    """Warns of skipped updates, of batches in which all responses of each group have the same score, and of a
    reward that rises while the answers to different prompts become the same.

    Of consecutive batches without a difference of scores, or of answers, only the first is reported.
    """

    def __init__(self, *, is_group_relative: bool) -> None:
        self._is_group_relative = is_group_relative
        self._had_no_signal = False
        self._first_score: float | None = None
        self._num_constant_steps = 0
        self._skipped_counts: dict[str, float] = {}

    def observe(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs a warning for each problem that the metrics of a step show."""
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
        self._observe_answers(metrics, step)
        if GROUPS_WITHOUT_SIGNAL not in metrics:
            return
        has_no_signal = metrics[GROUPS_WITHOUT_SIGNAL] == 1.0
        if has_no_signal and not self._had_no_signal and self._is_group_relative:
            log.warning(
                "step %d: in each group all responses have the same score, so the step teaches "
                "nothing; use prompts that are neither too easy nor too hard, a score with more "
                "levels, more responses per prompt (actor_rollout_ref.rollout.n), or "
                "algorithm.filter_groups.enable=true",
                step,
            )
        self._had_no_signal = has_no_signal

    def _observe_answers(self, metrics: Mapping[str, float], step: int) -> None:
        if DISTINCT_ANSWERS not in metrics:
            return
        score = metrics["critic/score/mean"]
        self._first_score = score if self._first_score is None else self._first_score
        is_rising = score >= self._first_score + MIN_LEARNING_RISE
        is_constant = is_rising and metrics[DISTINCT_ANSWERS] <= MAX_CONSTANT_ANSWERS
        self._num_constant_steps = self._num_constant_steps + 1 if is_constant else 0
        if self._num_constant_steps == CONSTANT_STEPS_TO_WARN:
            log.warning(
                "step %d: the mean score has risen from %.3g to %.3g while almost all prompts get the same "
                "answer (%s is %.2g), so the policy may have learned what pays and not the task; read the "
                "responses (hone report) and pay less for what a fixed answer earns",
                *(step, self._first_score, score, DISTINCT_ANSWERS, metrics[DISTINCT_ANSWERS]),
            )


def scaled_mad(values: Sequence[float]) -> float:
    """Returns the scaled median absolute deviation; 0 without values."""
    if not values:
        return 0.0
    centre = median(values)
    return MAD_SCALE * median(abs(value - centre) for value in values)


def _true_score(metrics: Mapping[str, float]) -> float | None:
    """Returns the share of correct responses, or else the mean validation score, if the step has one."""
    if TRUE_SCORE_METRIC in metrics:
        return metrics[TRUE_SCORE_METRIC]
    names = [name for name in metrics if name.startswith("val-core/") and "/mean@" in name]
    return sum(metrics[name] for name in names) / len(names) if names else None
