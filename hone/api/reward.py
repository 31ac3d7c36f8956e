"""Combines a user's rewards (functions or rule names, with optional weights) into one score function.

A function receives the arguments that its parameters name: the response (`completion`, `response`,
`solution_str`), the answer (`answer`, `ground_truth`, `solution`), `prompt`, `data_source`, `extra_info`
and other columns of the row. A function with one parameter of another name receives the
response; other unknown names are refused. A TRL reward function (`completions`) receives lists of length one.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias, Union

from hone.plugins import definition_location
from hone.rewards.async_scorer import is_async
from hone.rewards.failures import Failed, RewardError, Scored
from hone.rewards.scorer import ScorerSignatureError, read_result
from hone.rewards.scorer_code import describe
from hone.rewards.scores.table import default_compute_score, scorer_of
from hone.types import Fields, Function, JsonValue, Row

Scorer: TypeAlias = str | Function
Reward: TypeAlias = Union[
    Scorer, "Sequence[Scorer | tuple[Scorer, float]]", "Mapping[Scorer, float]"
]
Result: TypeAlias = Union[float, "Mapping[str, JsonValue]", "Sequence[float]", None]
"""A number, a dict with `score`, or a sequence that begins with the score."""

RESPONSE_NAMES = ("completion", "response", "solution_str")
ANSWER_NAMES = ("answer", "ground_truth", "solution")
OTHER_NAMES = ("prompt", "data_source", "extra_info")


class RewardPart(NamedTuple):
    """A reward function or rule, with its name in the metrics and its weight in the sum."""

    name: str
    scorer: Scorer
    weight: float

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The function's parameters; without a signature, its only one is the response."""
        try:
            return inspect.signature(self.scorer).parameters  # type: ignore[arg-type]
        except (ValueError, TypeError):
            return inspect.signature(lambda text: None).parameters


def reward_parts(reward: Reward) -> list[RewardPart]:
    """Returns the rewards as parts with unique names."""
    if isinstance(reward, str) or callable(reward):
        reward = [reward]
    if not isinstance(reward, (Mapping, Sequence)):
        raise ScorerSignatureError(
            f"a reward is a function, a name, or a list or dict of them, not {reward!r:.80}"
        )
    parts: list[RewardPart] = []
    # A sum is reported as `score`, so none of its parts has this name.
    reserved_names = {"score"} if len(reward) > 1 else set()
    for entry in reward.items() if isinstance(reward, Mapping) else reward:
        scorer, weight = entry if isinstance(entry, tuple) else (entry, 1.0)
        is_scorer = isinstance(scorer, str) or callable(scorer)
        if not is_scorer or not isinstance(weight, (int, float)):
            raise ScorerSignatureError(
                f"a reward is a function or a name, with or without a weight, not {entry!r:.80}"
            )
        if isinstance(scorer, str):
            scorer_of(scorer)  # raises for an unknown name
            name = scorer
        else:
            name = getattr(scorer, "__name__", type(scorer).__name__)
        name = name.strip("<>")  # Python names a lambda "<lambda>"
        other_names = {part.name for part in parts} | reserved_names
        candidates = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2)))
        unique_name = next(candidate for candidate in candidates if candidate not in other_names)
        parts.append(RewardPart(unique_name, scorer, weight))
    return parts


def reads_prompt(parts: Sequence[RewardPart]) -> bool:
    """Whether a function takes the prompt, or TRL's `completions`, which have the prompt's format."""
    return any({"prompt", "completions"} & set(part.parameters) for part in parts)


def as_score_function(
    parts: Sequence[RewardPart], columns: Collection[str], answer_columns: Collection[str] = ()
) -> Function:
    """Returns one score function with verl's signature; `columns` are the keys of `extra_info`.

    `answer_columns` are columns, such as `solution`, whose name would otherwise mean the answer.
    """
    calls = [_reward_call(part, columns) for part in parts]

    def call_parts(
        data_source: str, response: str, answer: JsonValue, extra_info: Fields
    ) -> list[Result]:
        """Returns the result of each part; the result of an async function is awaitable."""
        row = {**extra_info, "data_source": data_source, "extra_info": extra_info}
        row |= dict.fromkeys(RESPONSE_NAMES, response)
        row |= {name: answer for name in ANSWER_NAMES if name not in answer_columns}
        return [call(row) for call in calls]

    def score(
        data_source: str, solution_str: str, ground_truth: JsonValue, extra_info: Fields
    ) -> Result:
        return _weighted_sum(call_parts(data_source, solution_str, ground_truth, extra_info), parts)

    async def score_async(
        data_source: str, solution_str: str, ground_truth: JsonValue, extra_info: Fields
    ) -> Result:
        results = call_parts(data_source, solution_str, ground_truth, extra_info)
        awaited_results = [
            await result if inspect.isawaitable(result) else result for result in results
        ]
        return _weighted_sum(awaited_results, parts)

    has_async_part = any(callable(part.scorer) and is_async(part.scorer) for part in parts)
    function: Function = score_async if has_async_part else score
    if len(parts) == 1 and callable(parts[0].scorer):
        # With `__wrapped__`, error messages name the user's function; managers read `__signature__`.
        vars(function)["__signature__"] = inspect.signature(function)
        vars(function)["__wrapped__"] = parts[0].scorer
    vars(function)["has_own_deadline"] = any(
        getattr(part.scorer, "has_own_deadline", False) for part in parts
    )
    return function


def _weighted_sum(results: Sequence[Result], parts: Sequence[RewardPart]) -> Result:
    """Returns the weighted sum and the score of each part.

    The result of a single part of weight 1 is returned unchanged. As in TRL, None counts as 0.
    """
    if len(parts) == 1 and parts[0].weight == 1:
        return results[0]
    scores: dict[str, float] = {}
    for part, result in zip(parts, results, strict=True):
        outcome = read_result(result) if result is not None else Scored(0.0)
        if isinstance(outcome, Failed):
            raise RewardError(f"{part.name}: {outcome.detail}")
        scores[part.name] = outcome.score
    return {**scores, "score": sum(part.weight * scores[part.name] for part in parts)}


def _reward_call(part: RewardPart, columns: Collection[str]) -> Callable[[Row], Result]:
    """Returns a function that scores a row with one reward."""
    scorer = part.scorer
    known_names = {*RESPONSE_NAMES, *ANSWER_NAMES, *OTHER_NAMES, *columns}
    if isinstance(scorer, str):
        return _rule_call(scorer)
    named_parameters = [
        p for p in part.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    is_trl = "completions" in part.parameters
    if is_trl:
        known_names |= {"prompts", "completions"}
    names = [p.name for p in named_parameters if p.name in known_names]
    required_names = [p.name for p in named_parameters if p.default is p.empty]
    if not names and len(required_names) == 1:  # a reward of one argument scores the completion
        return lambda row: scorer(row["completion"])
    unknown_names = [name for name in required_names if name not in known_names]
    if unknown_names:
        column_names = ", ".join(sorted(known_names - {*RESPONSE_NAMES, *ANSWER_NAMES}))
        location = definition_location(scorer)
        raise ScorerSignatureError(
            f"{f'{location}: ' if location else ''}the reward function {describe(scorer)} takes "
            f"{', '.join(unknown_names)}, which no row has; it may take completion, answer, {column_names}"
        )
    if is_trl:
        takes_kwargs = any(p.kind is p.VAR_KEYWORD for p in part.parameters.values())
        kwargs_names = {"prompts", *ANSWER_NAMES, *columns} if takes_kwargs else set()
        return _trl_call(scorer, {*names, *kwargs_names})
    return lambda row: scorer(**{name: row.get(name) for name in names})


def _rule_call(name: str) -> Callable[[Row], Result]:
    """Returns a function that scores a row with the built-in rule of this name."""
    full_mark = scorer_of(name)[0].full_mark

    def call(row: Row) -> Result:
        result = default_compute_score(name, row["completion"], row["answer"], row["extra_info"])
        if isinstance(result, dict):
            return result
        return {"score": result, "acc": float(result >= full_mark)}

    return call


def _trl_call(function: Function, names: Collection[str]) -> Callable[[Row], Result]:
    """Returns a function that calls a TRL reward function on a row, with lists of length one.

    The completion is text for a text prompt, and a chat message for a chat prompt.
    """

    def call(row: Row) -> Result:
        is_text, text = isinstance(row["prompt"], str), row["completion"]
        chat = [{"role": "assistant", "content": text}]
        row = {**row, "prompts": row["prompt"], "completions": text if is_text else chat}
        return function(**{name: [row.get(name)] for name in names})[0]

    return call
