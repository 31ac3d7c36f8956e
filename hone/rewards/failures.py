"""The outcomes of scoring a row (`Scored` or `Failed`), and the policy for failed rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hone.errors import UserError
from hone.types import JsonObject

if TYPE_CHECKING:
    from hone.config.reward import RewardKwargs

MAX_TIMEOUT_S = 1e6
"""Replaces a longer limit, such as infinity, which the timers of the system do not take."""
POLICIES = ("raise", "score")
NO_GROUND_TRUTH = "no_ground_truth"
"""The failure reason of a row that lacks a required ground truth."""


class SetupError(UserError):
    """The scorer, an option or the sandbox is unusable; this error stops the run under every policy."""


class WrongSetting(SetupError, ValueError):
    """A reward setting is invalid."""


class RewardError(UserError, RuntimeError):
    """A row could not be scored, and the failure policy is `raise`."""


@dataclass(frozen=True)
class FailurePolicy:
    """The policy for failed rows: `raise` stops the run, `score` gives the row `failure_score`."""

    on_failure: str
    failure_score: float
    timeout_s: float

    @classmethod
    def of(cls, kwargs: RewardKwargs) -> FailurePolicy:
        """Returns the policy of `reward_model.reward_kwargs`."""
        return cls(kwargs.on_failure, kwargs.failure_score, kwargs.timeout_s)

    def __post_init__(self) -> None:
        if self.on_failure not in POLICIES:
            raise WrongSetting(
                f"reward_model.reward_kwargs.on_failure={self.on_failure!r} is not known; "
                "use 'raise' or 'score'"
            )
        if not self.timeout_s > 0:
            raise WrongSetting(
                f"reward_model.reward_kwargs.timeout_s={self.timeout_s} must be positive"
            )
        object.__setattr__(self, "timeout_s", min(self.timeout_s, MAX_TIMEOUT_S))


@dataclass(frozen=True)
class Scored:
    """The score of a row, the other values of the scorer, and the counts of mishaps by reason."""

    score: float
    extras: JsonObject = field(default_factory=dict)
    mishaps: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """A row without a score: `reason` is a part of a metric name, `detail` is a text for the log."""

    reason: str
    detail: str
    error_classes: tuple[str, ...] = ()
    """The names of the classes of an exception, from its own class to its last base."""
