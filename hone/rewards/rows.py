"""The rows that scorers read: responses, answers in their text, and ground truths.

A response consists of the policy's text and observations (text of tools, searches and users):
`extra_info["transcript_segments"]` is a list of `{"role": "policy" | "observation", "text": …}`.
Answer tags are found in linear time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hone.rewards.failures import WrongSetting
from hone.tokenizer import Tokenizer
from hone.types import Fields, JsonObject, JsonValue, Settings

INVALID_PREDICTION = "[INVALID]"  # the `pred` of a response without an answer
POLICY, OBSERVATION = "policy", "observation"
_NUM_TURNS_COLUMNS = ("__num_turns__", "num_turns")
_ROLLOUT_SCORE_COLUMNS = ("reward_scores", "rollout_reward_scores")
_PYTHON_SCALARS = frozenset((int, float, str, bool, type(None)))

Segments = Sequence[Mapping[str, str]]


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
    columns: Settings,
    ids: list[list[int]],
    is_policy: list[list[bool]],
    tokenizer: Tokenizer | None,
    source_key: str,
    score_observations: bool = False,
) -> list[ScorerInput]:
    """Returns one row per response; with `score_observations`, the text includes observations.

    `ids` are the tokens of each response, and `is_policy` says which tokens the policy wrote.
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
            segments = _segments(token_ids, flags, tokenizer)
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


def _segments(ids: list[int], is_policy: list[bool], tokenizer: Tokenizer) -> list[dict[str, str]]:
    """Splits a response into segments by author."""
    segments, start = [], 0
    for is_policy_run, run in groupby(is_policy):
        end = start + len(list(run))
        text = tokenizer.decode(ids[start:end], skip_special_tokens=True)
        segments.append({"role": POLICY if is_policy_run else OBSERVATION, "text": text})
        start = end
    return segments


def extra_info_of(columns: Settings, reward_model: Settings, index: int) -> Fields:
    """Returns `extra_info` of a row, with fields of `reward_model` and rollout statistics."""
    extra = {k: v for k, v in reward_model.items() if k not in ("ground_truth", "style")}
    extra.update(_dict_at(columns, "extra_info", index))
    turns, calls, scores = (
        next((columns[name][index] for name in names if name in columns), None)
        for names in (_NUM_TURNS_COLUMNS, ("tool_call_counts",), _ROLLOUT_SCORE_COLUMNS)
    )
    extra["num_turns"] = extra.get("num_turns") if turns is None else turns
    extra["num_tool_calls"] = extra.get("num_tool_calls", 0) if calls is None else calls
    extra["rollout_reward_scores"] = {} if scores is None else scores
    return extra


def _dict_at(columns: Settings, name: str, index: int) -> Fields:
    value = columns[name][index] if name in columns else None
    return {} if value is None else dict(value)


def policy_text(segments: Segments) -> str:
    """Returns the policy's text, with a line break in place of each observation."""
    texts = [segment["text"] for segment in segments if segment["role"] == POLICY]
    return texts[0] if len(texts) == 1 else "\n".join(text for text in texts if text)


def policy_transcript_info(text: str) -> JsonObject:
    """Returns the `extra_info` of a response without observations."""
    return {"transcript": text, "transcript_segments": [{"role": POLICY, "text": text}]}


def last_answer(text: str) -> str | None:
    """Returns the content of the last closed `<answer>…</answer>` (it may span lines), or None."""
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    if start < 0:
        return None
    # A closing tag that nothing opened may follow the answer.
    return text[start + len("<answer>") : text.index("</answer>", start)].strip()


def all_answers(text: str, tag: str = "answer") -> list[str]:
    """Returns every answer from left to right, each from an opening tag to the next closing tag."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    answers = []
    start = text.find(opening)
    while start >= 0 and (end := text.find(closing, start)) >= 0:
        answers.append(text[start + len(opening) : end].strip())
        start = text.find(opening, end)
    return answers


def vote_of(pred: JsonValue) -> str | None:
    """Returns the vote of a response in maj@k, or None; `pred` is the answer that the scorer extracted."""
    return None if pred is None or str(pred).strip() in ("", INVALID_PREDICTION) else str(pred)


class GroundTruthError(ValueError):
    """A row's ground truth does not have the format that its scorer needs."""


def ground_truth_error(problem: str) -> GroundTruthError:
    return GroundTruthError(f"{problem}. Check reward_model.ground_truth of the data row.")


def decode_json(value: JsonValue) -> JsonValue:
    """Parses text that is a JSON object or array; returns any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def is_missing(value: JsonValue) -> bool:
    """Returns whether a value (its `target`, or every item) is null, NaN, blank, `null` or `[INVALID]`."""
    value = decode_json(to_python(value))
    if isinstance(value, Mapping):
        return not value or ("target" in value and is_missing(value["target"]))
    if isinstance(value, (list, tuple, set)):
        return all(is_missing(item) for item in value)
    if isinstance(value, str):
        return value.strip() in ("", "null", INVALID_PREDICTION)
    return value is None or value != value


def as_integer(value: JsonValue, name: str) -> int:
    """Converts `value` to an integer without rounding, or raises GroundTruthError."""
    if type(value) is int:
        return value
    value = to_python(value)
    try:
        number = int(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        number = None
    if number is None or (not isinstance(value, str) and number != value):
        raise ground_truth_error(f"{name} of ground_truth must be an integer; got {value!r:.80}")
    return number


def as_integers(value: JsonValue, name: str) -> list[int]:
    """Returns `value` as a list of integers, or raises GroundTruthError."""
    if not isinstance(value, list):
        raise ground_truth_error(
            f"{name} of ground_truth must be a list of integers; got {value!r:.80}"
        )
    return [as_integer(item, name) for item in value]


def as_mapping(value: JsonValue, *keys: str) -> JsonObject:
    """Returns `value` as a mapping with `keys`, or raises GroundTruthError."""
    decoded = decode_json(to_python(value))
    if isinstance(decoded, dict) and all(key in decoded for key in keys):
        return decoded
    description = sorted(decoded) if isinstance(decoded, dict) else repr(value)[:80]
    raise ground_truth_error(
        f"ground_truth must be a mapping with {', '.join(keys)}; got {description}"
    )


def to_python(value: Any) -> Any:
    """Converts NumPy scalars and arrays to Python values, inside containers too."""
    if type(value) in _PYTHON_SCALARS:
        return value
    if isinstance(value, (dict, Mapping)):
        return {k: v if type(v) in _PYTHON_SCALARS else to_python(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [v if type(v) in _PYTHON_SCALARS else to_python(v) for v in value]
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else to_python(tolist())
