"""Scores responses by data source: mean, pass@k, best@k, maj@k, with confidence intervals.

Scoring runs in separate processes with a deadline. A response that cannot be scored counts as 0, and is
reported. generation.py generates the responses; main_eval.py is the command.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import Any

import numpy as np

from hone.config.generation import EvaluationConfig, EvaluationMetricsConfig
from hone.cores import usable_cores
from hone.data.reading import read_rows
from hone.data.rows import BadRowPolicy, DataError, as_table
from hone.data.values import decode_json
from hone.errors import UserError
from hone.ops.at_n import attempt_counts, best_at, majority_at
from hone.rewards import check_sources, default_compute_score, get_custom_reward_fn
from hone.rewards.failures import Failed, FailurePolicy, Scored
from hone.rewards.managers.prime import PrimeRewardManager
from hone.rewards.managers.rule import NaiveRewardManager
from hone.rewards.scorer import ROW_ARGUMENTS, ScorerInput, policy_transcript_info, vote_of
from hone.rewards.scores.latex import boxed_answer
from hone.rewards.signature import check_signature
from hone.text import short_repr
from hone.tracking import progress
from hone.types import Function, JsonValue, Row

TOTAL_NAME = "all"
"""The name of the total over several data sources."""
RESPONSES_PER_CHUNK = 512
"""The number of responses that are scored between two updates of the progress bar."""
EQUALITY_TOLERANCE = 1e-9
"""Values that differ by less than this count as equal, because the order of a sum changes its rounding."""

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ANSWER_LINE = re.compile(r"####\s*([^\n]+)")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class EvaluationError(UserError, ValueError):
    """Raised when responses cannot be evaluated as configured."""


@dataclass
class ScoredRow:
    """The score and the vote of each response of a row; a vote is an answer, or None."""

    source: str
    scores: list[float] = field(default_factory=list)
    answers: Sequence[Hashable | None] = ()


@dataclass(frozen=True)
class Estimate:
    """A mean over rows, and the bounds of its confidence interval (None if undefined)."""

    value: float
    low: float | None
    high: float | None


@dataclass
class SourceResult:
    """The metrics of one data source, or of all sources together."""

    num_rows: int
    num_responses: int
    metrics: dict[str, Estimate]
    failures: dict[str, int] = field(default_factory=dict)
    is_total: bool = False


@dataclass(repr=False)
class Evaluation:
    """The results by data source and in total, and the rows with a new column `scores`."""

    sources: dict[str, SourceResult]
    rows: list[Row]
    first_failures: dict[str, str] = field(default_factory=dict)
    """The first message per reason why responses could not be scored."""

    def __repr__(self) -> str:
        results = [
            f"{name}: {', '.join(f'{key} {value.value:.4g}' for key, value in result.metrics.items())}"
            f" ({result.num_rows:,} rows, {result.num_responses:,} responses)"
            for name, result in self.sources.items()
        ]
        return f"Evaluation({'; '.join(results)})"

    def as_dict(self) -> dict[str, Any]:
        """Returns the results as JSON values; `test_score/<source>` is verl's name for the mean."""
        values: dict[str, Any] = {
            f"test_score/{name}": result.metrics["mean"].value
            for name, result in self.sources.items()
            if not result.is_total
        }
        values["sources"] = {
            name: {
                "rows": result.num_rows,
                "responses": result.num_responses,
                "failures": result.failures,
                "metrics": {metric: vars(value) for metric, value in result.metrics.items()},
            }
            for name, result in self.sources.items()
        }
        return values


def evaluate(config: EvaluationConfig, compute_score: Function | None = None) -> Evaluation:
    """Reads, scores and summarizes the responses; raises an error if no response could be scored.

    `compute_score` replaces the configured scorer. The function runs in this process, which cannot stop it at
    a deadline; the configured scorer runs in separate processes.
    """
    store = read_rows(config.data.path, BadRowPolicy("raise", policy_key=None), "data.path")
    rows = list(store.scan())
    if config.output.scores_path:
        # Raises an error now, before hours of scoring, for a column that parquet cannot store.
        as_table([{k: v for k, v in row.items() if k != "scores"} for row in rows])
    groups = [_scorer_inputs(row, store.where(index), config) for index, row in enumerate(rows)]
    scorer = compute_score or get_custom_reward_fn(config)
    if scorer is None:
        check_sources((group[0].data_source for group in groups), config.data.data_source_key)
        scorer = default_compute_score
    else:
        check_signature(scorer, ROW_ARGUMENTS, {})
    responses = [response for group in groups for response in group]
    outcomes = iter(_score_responses(responses, scorer, config, in_processes=compute_score is None))
    scored_rows: list[ScoredRow] = []
    failures: dict[str, Counter[str]] = {}
    first_failures: dict[str, str] = {}
    for index, (row, group) in enumerate(zip(rows, groups, strict=True)):
        source, row_outcomes = group[0].data_source, []
        for outcome in islice(outcomes, len(group)):
            if isinstance(outcome, Failed):
                failures.setdefault(source, Counter())[outcome.reason] += 1
                first_failures.setdefault(outcome.reason, f"{store.where(index)}: {outcome.detail}")
                outcome = Scored(0.0)
            row_outcomes.append(outcome)
        row["scores"] = [outcome.score for outcome in row_outcomes]
        answers = answer_votes(row_outcomes, [response.solution_str for response in group])
        scored_rows.append(ScoredRow(source, row["scores"], answers))
    if sum(map(Counter.total, failures.values())) == len(responses):
        messages = "; ".join(f"{reason}: {message}" for reason, message in first_failures.items())
        raise EvaluationError(
            f"none of the {len(responses)} responses could be scored, so there is no result ({messages})"
        )
    return Evaluation(summarize(scored_rows, config.metrics, failures), rows, first_failures)


def _scorer_inputs(row: Row, location: str, config: EvaluationConfig) -> list[ScorerInput]:
    """Returns what the scorer reads for each response of a row; `location` names the row in errors."""
    data = config.data
    for key in ("response_key", "data_source_key", "reward_model_key"):
        if row.get(data[key]) is None:
            raise DataError(
                f"{location} has no column {data[key]!r} (data.{key}); it has {', '.join(row)}"
            )
    texts = response_texts(row[data.response_key], f"{location}, column {data.response_key!r}")
    reward_model: Any = decode_json(row[data.reward_model_key])
    extra_info: Any = decode_json(row.get("extra_info")) or {}
    for key, value in ((data.reward_model_key, reward_model), ("extra_info", extra_info)):
        if not isinstance(value, Mapping):
            raise DataError(
                f"{location}, column {key!r} must be an object, got {short_repr(value)}"
            )
    scorer_info = {k: v for k, v in reward_model.items() if k not in ("ground_truth", "style")}
    scorer_info |= extra_info
    source = str(row[data.data_source_key])
    ground_truth = reward_model.get("ground_truth")
    return [
        ScorerInput(source, text, ground_truth, scorer_info | policy_transcript_info(text))
        for text in texts
    ]


def response_texts(value: JsonValue, location: str) -> list[str]:
    """Returns the responses of a row, which are one text or a list of texts."""
    values = value if isinstance(value, list) else [value]
    texts = [text for text in values if isinstance(text, str)]
    if len(texts) < len(values):
        raise DataError(f"{location} must be text or a list of texts, got {short_repr(value)}")
    if not texts:
        raise DataError(f"{location} has no response")
    return texts


def _score_responses(
    responses: Sequence[ScorerInput],
    scorer: Function,
    config: EvaluationConfig,
    *,
    in_processes: bool,
) -> list[Scored | Failed]:
    """Returns the outcome of each response, in order.

    A response fails without being scored if its rule needs a ground truth and the row has none.
    """
    manager: PrimeRewardManager | NaiveRewardManager
    policy = FailurePolicy("score", 0.0, config.timeout_s)
    if in_processes:
        sandbox_options: dict[str, Any] = {}
        if scorer is default_compute_score:
            sandbox_options["memory_limit_mb"] = config.sandbox_fusion.memory_limit_mb
            if config.sandbox_fusion.url:
                sandbox_options["sandbox_fusion_url"] = config.sandbox_fusion.url
        num_processes = min(config.num_processes or usable_cores(), max(len(responses), 1))
        manager = PrimeRewardManager(
            None, 0, scorer, policy=policy, num_processes=num_processes, **sandbox_options
        )
    else:
        manager = NaiveRewardManager(None, 0, scorer, policy=policy)
    column = f"{config.data.reward_model_key}.ground_truth"
    missing_truth_failure = Failed(
        "no_ground_truth", f"{column} is null or empty, and the rule needs one"
    )
    is_scorable = [
        not manager.lacks_ground_truth(response.data_source, response.ground_truth)
        for response in responses
    ]
    scorable_responses = list(compress(responses, is_scorable))
    outcomes: list[Scored | Failed] = []
    try:
        with progress("score", len(scorable_responses)) as bar:
            for start in range(0, len(scorable_responses), RESPONSES_PER_CHUNK):
                chunk = scorable_responses[start : start + RESPONSES_PER_CHUNK]
                outcomes += manager.score_rows(chunk)
                bar.advance(len(chunk))
    finally:
        if isinstance(manager, PrimeRewardManager):
            manager.close()
    remaining_outcomes = iter(outcomes)
    return [
        next(remaining_outcomes) if scorable else missing_truth_failure for scorable in is_scorable
    ]


def answer_votes(outcomes: Sequence[Scored], responses: Sequence[str]) -> list[str | None]:
    """Returns the answer that each response votes for: the scorer's `pred`, or else the answer in the text.

    If no response has an answer, each response votes for its whole text. A vote of None does not count.
    """
    answers = [
        vote_of(outcome.extras["pred"]) if "pred" in outcome.extras else extract_answer(text)
        for outcome, text in zip(outcomes, responses, strict=True)
    ]
    if any(answer is not None for answer in answers):
        return answers
    return [text.strip() or None for text in responses]


def extract_answer(response: str) -> str | None:
    r"""Returns the last <answer> of a response, or else its last \boxed{}, #### line or number."""
    if tagged_answers := _ANSWER_TAG.findall(response):
        return tagged_answers[-1].strip() or None
    boxed = boxed_answer(response)
    if boxed is not None:
        return boxed.strip() or None
    for pattern in (_ANSWER_LINE, _NUMBER):
        if matches := pattern.findall(response):
            return matches[-1].strip().replace(",", "") or None
    return None


def summarize(
    scored_rows: Iterable[ScoredRow],
    config: EvaluationMetricsConfig,
    failures: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, SourceResult]:
    """Returns the result of each data source, and the total over all rows if there are several sources.

    `failures` counts failures by data source and reason.
    """
    rows = list(scored_rows)
    rows_by_source: dict[str, list[ScoredRow]] = {}
    for row in rows:
        rows_by_source.setdefault(row.source, []).append(row)
    failure_counts = {name: dict(counts) for name, counts in (failures or {}).items()}
    results = {
        name: _source_result(source_rows, config, failure_counts.get(name, {}))
        for name, source_rows in rows_by_source.items()
    }
    if len(rows_by_source) > 1:
        total_failures = sum((Counter(counts) for counts in failure_counts.values()), Counter())
        total_name = TOTAL_NAME
        if total_name in rows_by_source:  # a data source has the same name
            total_name = f"{TOTAL_NAME} {len(rows_by_source)} sources"
        results[total_name] = _source_result(rows, config, dict(total_failures))
        results[total_name].is_total = True
    return results


def _source_result(
    rows: Sequence[ScoredRow], config: EvaluationMetricsConfig, failures: dict[str, int]
) -> SourceResult:
    """Returns the metrics of these rows, with intervals; `failures` counts failures by reason."""
    min_responses = min(len(row.scores) for row in rows)
    ks = list(config.pass_at) if config.pass_at is not None else [1, *attempt_counts(min_responses)]
    invalid_ks = [k for k in ks if not 1 <= k <= min_responses]
    if invalid_ks:
        raise EvaluationError(
            f"metrics.pass_at has {invalid_ks[0]}, but rows of {rows[0].source} have {min_responses} "
            f"responses; use 1 to {min_responses}, or generate more (data.n_samples)"
        )
    values_by_metric: dict[str, list[float]] = {
        "mean": [float(np.mean(row.scores)) for row in rows]
    }
    correctness = [[float(s >= config.correct_from) for s in row.scores] for row in rows]
    for k in dict.fromkeys(ks):
        values_by_metric[f"pass@{k}"] = [best_at(values, k) for values in correctness]
        if k > 1:
            values_by_metric[f"best@{k}"] = [best_at(row.scores, k) for row in rows]
            values_by_metric[f"maj@{k}"] = [majority_at(row.scores, row.answers, k) for row in rows]
    num_responses = sum(len(row.scores) for row in rows)
    estimates = bootstrap_estimates(values_by_metric, config)
    return SourceResult(len(rows), num_responses, estimates, failures)


def bootstrap_estimates(
    values_by_metric: Mapping[str, Sequence[float]], config: EvaluationMetricsConfig
) -> dict[str, Estimate]:
    """Returns the mean of each metric over rows, with a bootstrap percentile interval over resampled rows.

    If all rows have the value 0, or all have 1, the interval is the exact binomial interval
    (Clopper-Pearson). If all rows have another common value, the interval is undefined.
    """
    names = list(values_by_metric)
    values = np.array(list(values_by_metric.values()), dtype=np.float64)
    num_rows = values.shape[1]
    generator = np.random.default_rng(config.seed)
    means = np.empty((config.bootstrap_samples, len(names)))
    for sample in range(config.bootstrap_samples):
        means[sample] = values[:, generator.integers(num_rows, size=num_rows)].mean(axis=1)
    tail_probability = (1.0 - config.confidence) / 2
    low, high = np.quantile(means, [tail_probability, 1.0 - tail_probability], axis=0)
    exact_bound = tail_probability ** (1.0 / num_rows)
    estimates = {}
    for i, name in enumerate(names):
        bounds: tuple[float | None, float | None] = float(low[i]), float(high[i])
        value = float(values[i].mean())
        if np.ptp(values[i]) < EQUALITY_TOLERANCE:
            value, bounds = float(values[i, 0]), (None, None)
            if abs(value) < EQUALITY_TOLERANCE:
                bounds = (0.0, 1.0 - exact_bound)
            elif abs(value - 1) < EQUALITY_TOLERANCE:
                bounds = (exact_bound, 1.0)
        estimates[name] = Estimate(value, *bounds)
    return estimates
