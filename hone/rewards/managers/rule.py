"""Reward managers by rule: their interface, the base class of the built-in ones, and the default, `naive`.

A user's manager subclasses `AbstractRewardManager` and implements `__call__`. A built-in manager
implements `score_rows` and may override `shape_rewards`. The base class reads rows, applies the
failure policy and puts scores on tokens.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hone.config.reward import RewardKwargs
from hone.event_loop import run_coroutine
from hone.protocol import DataProto
from hone.rewards.answers import is_missing
from hone.rewards.calling import (
    ROW_ARGUMENTS,
    DeadlineExceeded,
    accepted_arguments,
    await_scorer,
    call_with_deadline,
    check_signature,
    counted_mishaps,
    is_async,
    unwrap_function,
)
from hone.rewards.failures import (
    NO_GROUND_TRUTH,
    Failed,
    FailurePolicy,
    RewardError,
    Scored,
    SetupError,
)
from hone.rewards.managers.reading import (
    batch_tensors,
    place_on_last_policy_token,
    policy_mask,
    read_rows,
    valid_response_ids,
)
from hone.rewards.outcome import (
    ScorerInput,
    exception_failure,
    precompute_comparisons,
    read_result,
    score_row,
)
from hone.rewards.repetition import repeatness
from hone.rewards.scores import table
from hone.text import printable
from hone.tokenizer import Tokenizer
from hone.types import Fields, Function, JsonValue, Settings

logger = logging.getLogger(__name__)


RawRewardFn = Function
"""`(data_source, solution_str, ground_truth, extra_info) -> float | dict | tuple`."""


class AbstractRewardManager(ABC):
    """Scores a batch; rewards are zero except at each row's last policy token."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        num_examine: int,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or table.default_compute_score
        self.reward_fn_key = reward_fn_key

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | Fields:
        """Returns rewards [B, T]; with `return_dict`, `{"reward_tensor", "reward_extra_info"}`."""

    @functools.cached_property  # a user's `__init__`, as verl's, may not call the one above
    def failures(self) -> Counter[str]:
        """The failures since the last `pop_metrics`, by reason."""
        return Counter()

    def pop_metrics(self) -> dict[str, float]:
        """Returns the failures since the last call, by reason, as metrics."""
        metrics = {f"reward/failures/{name}": float(n) for name, n in sorted(self.failures.items())}
        self.failures.clear()
        return metrics

    # Most managers hold no resources, so this is not abstract.
    def close(self) -> None:  # noqa: B027
        """Releases the manager's resources (processes). It may be called twice."""


class RuleRewardManager(AbstractRewardManager):
    """Scores every row by a rule. Unknown keyword arguments are passed to the scorer.

    Responses that repeat themselves more than `repeat_threshold` (0 to 1) get the reward 0.
    With `score_observations`, the scorer's text includes the output of tools and searches.
    With `skips_rows_without_truth`, the rule does not score rows without a ground truth; only a
    reward model scores them.
    """

    arguments: tuple[str, ...] = ROW_ARGUMENTS
    """The argument names of a user's score function."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        num_examine: int,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        *,
        policy: FailurePolicy | None = None,
        repeat_threshold: float | None = None,
        score_observations: bool = False,
        skips_rows_without_truth: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        defaults = RewardKwargs()
        self.failure_policy = policy or FailurePolicy(
            defaults.on_failure, defaults.failure_score, defaults.timeout_s
        )
        self.repeat_threshold = repeat_threshold
        self.score_observations = score_observations
        self.skips_rows_without_truth = skips_rows_without_truth
        self.num_skipped = 0
        self.has_warned_about_missing_truth = False
        self.is_first_batch = True
        self.uses_table = unwrap_function(self.compute_score) is table.default_compute_score
        """Whether rows are scored by the table of data sources (not by a user's function)."""
        while self.uses_table and isinstance(self.compute_score, functools.partial):
            options = {**self.compute_score.keywords, **options}
            self.compute_score = self.compute_score.func
        if score_observations and self.uses_table:
            options["score_observations"] = True
        self.options = options

    @abstractmethod
    def score_rows(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]:
        """Returns one result per row, in order."""

    def shape_rewards(
        self, scores: list[float], lengths: list[int]
    ) -> tuple[list[float], dict[str, Sequence[JsonValue]]]:
        """Returns rewards and extra columns; `lengths` are the responses' token counts."""
        return scores, {}

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | Fields:
        extras: dict[str, Sequence[JsonValue]] = {}
        if "rm_scores" in batch_tensors(data) and "reward_model" not in data.non_tensor_batch:
            # As in verl: without ground truths, the reward model's scores are the rewards.
            rewards = batch_tensors(data)["rm_scores"]
        else:
            rewards, extras = self.score_batch(data)
        return {"reward_tensor": rewards, "reward_extra_info": extras} if return_dict else rewards

    def score_batch(self, data: DataProto) -> tuple[torch.Tensor, dict[str, Sequence[JsonValue]]]:
        """Returns rewards [B, T] and the extra columns of a batch."""
        ids = valid_response_ids(data)
        rows = self.read_rows(data, ids)
        outcomes = self.score_checked_rows(rows)
        self._raise_if_all_failed(rows, outcomes)
        results = self._apply_policy(rows, outcomes)
        scores = [result.score for result in results]
        rewards, extras = self.shape_rewards(scores, [len(r) for r in ids])
        if self.repeat_threshold is not None:
            repeat_scores = repeatness([row.solution_str for row in rows])
            extras["repeat_score"] = repeat_scores
            for index, repeat_score in enumerate(repeat_scores):
                if repeat_score > self.repeat_threshold:
                    rewards[index] = 0.0
        num_without_policy_token = int((~policy_mask(data).any(dim=1)).sum())
        if num_without_policy_token:
            self.failures["no_policy_token"] += num_without_policy_token
        self._log_examples(rows, rewards)
        return place_on_last_policy_token(data, rewards), {**extra_columns(results), **extras}

    def read_rows(self, data: DataProto, ids: list[list[int]]) -> list[ScorerInput]:
        """Returns the scorer's arguments for each response."""
        key, observations = self.reward_fn_key, self.score_observations
        return read_rows(data, ids, self.tokenizer, key, score_observations=observations)

    def score_checked_rows(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]:
        """Scores rows; the scorer is not called for a row that lacks the ground truth that its rule needs."""
        lacks_truth = [self.lacks_ground_truth(row.data_source, row.ground_truth) for row in rows]
        rows_to_score = [row for row, lacks in zip(rows, lacks_truth, strict=True) if not lacks]
        results = iter(self.score_rows(rows_to_score))
        outcomes = [
            Failed(NO_GROUND_TRUTH, f"reward_model.ground_truth is {row.ground_truth!r:.80}")
            if lacks
            else next(results)
            for row, lacks in zip(rows, lacks_truth, strict=True)
        ]
        if not self.skips_rows_without_truth:
            return outcomes
        # A user's function that fails for a row without a ground truth apparently needs one.
        for index, (row, outcome) in enumerate(zip(rows, outcomes, strict=True)):
            if not isinstance(outcome, Failed) or not is_missing(row.ground_truth):
                continue
            outcomes[index] = Failed(NO_GROUND_TRUTH, outcome.detail)
            if outcome.reason != NO_GROUND_TRUTH and not self.has_warned_about_missing_truth:
                self.has_warned_about_missing_truth = True
                logger.warning(
                    "the score function fails for a row without a ground truth (%s: %s); only the "
                    "reward model scores such rows",
                    outcome.reason,
                    outcome.detail,
                )
        return outcomes

    def lacks_ground_truth(self, data_source: str, ground_truth: JsonValue) -> bool:
        """Returns whether a built-in rule needs a ground truth and the row has none."""
        entry = table.find(data_source) if self.uses_table else None
        return entry is not None and entry.needs_ground_truth and is_missing(ground_truth)

    def knows(self, data_source: str) -> bool:
        """Returns whether rows of a data source have a score function."""
        return not self.uses_table or table.find(data_source) is not None

    def check_scorer(self) -> None:
        """Raises ScorerSignatureError if the user's score function cannot be called."""
        if not self.uses_table:
            check_signature(self.compute_score, self.arguments, self.options)

    def check_rows(
        self, rows: Iterable[Settings], where: Callable[[int], str] = "row {}".format
    ) -> None:
        """Raises UnknownSourceError if the data source of a row has no scorer."""
        if self.uses_table:
            table.check_sources(rows, self.reward_fn_key, where)

    def timeout_failure(self) -> Failed:
        """Returns the failure of a scorer that exceeded its deadline."""
        return Failed("timeout", f"no score after {self.failure_policy.timeout_s:g} s")

    def _raise_if_all_failed(
        self, rows: Sequence[ScorerInput], outcomes: Sequence[Scored | Failed]
    ) -> None:
        """Raises RewardError if every row of the first batch failed, because no row will succeed."""
        if not self.is_first_batch or self.failure_policy.on_failure == "raise":
            return
        pairs = [pair for pair in zip(rows, outcomes, strict=True) if not self._is_skipped(pair[1])]
        self.is_first_batch = not pairs
        failures = [(row, outcome) for row, outcome in pairs if isinstance(outcome, Failed)]
        if failures and len(failures) == len(pairs):
            row, first = failures[0]
            raise RewardError(
                f"none of the {len(pairs)} responses of the first batch could be scored, so there "
                f"is nothing to learn from. The first failure (data_source "
                f"{row.data_source!r}): {first.reason}: {first.detail}"
            )

    def _apply_policy(
        self, rows: Sequence[ScorerInput], outcomes: Sequence[Scored | Failed]
    ) -> list[Scored]:
        """Applies the failure policy, counts failures, and adds `score` and `acc` to the extras."""
        results = []
        for index, (row, outcome) in enumerate(zip(rows, outcomes, strict=True)):
            if self._is_skipped(outcome):
                self.num_skipped += 1
                results.append(Scored(0.0, {"reward_failure": NO_GROUND_TRUTH}))
                continue
            if isinstance(outcome, Failed):
                outcome = self._score_of_failure(index, row, outcome)
            self.failures.update(outcome.mishaps)
            extras = {"score": outcome.score, **outcome.extras}
            if self.uses_table and "acc" not in extras:
                entry = table.find(row.data_source)
                full_mark = self.options.get("score", entry.full_mark if entry else 1.0)
                extras["acc"] = float(outcome.score >= full_mark)
            results.append(Scored(outcome.score, extras))
        if any("acc" in result.extras for result in results):
            for result, outcome in zip(results, outcomes, strict=True):
                if isinstance(outcome, Failed) and not self._is_skipped(outcome):
                    result.extras["acc"] = 0.0
        return results

    def _is_skipped(self, outcome: Scored | Failed) -> bool:
        """Returns whether the row lacks a ground truth, so that only the reward model scores it."""
        lacks_truth = isinstance(outcome, Failed) and outcome.reason == NO_GROUND_TRUTH
        return lacks_truth and self.skips_rows_without_truth

    def pop_metrics(self) -> dict[str, float]:
        metrics = super().pop_metrics()
        if self.skips_rows_without_truth:
            metrics["reward/rows_without_answer"] = float(self.num_skipped)
            self.num_skipped = 0
        return metrics

    def _score_of_failure(self, index: int, row: ScorerInput, failed: Failed) -> Scored:
        """Counts and logs a failure; raises, or returns a score, as the failure policy requires."""
        self.failures[failed.reason] += 1
        message = (
            f"row {index} (data_source {row.data_source!r}) could not be scored: {failed.reason}: "
            f"{failed.detail}"
        )
        if self.failure_policy.on_failure == "raise":
            raise RewardError(
                f"{message}. Fix the scorer, or set "
                "reward_model.reward_kwargs.on_failure=score to give such rows failure_score."
            )
        # One line per reason and step; the count is in the metrics.
        level = logging.WARNING if self.failures[failed.reason] == 1 else logging.DEBUG
        logger.log(level, "%s; scored %s", message, self.failure_policy.failure_score)
        return Scored(self.failure_policy.failure_score, {"reward_failure": failed.reason})

    def _log_examples(self, rows: Sequence[ScorerInput], scores: Sequence[float]) -> None:
        """Logs the first `num_examine` responses of each data source."""
        row_counts: Counter[str] = Counter()
        log_format = "[%s] score %s, ground truth %s, response:\n%s"
        for row, score in zip(rows, scores, strict=True):
            row_counts[row.data_source] += 1
            if row_counts[row.data_source] <= self.num_examine:
                response = printable(row.solution_str)
                logger.info(log_format, row.data_source, score, row.ground_truth, response)


class NaiveRewardManager(RuleRewardManager):
    """Scores row by row in this process; an async scorer runs concurrently.

    The deadlines are soft (see `calling.py`). Use `prime` for a scorer that may hang in C code.
    """

    def score_rows(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]:
        if is_async(self.compute_score):
            return run_coroutine(self._await_all(rows))
        precompute_comparisons(self.compute_score, rows, self.options)  # fills a cache
        return [self._score_one(row) for row in rows]

    def _score_one(self, row: ScorerInput) -> Scored | Failed:
        call = functools.partial(score_row, self.compute_score, row, self.options)
        try:
            return call_with_deadline(call, self.failure_policy.timeout_s)
        except DeadlineExceeded:
            return self.timeout_failure()

    async def _await_all(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]:
        """Awaits all rows concurrently, each with its own deadline."""
        return list(await asyncio.gather(*map(self._await_one, rows)))

    async def _await_one(self, row: ScorerInput) -> Scored | Failed:
        function: Function = self.compute_score
        arguments = accepted_arguments(function, row.arguments(), self.options)
        functions = function, unwrap_function(function)
        has_own_deadline = any(getattr(f, "has_own_deadline", False) for f in functions)
        timeout_s = None if has_own_deadline else self.failure_policy.timeout_s
        try:
            with counted_mishaps() as mishaps:
                call = asyncio.ensure_future(await_scorer(function, arguments))
                done, _ = await asyncio.wait({call}, timeout=timeout_s)
            if not done:
                call.cancel()  # not awaited, because the call may ignore the cancellation
                return self.timeout_failure()
            if call.cancelled():
                raise RuntimeError("the call cancelled itself (asyncio.CancelledError)")
            return read_result(call.result(), mishaps)
        except SetupError:
            raise
        except (Exception, SystemExit) as error:  # a user's scorer may raise anything
            return exception_failure(error, function)


def extra_columns(results: Sequence[Scored]) -> dict[str, Sequence[JsonValue]]:
    """Returns one list per name in the extras, with None for rows without the name."""
    names = dict.fromkeys(name for result in results for name in result.extras)
    return {name: [result.extras.get(name) for result in results] for name in names}
