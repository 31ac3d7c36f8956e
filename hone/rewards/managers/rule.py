"""The interface of reward managers, the base class of the built-in managers, and the `naive` manager.

A user's manager implements `AbstractRewardManager.__call__`; a built-in manager implements `score_rows`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any

import torch

from hone.config.reward import RewardKwargs
from hone.data.values import is_missing
from hone.event_loop import run_coroutine
from hone.ops.rows import last_true_index, split_at_response
from hone.plugins import unwrap_function
from hone.protocol import DataProto
from hone.rewards.async_scorer import await_row, is_async
from hone.rewards.failures import NO_GROUND_TRUTH, Failed, FailurePolicy, RewardError, Scored
from hone.rewards.repetition import repeatness
from hone.rewards.scorer import ROW_ARGUMENTS, ScorerInput, call_with_deadline, read_rows, score_row
from hone.rewards.scores import table
from hone.rewards.signature import check_signature
from hone.rewards.symbolic_rows import FirstCall, call_with_pairs_recorded
from hone.text import printable
from hone.tokenizer import Tokenizer
from hone.types import Fields, Function, JsonValue, Settings

logger = logging.getLogger(__name__)
Extras = dict[str, Sequence[JsonValue]]
"""The columns that scorers return besides the score, by name: one value per row, which may be None."""


def response_attention(data: DataProto) -> torch.Tensor:
    """Returns the attention mask of the responses, bool [B, T]."""
    _, attention = split_at_response(data.batch["attention_mask"], data.batch["responses"])
    return attention.bool()


def policy_mask(data: DataProto) -> torch.Tensor:
    """Returns the mask of policy tokens, bool [B, T]: `response_mask`, else the attention mask."""
    if "response_mask" in data.batch:
        return data.batch["response_mask"].bool()
    return response_attention(data)


def response_tokens(data: DataProto) -> tuple[list[list[int]], list[list[bool]]]:
    """Returns the token ids of each response without padding, and whether the policy wrote each token."""
    ids, is_policy = [], []
    tensors = data.batch["responses"], policy_mask(data), response_attention(data)
    for token_ids, flags, mask in zip(*(tensor.tolist() for tensor in tensors), strict=True):
        ids.append(list(compress(token_ids, mask)))
        is_policy.append(list(compress(flags, mask)))
    return ids, is_policy


def place_on_last_policy_token(data: DataProto, scores: Sequence[float]) -> torch.Tensor:
    """Returns rewards [B, T]: each row has its score on its last policy token, and 0 elsewhere."""
    rewards = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
    for row, position in enumerate(last_true_index(policy_mask(data)).tolist()):
        if position >= 0:
            rewards[row, position] = scores[row]
    return rewards


def move_to_policy_tokens(data: DataProto, rewards: torch.Tensor) -> torch.Tensor:
    """Moves each reward [B, T] on an observation to the previous (else the first) policy token."""
    mask = policy_mask(data)
    positions = torch.arange(mask.shape[1]).expand_as(mask)
    first_positions = mask.int().argmax(-1, keepdim=True)
    targets = torch.where(mask, positions, first_positions).cummax(-1).values
    return torch.zeros_like(rewards).scatter_add_(1, targets, rewards)


class AbstractRewardManager(ABC):
    """Scores a batch; rewards are zero except at each row's last policy token."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        num_examine: int,
        compute_score: Function | None = None,
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

    @functools.cached_property  # the `__init__` of a user's class need not call ours
    def failures(self) -> Counter[str]:
        """The failures since the last `pop_metrics`, by reason."""
        return Counter()

    def pop_metrics(self) -> dict[str, float]:
        """Returns the failures since the last call, by reason, as metrics."""
        metrics = {f"reward/failures/{name}": float(n) for name, n in sorted(self.failures.items())}
        self.failures.clear()
        return metrics

    def close(self) -> None:  # noqa: B027  most managers hold no resources
        """Releases the manager's resources (processes). It may be called twice."""


class RuleRewardManager(AbstractRewardManager):
    """Reads rows, calls the scorer, applies the failure policy and puts scores on tokens.

    Unknown keyword arguments are passed to the scorer. Responses that repeat themselves more than
    `repeat_threshold` (0 to 1) get the reward 0. With `score_observations`, the scorer's text includes
    the output of tools and searches. With `skips_rows_without_truth`, the rule does not score rows
    without a ground truth; only a reward model scores them.
    """

    arguments: tuple[str, ...] = ROW_ARGUMENTS
    """The argument names of a user's score function."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        num_examine: int,
        compute_score: Function | None = None,
        reward_fn_key: str = "data_source",
        *,
        policy: FailurePolicy | None = None,
        repeat_threshold: float | None = None,
        score_observations: bool = False,
        skips_rows_without_truth: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.failure_policy = policy or FailurePolicy.of(RewardKwargs())
        self.repeat_threshold = repeat_threshold
        self.score_observations = score_observations
        self.skips_rows_without_truth = skips_rows_without_truth
        self.num_skipped = 0
        self.has_warned_about_missing_truth = False
        self.is_first_batch = True
        function: Any = self.compute_score
        bound_options: Fields = {}
        while isinstance(function, functools.partial):
            bound_options = {**function.keywords, **bound_options}
            function = function.func
        self.uses_table = function is table.default_compute_score
        """Whether the table of data sources scores the rows, not a user's function."""
        if self.uses_table:
            self.compute_score, options = function, {**bound_options, **options}
        self.has_async_scorer = is_async(self.compute_score)
        module = getattr(unwrap_function(function), "__module__", None)
        self.is_symbolic = module in table.SYMBOLIC_MODULES
        if score_observations and self.uses_table:
            options["score_observations"] = True
        self.options = options

    @abstractmethod
    def score_rows(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]:
        """Returns one result per row, in order."""

    def shape_rewards(self, scores: list[float], lengths: list[int]) -> tuple[list[float], Extras]:
        """Returns rewards and extra columns; `lengths` are the responses' token counts."""
        return scores, {}

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | Fields:
        if data.batch is None:
            raise ValueError("the batch has no tensors; a reward manager needs 'responses'")
        extras: Extras = {}
        if "rm_scores" in data.batch and "reward_model" not in data.non_tensor_batch:
            # As in verl: without ground truths, the reward model's scores are the rewards.
            rewards = data.batch["rm_scores"]
        else:
            rewards, extras = self._score_batch(data)
        return {"reward_tensor": rewards, "reward_extra_info": extras} if return_dict else rewards

    def _score_batch(self, data: DataProto) -> tuple[torch.Tensor, Extras]:
        ids, is_policy = response_tokens(data)
        rows = self.read_rows(data, ids, is_policy)
        if not all(self.has_scorer_for(row.data_source) for row in rows):
            table.check_sources(row.data_source for row in rows)  # raises, and names the row
        outcomes = self.score_checked_rows(rows)
        self._raise_if_all_failed(rows, outcomes)
        results = self._apply_policy(rows, outcomes)
        scores = [result.score for result in results]
        scores, extras = self.shape_rewards(scores, [len(response) for response in ids])
        if self.repeat_threshold is not None:
            repeat_scores = repeatness([row.solution_str for row in rows])
            extras["repeat_score"] = repeat_scores
            pairs = zip(scores, repeat_scores, strict=True)
            scores = [0.0 if repeat > self.repeat_threshold else score for score, repeat in pairs]
        num_without_policy_token = sum(not any(flags) for flags in is_policy)
        if num_without_policy_token:
            self.failures["no_policy_token"] += num_without_policy_token
        self._log_examples(rows, scores)
        columns = extra_columns([result.extras for result in results])
        return place_on_last_policy_token(data, scores), {**columns, **extras}

    def read_rows(
        self, data: DataProto, ids: list[list[int]], is_policy: list[list[bool]]
    ) -> list[ScorerInput]:
        """Returns the scorer's arguments for each response."""
        columns, key = data.non_tensor_batch, self.reward_fn_key
        return read_rows(columns, ids, is_policy, self.tokenizer, key, self.score_observations)

    def scorer_of(self, row: ScorerInput) -> Function:
        """Returns the user's score function, or the rule of the row's data source."""
        return table.scorer_of(row.data_source)[1] if self.uses_table else self.compute_score

    def score_symbolic_rows(self, rows: Sequence[ScorerInput]) -> list[FirstCall]:
        """Returns the first call of the scorer of each row, which is none for a user's score function."""
        scorers: list[Function | None] = []
        for row in rows:
            scorer = self.scorer_of(row)
            module = getattr(scorer, "__module__", "")
            is_symbolic = self.is_symbolic or module in table.SYMBOLIC_MODULES
            scorers.append(scorer if is_symbolic else None)
        return call_with_pairs_recorded(rows, scorers, self.options, self.failure_policy.timeout_s)

    def score_checked_rows(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]:
        """Scores rows; a row that lacks a required ground truth fails without a call of the scorer."""
        failures = [
            Failed(NO_GROUND_TRUTH, f"reward_model.ground_truth is {row.ground_truth!r:.80}")
            if self.lacks_ground_truth(row.data_source, row.ground_truth)
            else None
            for row in rows
        ]
        scored_rows = [row for row, failure in zip(rows, failures, strict=True) if failure is None]
        results = iter(self.score_rows(scored_rows))
        outcomes = [failure or next(results) for failure in failures]
        if self.skips_rows_without_truth:
            self._mark_rows_without_truth(rows, outcomes)
        return outcomes

    def _mark_rows_without_truth(
        self, rows: Sequence[ScorerInput], outcomes: list[Scored | Failed]
    ) -> None:
        """Gives failed rows without a ground truth the reason NO_GROUND_TRUTH, and warns once."""
        for index, (row, outcome) in enumerate(zip(rows, outcomes, strict=True)):
            if not isinstance(outcome, Failed) or not is_missing(row.ground_truth):
                continue
            outcomes[index] = Failed(NO_GROUND_TRUTH, outcome.detail)
            if outcome.reason != NO_GROUND_TRUTH and not self.has_warned_about_missing_truth:
                self.has_warned_about_missing_truth = True
                logger.warning(
                    "the score function fails for a row without a ground truth "
                    f"({outcome.reason}: {outcome.detail}); only the reward model scores such rows"
                )

    def lacks_ground_truth(self, data_source: str, ground_truth: JsonValue) -> bool:
        """Returns whether a built-in rule needs a ground truth and the row has none."""
        entry = table.find_entry(data_source) if self.uses_table else None
        return entry is not None and entry.needs_ground_truth and is_missing(ground_truth)

    def has_scorer_for(self, data_source: str) -> bool:
        """Returns whether rows of a data source have a score function."""
        return not self.uses_table or table.find_entry(data_source) is not None

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

    def _raise_if_all_failed(
        self, rows: Sequence[ScorerInput], outcomes: Sequence[Scored | Failed]
    ) -> None:
        """Raises RewardError if every row of the first batch failed, because no row will succeed."""
        if not self.is_first_batch or self.failure_policy.on_failure == "raise":
            return
        num_scored = sum(isinstance(outcome, Scored) for outcome in outcomes)
        failures = [
            (row, outcome)
            for row, outcome in zip(rows, outcomes, strict=True)
            if isinstance(outcome, Failed) and not self._is_skipped(outcome)
        ]
        self.is_first_batch = not num_scored and not failures
        if failures and not num_scored:
            row, failure = failures[0]
            raise RewardError(
                f"none of the {len(failures)} responses of the first batch could be scored, so there "
                f"is nothing to learn from. The first failure (data_source {row.data_source!r}): "
                f"{failure.reason}: {failure.detail}"
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
                outcome = self._handle_failure(index, row, outcome)
            self.failures.update(outcome.mishaps)
            extras = {"score": outcome.score, **outcome.extras}
            if self.uses_table and "acc" not in extras:
                entry = table.find_entry(row.data_source)
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

    def _handle_failure(self, index: int, row: ScorerInput, failed: Failed) -> Scored:
        """Counts and logs a failure; raises, or returns a score, as the failure policy requires."""
        self.failures[failed.reason] += 1
        where = f"row {index} (data_source {row.data_source!r})"
        message = f"{where} could not be scored: {failed.reason}: {failed.detail}"
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
        counts: Counter[str] = Counter()
        for row, score in zip(rows, scores, strict=True):
            counts[row.data_source] += 1
            if counts[row.data_source] <= self.num_examine:
                response = printable(row.solution_str)
                message = "[%s] score %s, ground truth %s, response:\n%s"
                logger.info(message, row.data_source, score, row.ground_truth, response)


class NaiveRewardManager(RuleRewardManager):
    """Scores row by row in this process; an async scorer is called for all rows concurrently.

    The deadlines are soft (see `scorer.py`). Use `prime` for a scorer that may hang in C code.
    """

    def score_rows(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]:
        if self.has_async_scorer:
            return run_coroutine(self._await_all(rows))
        outcomes = []
        for row, (outcome, _) in zip(rows, self.score_symbolic_rows(rows), strict=True):
            if outcome is None:
                call = functools.partial(score_row, self.scorer_of(row), row, self.options)
                outcome = call_with_deadline(call, self.failure_policy.timeout_s)
            outcomes.append(outcome)
        return outcomes

    async def _await_all(self, rows: Sequence[ScorerInput]) -> list[Scored | Failed]:
        """Awaits all rows concurrently, each with its own deadline."""
        function, timeout_s = self.compute_score, self.failure_policy.timeout_s
        calls = (await_row(function, row, self.options, timeout_s) for row in rows)
        return list(await asyncio.gather(*calls))


def extra_columns(rows: Sequence[Fields]) -> Extras:
    """Returns a list of the rows' values for each name; the value of a row without the name is None."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
