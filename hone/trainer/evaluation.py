"""What responses are worth: scores by data source, pass@k, best@k, maj@k, with intervals.

Scoring runs in processes with a deadline; a response that could not be scored counts 0 and is counted.
Leaves out generating (generation.py) and where results are shown (main_eval.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hone.config.evaluation import EvaluationConfig, EvaluationMetricsConfig
from hone.cores import usable_cores
from hone.data.rows import BadRows, DataError, as_table, read_rows
from hone.ops.at_n import best_at, majority_at, sizes
from hone.rewards import check_sources, default_compute_score, get_custom_reward_fn
from hone.rewards.calling import ROW_ARGUMENTS, check_signature
from hone.rewards.failures import Failed, FailurePolicy, Scored
from hone.rewards.managers.naive import NaiveRewardManager
from hone.rewards.outcome import Response, compare_ahead, vote_of
from hone.rewards.pool import DeadlinePool
from hone.rewards.scores import table
from hone.rewards.scores.latex import boxed_answer
from hone.rewards.transcript import of_policy
from hone.rewards.transport import row_scorer_keywords
from hone.tracking import progress
from hone.types import Function, Row

ALL = "all"
"""The name of the total over several data sources."""
CHUNK = 512
"""Responses handed to the scoring processes between two moves of the progress bar."""
ROUNDING = 1e-9
"""Values that differ by less are the same value, computed in another order."""

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MARK = re.compile(r"####\s*([^\n]+)")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class EvaluationError(ValueError):
    """Responses that cannot be evaluated as asked."""


@dataclass
class Attempts:
    """One row: its responses' scores, and the answer each gave (for majority votes; None is none)."""

    source: str
    scores: list[float] = field(default_factory=list)
    answers: Sequence[Hashable | None] = ()


@dataclass(frozen=True)
class Estimate:
    """A mean over rows and its interval; None where the rows cannot say."""

    value: float
    low: float | None
    high: float | None


@dataclass
class SourceResult:
    """What one data source came to."""

    rows: int
    responses: int
    metrics: dict[str, Estimate]
    failures: dict[str, int] = field(default_factory=dict)
    is_total: bool = False
    """Of all rows, where there are several data sources."""


@dataclass
class Evaluation:
    """Results by data source (and their total), and the rows with their scores."""

    sources: dict[str, SourceResult]
    rows: list[Row]
    """The rows as read, each with its `scores`."""
    first_failures: dict[str, str] = field(default_factory=dict)
    """The first message of each reason for which a response could not be scored."""

    def as_dict(self) -> Row:
        """Plain values; `test_score/<source>` are the means by verl's name."""
        plain: Row = {
            f"test_score/{name}": result.metrics["mean"].value
            for name, result in self.sources.items()
            if not result.is_total
        }
        plain["sources"] = {
            name: {
                "rows": result.rows,
                "responses": result.responses,
                "failures": result.failures,
                "metrics": {k: vars(estimate) for k, estimate in result.metrics.items()},
            }
            for name, result in self.sources.items()
        }
        return plain


def evaluate(config: EvaluationConfig, compute_score: Function | None = None) -> Evaluation:
    """Read, score, summarise; stops where not one response could be scored.

    `compute_score`, a function that a program hands over, runs in this process, under a soft deadline.
    """
    store = read_rows(config.data.path, BadRows("raise", skip_key=None), "data.path")
    rows = list(store.scan())
    if config.output.scores_path:
        as_table([{k: v for k, v in row.items() if k != "scores"} for row in rows])  # or refuse now
    jobs = [_jobs(row, store.where(number), config) for number, row in enumerate(rows)]
    scorer = compute_score or get_custom_reward_fn(config)
    if scorer is None:
        check_sources((job[0].data_source for job in jobs if job), config.data.data_source_key)
        scorer = default_compute_score
    else:
        check_signature(scorer, ROW_ARGUMENTS, {})
    every = [job for of_row in jobs for job in of_row]
    outcomes = iter(
        _scored(every, scorer, config)
        if compute_score is None
        else _scored_here(every, compute_score, config)
    )
    attempts: list[Attempts] = []
    failures: dict[str, Counter[str]] = {}
    first: dict[str, str] = {}
    for number, (row, of_row) in enumerate(zip(rows, jobs, strict=True)):
        one = Attempts(of_row[0].data_source)
        scored: list[Scored] = []
        for outcome in (next(outcomes) for _ in of_row):
            if isinstance(outcome, Failed):
                failures.setdefault(one.source, Counter())[outcome.reason] += 1
                first.setdefault(outcome.reason, f"{store.where(number)}: {outcome.detail}")
                outcome = Scored(0.0)
            scored.append(outcome)
        one.scores = row["scores"] = [outcome.score for outcome in scored]
        one.answers = votes(scored, [job.solution_str for job in of_row])
        attempts.append(one)
    _refuse_no_score(attempts, sum(map(Counter.total, failures.values())), first)
    return Evaluation(summarise(attempts, config.metrics, failures), rows, first)


def _refuse_no_score(attempts: Sequence[Attempts], failed: int, first: Mapping[str, str]) -> None:
    count = sum(len(one.scores) for one in attempts)
    if failed == count:
        messages = "; ".join(f"{reason}: {message}" for reason, message in first.items())
        raise EvaluationError(
            f"none of the {count} responses could be scored, so there is no result ({messages})"
        )


def _jobs(row: Row, where: str, config: EvaluationConfig) -> list[Response]:
    """What is scored: one a response."""
    data = config.data
    for key, column in (
        ("response_key", data.response_key),
        ("data_source_key", data.data_source_key),
        ("reward_model_key", data.reward_model_key),
    ):
        if row.get(column) is None:
            raise DataError(
                f"{where} has no column {column!r} (data.{key}); it has {', '.join(row)}"
            )
    responses = row[data.response_key]
    responses = [responses] if isinstance(responses, str) else list(responses)
    if not responses:
        raise DataError(f"{where} has no response in {data.response_key!r}")
    reward_model = dict(row[data.reward_model_key])
    extra = {k: v for k, v in reward_model.items() if k not in ("ground_truth", "style")}
    extra.update(row.get("extra_info") or {})
    return [
        Response(
            str(row[data.data_source_key]),
            text,
            reward_model.get("ground_truth"),
            extra | of_policy(text),
        )
        for text in responses
    ]


def _scored(
    rows: Sequence[Response], scorer: Function, config: EvaluationConfig
) -> list[Scored | Failed]:
    """One result a row, in order; a rule that would compare with nothing is not asked."""
    if scorer is not default_compute_score:
        return _run_scorer(rows, scorer, config)
    lacking = [table.lacks_ground_truth(row.data_source, row.ground_truth) for row in rows]
    known = [row for row, lacks in zip(rows, lacking, strict=True) if not lacks]
    scored = iter(_run_scorer(known, scorer, config))
    column = f"{config.data.reward_model_key}.ground_truth"
    absent = Failed("no_ground_truth", f"{column} is null or empty, and the rule needs one")
    return [absent if lacks else next(scored) for lacks in lacking]


def _scored_here(
    rows: Sequence[Response], scorer: Function, config: EvaluationConfig
) -> list[Scored | Failed]:
    policy = FailurePolicy("score", 0.0, config.timeout_s)
    manager = NaiveRewardManager(None, 0, scorer, policy=policy)
    return manager.score_rows(rows)  # texts are there already: nothing is decoded


def _run_scorer(
    rows: Sequence[Response], scorer: Function, config: EvaluationConfig
) -> list[Scored | Failed]:
    options: Row = {}
    if scorer is default_compute_score:
        options["memory_limit_mb"] = config.sandbox_fusion.memory_limit_mb
        if config.sandbox_fusion.url:
            options["sandbox_fusion_url"] = config.sandbox_fusion.url
    count = min(config.num_processes or usable_cores(), max(len(rows), 1))
    message = row_scorer_keywords(scorer, options)
    pool: DeadlinePool[Scored | Failed] = DeadlinePool(
        "hone.rewards.transport:make_row_scorer", message, count
    )
    outcomes: list[Scored | Failed] = []
    try:
        with progress("score", len(rows)) as bar:
            for start in range(0, len(rows), CHUNK):
                part = rows[start : start + CHUNK]
                known = compare_ahead(scorer, part, options)
                jobs = [{"row": r, "known": k} for r, k in zip(part, known, strict=True)]
                outcomes += pool.run(jobs, config.timeout_s)
                bar.advance(len(part))
    finally:
        pool.close()
    return outcomes


def votes(scored: Sequence[Scored], responses: Sequence[str]) -> list[str | None]:
    """What each response of a row votes for: the scorer's `pred`, else what it answers.

    None casts no vote. Where no response of the row has an answer, their whole texts vote.
    """
    answers = [
        vote_of(outcome.extras["pred"]) if "pred" in outcome.extras else answer_of(text)
        for outcome, text in zip(scored, responses, strict=True)
    ]
    if any(answer is not None for answer in answers):
        return answers
    return [text.strip() or None for text in responses]


def answer_of(response: str) -> str | None:
    r"""What a response answers: its last <answer>, \boxed{}, #### line or number."""
    tagged = _TAG.findall(response)
    if tagged:
        return tagged[-1].strip() or None
    boxed = boxed_answer(response)
    if boxed is not None:
        return boxed.strip() or None
    for pattern in (_MARK, _NUMBER):
        found = pattern.findall(response)
        if found:
            return found[-1].strip().replace(",", "") or None
    return None


def summarise(
    attempts: Iterable[Attempts],
    config: EvaluationMetricsConfig,
    failures: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, SourceResult]:
    """Statistics of each data source, and of all rows where there are several."""
    everyone = list(attempts)
    groups: dict[str, list[Attempts]] = {}
    for one in everyone:
        groups.setdefault(one.source, []).append(one)
    failed = {name: dict(counts) for name, counts in (failures or {}).items()}
    results = {name: _result(group, config, failed.get(name, {})) for name, group in groups.items()}
    if len(groups) > 1:
        total = sum((Counter(counts) for counts in failed.values()), Counter())
        name = ALL if ALL not in groups else f"{ALL} {len(groups)} sources"
        results[name] = _result(everyone, config, dict(total))
        results[name].is_total = True
    return results


def _result(
    group: Sequence[Attempts], config: EvaluationMetricsConfig, failures: dict[str, int]
) -> SourceResult:
    fewest = min(len(one.scores) for one in group)
    chosen = list(config.pass_at) if config.pass_at is not None else [1, *sizes(fewest)]
    if too_many := [k for k in chosen if not 1 <= k <= fewest]:
        raise EvaluationError(
            f"metrics.pass_at has {too_many[0]}, but rows of {group[0].source} have {fewest} "
            f"responses; use 1 to {fewest}, or generate more (data.n_samples)"
        )
    columns: dict[str, list[float]] = {"mean": [float(np.mean(one.scores)) for one in group]}
    correct = [[float(s >= config.correct_from) for s in one.scores] for one in group]
    for k in dict.fromkeys(chosen):
        columns[f"pass@{k}"] = [best_at(values, k) for values in correct]
        if k > 1:
            columns[f"best@{k}"] = [best_at(one.scores, k) for one in group]
            columns[f"maj@{k}"] = [majority_at(one.scores, one.answers, k) for one in group]
    return SourceResult(
        len(group), sum(len(one.scores) for one in group), intervals(columns, config), failures
    )


def intervals(
    columns: Mapping[str, Sequence[float]], config: EvaluationMetricsConfig
) -> dict[str, Estimate]:
    """Means over rows with percentile intervals: rows are resampled, their responses stay together.

    Resampling rows that are all alike says nothing: see `_of_equal_rows`.
    """
    names, values = list(columns), np.array(list(columns.values()), dtype=np.float64)
    rows = values.shape[1]
    chooser = np.random.default_rng(config.seed)
    means = np.empty((config.bootstrap_samples, len(names)))
    for sample in range(config.bootstrap_samples):
        means[sample] = values[:, chooser.integers(rows, size=rows)].mean(axis=1)
    tail = (1.0 - config.confidence) / 2
    low, high = np.quantile(means, [tail, 1.0 - tail], axis=0)
    return {
        name: _of_equal_rows(float(values[i, 0]), rows, tail)
        if np.ptp(values[i]) < ROUNDING
        else Estimate(float(values[i].mean()), float(low[i]), float(high[i]))
        for i, name in enumerate(names)
    }


def _of_equal_rows(value: float, rows: int, tail: float) -> Estimate:
    """All rows 0 or all 1: the exact binomial (Clopper-Pearson) bound, for scores from 0 to 1.

    Had the mean been beyond it, so many rows alike would have come up with probability `tail` at most.
    """
    reach = tail ** (1.0 / rows)
    if abs(value) < ROUNDING:
        return Estimate(value, 0.0, 1.0 - reach)
    return Estimate(value, reach, 1.0) if abs(value - 1) < ROUNDING else Estimate(value, None, None)
