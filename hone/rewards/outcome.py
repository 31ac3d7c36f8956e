"""Scores one response, and checks and converts the scorer's result.

A scorer's exception becomes a `Failed`; the manager counts it and applies the failure policy. A
response consists of text that the model wrote and observations (text of tools, searches and users):
`extra_info["transcript_segments"]` is a list of `{"role": "policy" | "observation", "text": …}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from hone.event_loop import raised_by_signal
from hone.rewards.answers import INVALID_PREDICTION, to_python
from hone.rewards.calling import (
    call_scorer,
    counted_mishaps,
    describe,
    error_location,
    unwrap_function,
)
from hone.rewards.failures import Failed, Scored, SetupError
from hone.rewards.scores import symbolic, table
from hone.text import error_text, printable, short_repr
from hone.types import Fields, Function, JsonObject, JsonValue, Settings

POLICY, OBSERVATION = "policy", "observation"

Segments = Sequence[Mapping[str, str]]
Comparisons = dict[symbolic.Pair, bool | Failed]
"""The results of symbolic comparisons by answer and reference."""


@dataclass(frozen=True)
class ScorerInput:
    """One response, as the arguments of a scorer."""

    data_source: str
    solution_str: str
    ground_truth: JsonValue
    extra_info: Fields

    def arguments(self) -> Fields:
        """Returns the scorer's keyword arguments."""
        return dict(vars(self))


def policy_text(segments: Segments) -> str:
    """Returns the policy's text, with a line break in place of each observation."""
    texts = [segment["text"] for segment in segments if segment["role"] == POLICY]
    return texts[0] if len(texts) == 1 else "\n".join(text for text in texts if text)


def policy_transcript_info(text: str) -> JsonObject:
    """Returns the `extra_info` of a response without observations."""
    return {"transcript": text, "transcript_segments": [{"role": POLICY, "text": text}]}


def segments_of(solution_str: str, extra_info: Settings | None) -> Segments:
    """Returns the segments of a row; a row without them has one, the policy's whole text."""
    segments = (extra_info or {}).get("transcript_segments")
    return segments if segments else [{"role": POLICY, "text": solution_str}]


def score_row(compute_score: Function, row: ScorerInput, options: Settings) -> Scored | Failed:
    """Scores one row. A SetupError is raised under every failure policy."""
    function = compute_score
    if function is table.default_compute_score:
        _, function = table.scorer_of(row.data_source)
    try:
        with counted_mishaps() as mishaps:
            result = call_scorer(function, row.arguments(), options)
        return read_result(result, mishaps)
    except SetupError:
        raise
    except (Exception, SystemExit) as error:  # a user's scorer may raise anything
        if isinstance(error, SystemExit) and raised_by_signal(error):
            raise  # not the scorer ends the run, but a scheduler
        return exception_failure(error, function)


def exception_failure(error: BaseException, compute_score: Function) -> Failed:
    """Returns the failure for an exception, with the line in the user's code."""
    location = error_location(error, compute_score)
    where = f" at {location}" if location else ""
    return Failed(
        "exception",
        # The message may quote the response, whose control characters would reach the terminal.
        f"{describe(compute_score)} raised {printable(error_text(error))}{where}",
        tuple(cls.__name__ for cls in type(error).__mro__),
    )


def read_result(result: Any, mishaps: Mapping[str, int] | None = None) -> Scored | Failed:
    """Converts a scorer's result: a number, a dict with `score`, a tuple (score, …), or Failed."""
    if isinstance(result, Failed):
        return result
    extras: JsonObject = {}
    value = result
    if isinstance(result, Mapping):
        if "score" not in result:
            return Failed("bad_return", f"a dict without 'score': keys {sorted(map(str, result))}")
        value = result["score"]
        extras = {str(key): to_python(item) for key, item in result.items() if key != "score"}
    elif isinstance(result, (tuple, list)):
        if not result:
            return Failed("bad_return", "an empty sequence")
        value = result[0]
    if isinstance(value, (str, bytes)):
        return Failed("bad_return", f"text ({short_repr(value)}), not a number")
    try:
        score = float(value)
    except OverflowError:
        return Failed("inf", "the score is larger than any float")
    except Exception:  # a user's object may raise anything
        return Failed(
            "bad_return", f"{short_repr(value)} of type {type(value).__name__}, not a number"
        )
    if math.isnan(score):
        return Failed("nan", "the score is NaN")
    if math.isinf(score):
        return Failed("inf", f"the score is {score}")
    return Scored(score, extras, dict(mishaps or {}))


def vote_of(pred: JsonValue) -> str | None:
    """Returns the vote of a response in maj@k, or None; `pred` is the answer that the scorer extracted."""
    return None if pred is None or str(pred).strip() in ("", INVALID_PREDICTION) else str(pred)


def precompute_comparisons(
    compute_score: Function, rows: Sequence[ScorerInput], options: Settings
) -> list[Comparisons]:
    """Makes the symbolic comparisons of the built-in rules together, within one time limit.

    This process caches the results; they are also returned per row, for another process. A user's
    score function is not called, because it may have side effects.
    """
    function = unwrap_function(compute_score)
    if function is table.default_compute_score:
        entries = [table.find(row.data_source) for row in rows]
        is_symbolic = [entry is not None and entry.symbolic for entry in entries]
    else:
        module = getattr(function, "__module__", None)
        is_symbolic = [module in table.SYMBOLIC_MODULES] * len(rows)
    if not any(is_symbolic):
        return [{} for _ in rows]
    pairs_by_row: list[list[symbolic.Pair]] = [[] for _ in rows]
    for index in compress(range(len(rows)), is_symbolic):
        with symbolic.recording_pairs() as pairs_by_row[index]:
            score_row(compute_score, rows[index], options)
    symbolic.compare_all(pair for row_pairs in pairs_by_row for pair in row_pairs)
    return [symbolic.cached_results(row_pairs) for row_pairs in pairs_by_row]
