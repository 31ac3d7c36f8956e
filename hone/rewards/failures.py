"""The results of scoring a row, and the policy for rows that fail.

Failures are counted by reason, a short word that becomes part of a metric name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hone.types import JsonObject

if TYPE_CHECKING:
    from hone.config.reward import RewardKwargs

POLICIES = ("raise", "score")
NO_GROUND_TRUTH = "no_ground_truth"
"""The reason of a row without the ground truth that its rule needs."""


class SetupError(Exception):
    """The setup is wrong (a scorer, an option, the sandbox); no failure policy suppresses this error."""


class WrongSetting(SetupError, ValueError):
    """A reward setting is invalid."""


class RewardError(RuntimeError):
    """A row could not be scored, and the failure policy is `raise`."""


@dataclass(frozen=True)
class FailurePolicy:
    """The policy for failed rows."""

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


@dataclass(frozen=True)
class Scored:
    """The score of a row, the scorer's other values, and the problems that did not stop it."""

    score: float
    extras: JsonObject = field(default_factory=dict)
    mishaps: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """A row without a score: `reason` names the counter, `detail` explains the failure in the log."""

    reason: str
    detail: str
    error_classes: tuple[str, ...] = ()
    """The class names of an exception and of its bases."""
