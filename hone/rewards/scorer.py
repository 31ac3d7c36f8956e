"""Scores a response: reads the scorer's arguments from the batch, calls the scorer, and checks the result.

A response consists of the policy's text and observations (text of tools, searches and users):
`extra_info["transcript_segments"]` is a list of `{"role": "policy" | "observation", "text": …}`.
Each scorer gets the arguments that it accepts. Its exception becomes a `Failed`, which the manager counts.

The deadline of a call is soft, because Python cannot kill a running function. In the main thread, a
timer signal interrupts the call. In other threads, the call runs in a helper thread, which is abandoned
at the deadline. The processes of the prime manager have a hard deadline.
"""

from __future__ import annotations

import inspect
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from types import FrameType
from typing import Any, TypeVar

from hone.data.values import INVALID_PREDICTION, to_python
from hone.event_loop import raised_by_signal, run_coroutine
from hone.rewards.failures import Failed, Scored, SetupError, WrongSetting
from hone.rewards.scorer_code import describe, error_location, error_message
from hone.text import short_repr
from hone.tokenizer import Tokenizer
from hone.types import Columns, Fields, Function, JsonObject, JsonValue, Settings

T = TypeVar("T")

POLICY, OBSERVATION = "policy", "observation"
_NUM_TURNS_COLUMNS = ("__num_turns__", "num_turns")
_ROLLOUT_SCORE_COLUMNS = ("reward_scores", "rollout_reward_scores")

Segments = Sequence[Mapping[str, str]]

ROW_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""The arguments of the batch manager: lists with one item per response."""
FORMAT_ARGUMENTS = (
    "format_score",
    "structure_format_score",
    "final_format_score",
    "retrieval_score",
)
"""Format rewards: config keys under `reward_model` that only some scorers accept."""
OPTIONAL_ARGUMENTS = frozenset(FORMAT_ARGUMENTS) | {
    *("score_observations", "sandbox_fusion_url", "concurrent_semaphore", "memory_limit_mb"),
    *("reward_router_address", "reward_model_tokenizer"),
}
"""Arguments that a scorer gets if it accepts them; other scorers are called without them."""

_mishaps: ContextVar[dict[str, int] | None] = ContextVar("mishaps", default=None)


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


def read_rows(
    columns: Columns,
    ids: list[list[int]],
    is_policy: list[list[bool]],
    tokenizer: Tokenizer | None,
    source_key: str,
    score_observations: bool = False,
) -> list[ScorerInput]:
    """Returns one row per response; with `score_observations`, `solution_str` includes observations.

    `ids` are the tokens of each response, and `is_policy` says which tokens the policy wrote.
    `source_key` is the column of the data source.
    """
    if source_key not in columns:
        raise WrongSetting(
            f"the batch has no column {source_key!r} that selects the scorer; it has "
            f"{', '.join(sorted(columns)) or 'none'}. Set data.reward_fn_key to the right column."
        )
    assert tokenizer is not None, "a manager without a tokenizer cannot score a batch"
    rows = []
    for index, (token_ids, flags) in enumerate(zip(ids, is_policy, strict=True)):
        transcript = tokenizer.decode(token_ids, skip_special_tokens=True)
        segments = [{"role": POLICY, "text": transcript}]
        if not all(flags):
            segments = _split_segments(token_ids, flags, tokenizer)
        reward_model = _dict_at(columns, "reward_model", index)
        extra = extra_info_of(columns, reward_model, index)
        rows.append(
            ScorerInput(
                data_source=str(columns[source_key][index]),
                solution_str=transcript if score_observations else policy_text(segments),
                ground_truth=reward_model.get("ground_truth"),
                extra_info=extra | {"transcript": transcript, "transcript_segments": segments},
            )
        )
    return rows


def _split_segments(
    ids: list[int], is_policy: list[bool], tokenizer: Tokenizer
) -> list[dict[str, str]]:
    """Splits a response into runs of policy tokens and runs of observation tokens."""
    segments, start = [], 0
    for is_policy_run, flags in groupby(is_policy):
        end = start + len(list(flags))
        text = tokenizer.decode(ids[start:end], skip_special_tokens=True)
        segments.append({"role": POLICY if is_policy_run else OBSERVATION, "text": text})
        start = end
    return segments


def extra_info_of(columns: Columns, reward_model: Settings, index: int) -> Fields:
    """Returns `extra_info` of a row, with fields of `reward_model` and rollout statistics."""
    extra = {key: reward_model[key] for key in reward_model if key not in ("ground_truth", "style")}
    extra.update(_dict_at(columns, "extra_info", index))
    num_turns = _first_value(columns, _NUM_TURNS_COLUMNS, index)
    num_calls = _first_value(columns, ("tool_call_counts",), index)
    scores = _first_value(columns, _ROLLOUT_SCORE_COLUMNS, index)
    extra["num_turns"] = extra.get("num_turns") if num_turns is None else num_turns
    extra["num_tool_calls"] = extra.get("num_tool_calls", 0) if num_calls is None else num_calls
    extra["rollout_reward_scores"] = {} if scores is None else scores
    return extra


def _dict_at(columns: Columns, name: str, index: int) -> Fields:
    value = _first_value(columns, (name,), index)
    return {} if value is None else dict(value)


def _first_value(columns: Columns, names: Sequence[str], index: int) -> Any:
    """Returns the value of a row in the first of the columns that the batch has, or None."""
    return next((columns[name][index] for name in names if name in columns), None)


def policy_text(segments: Segments) -> str:
    """Returns the policy's text; a line break replaces each observation."""
    texts = [segment["text"] for segment in segments if segment["role"] == POLICY]
    return texts[0] if len(texts) == 1 else "\n".join(text for text in texts if text)


def policy_transcript_info(text: str) -> JsonObject:
    """Returns the `extra_info` of a response without observations."""
    return {"transcript": text, "transcript_segments": [{"role": POLICY, "text": text}]}


def last_answer(text: str) -> str | None:
    """Returns the content of the last closed `<answer>…</answer>`, which may span lines, or None."""
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    if start < 0:
        return None
    # A closing tag without an opening tag may follow the answer.
    return text[start + len("<answer>") : text.index("</answer>", start)].strip()


def all_answers(text: str, tag: str = "answer") -> list[str]:
    """Returns the content of every `<tag>…</tag>` in order; an element ends at the next closing tag."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    answers = []
    start = text.find(opening)
    while start >= 0 and (end := text.find(closing, start)) >= 0:
        answers.append(text[start + len(opening) : end].strip())
        start = text.find(opening, end)
    return answers


def vote_of(pred: JsonValue) -> str | None:
    """Returns the answer that a scorer extracted, as a vote for maj@k, or None for an invalid answer."""
    return None if pred is None or str(pred).strip() in ("", INVALID_PREDICTION) else str(pred)


def score_row(function: Function, row: ScorerInput, options: Settings) -> Scored | Failed:
    """Scores one row. A SetupError is raised under every failure policy."""
    try:
        with counted_mishaps() as mishaps:
            result = call_scorer(function, row.arguments(), options)
        return read_result(result, mishaps)
    except (Exception, SystemExit) as error:  # a user's scorer may raise anything
        return failure_of(error, function, options)


def read_result(result: Any, mishaps: Mapping[str, int] | None = None) -> Scored | Failed:
    """Converts the result of a scorer: a number, a dict with `score`, a tuple (score, …) or a Failed."""
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
    value = value.item() if getattr(value, "shape", None) == (1,) else value  # for NumPy 2.4
    if isinstance(value, (str, bytes)):
        return Failed("bad_return", f"text ({short_repr(value)}), not a number")
    try:
        score = float(value)
    except OverflowError:
        return Failed("inf", "the score is larger than any float")
    except Exception:  # a user's object may raise anything
        detail = f"{short_repr(value)} of type {type(value).__name__}, not a number"
        return Failed("bad_return", detail)
    if math.isnan(score):
        return Failed("nan", "the score is NaN")
    if math.isinf(score):
        return Failed("inf", f"the score is {score}")
    return Scored(score, extras, dict(mishaps or {}))


def failure_of(error: BaseException, function: Function, options: Settings | None = None) -> Failed:
    """Returns the failure for an exception; re-raises a SetupError, and a SystemExit of a signal handler."""
    if isinstance(error, SetupError) or (isinstance(error, SystemExit) and raised_by_signal(error)):
        raise error
    location = error_location(error, function)
    where = f" at {location}" if location else ""
    return Failed(
        "exception",
        f"{describe(function)} raised {error_message(error, function, options)}{where}",
        tuple(cls.__name__ for cls in type(error).__mro__),
    )


class ScorerSignatureError(SetupError, TypeError):
    """A scorer's signature does not fit the arguments that the manager passes."""


def call_scorer(function: Function, arguments: Settings, options: Settings) -> Any:
    """Calls a scorer with the arguments that it accepts; runs the coroutine of an async scorer."""
    result = function(**accepted_arguments(function, arguments, options))
    return run_coroutine(result) if inspect.iscoroutine(result) else result


def accepted_arguments(function: Function, arguments: Settings, options: Settings) -> Fields:
    """Returns the arguments and options that the scorer accepts; raises an error for an unknown option."""
    names = accepted_names(function)
    if names is None:
        return {**arguments, **options}
    for name in options:
        if name not in names and name not in OPTIONAL_ARGUMENTS:
            raise ScorerSignatureError(
                f"scorer {describe(function)} takes no argument {name!r}; it takes "
                f"{', '.join(sorted(names - set(ROW_ARGUMENTS))) or 'none'}. Check "
                "reward_model.reward_kwargs and custom_reward_function.reward_kwargs."
            )
    return {name: value for name, value in {**arguments, **options}.items() if name in names}


def accepted_names(function: Function) -> frozenset[str] | None:
    """Returns the keyword names that a function accepts; None if it accepts all or has no signature."""
    try:
        return _accepted_names(function)
    except TypeError:  # an object that is not hashable cannot be cached
        return _accepted_names.__wrapped__(function)


@lru_cache(maxsize=1024)
def _accepted_names(function: Function) -> frozenset[str] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    keyword_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(item.name for item in parameters if item.kind in keyword_kinds)


class counted_mishaps:
    """A context manager that counts the mishaps in its block by reason; outer blocks count them too."""

    def __enter__(self) -> dict[str, int]:
        self._outer_counts, self._counts = _mishaps.get(), dict[str, int]()
        _mishaps.set(self._counts)
        return self._counts

    def __exit__(self, *_: object) -> None:
        _mishaps.set(self._outer_counts)
        for reason, count in self._counts.items():
            count_mishap(reason, count)


def count_mishap(reason: str, count: int = 1) -> None:
    """Counts a mishap: a problem that does not stop a scorer, such as a timeout of a symbolic comparison."""
    counts = _mishaps.get()
    if counts is not None:
        counts[reason] = counts.get(reason, 0) + count


class DeadlineExceeded(BaseException):
    """Raised at the deadline; a BaseException, which `except Exception` in a scorer does not catch."""


def call_with_deadline(function: Callable[[], T], timeout_s: float) -> T | Failed:
    """Returns `function()`, or a failure after `timeout_s` seconds."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    call = _call_with_timer if is_main_thread else _call_in_thread
    try:
        return call(function, timeout_s)
    except DeadlineExceeded:
        return Failed("timeout", f"no score after {timeout_s:g} s")


def _call_in_thread(function: Callable[[], T], timeout_s: float) -> T:
    future: Future[T] = Future()

    def run_function() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # `future.result()` raises it in the caller's thread
            future.set_exception(error)

    thread = threading.Thread(target=run_function, name="hone-score", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise DeadlineExceeded
    return future.result()


def _call_with_timer(function: Callable[[], T], timeout_s: float) -> T:
    def on_timer(signal_number: int, frame: FrameType | None) -> None:
        raise DeadlineExceeded

    outer_handler = signal.signal(signal.SIGALRM, on_timer)
    # The timer repeats, because a bare `except` in a scorer may catch the first signal.
    outer_remaining_s, outer_interval_s = signal.setitimer(
        signal.ITIMER_REAL, timeout_s, max(timeout_s, 1.0)
    )
    start_s = time.monotonic()
    try:
        try:
            return function()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    finally:  # again, because the signal may have interrupted the first `finally`
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, outer_handler)
        if outer_remaining_s:
            outer_remaining_s = max(outer_remaining_s - (time.monotonic() - start_s), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, outer_remaining_s, outer_interval_s)
