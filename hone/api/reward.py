"""Combines a user's rewards (functions or rule names, with optional weights) into one score function.

A function receives the arguments that its parameters name: the response (`completion`, `response`,
`solution_str`), the answer (`answer`, `ground_truth`, `solution`), `prompt`, `data_source`, `extra_info`
and other columns of the row. If it names none of these, it receives response and answer by position. A TRL
reward function (`completions`) receives lists of length one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias, Union

from hone.rewards.calling import ScorerSignatureError, is_async
from hone.rewards.failures import Failed, RewardError, Scored
from hone.rewards.outcome import read_result
from hone.rewards.places import describe
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
OTHER_ARGUMENTS = ("prompt", "data_source", "extra_info")


class Part(NamedTuple):
    """One reward, with its name in the metrics and its weight in the sum."""

    name: str
    score: Scorer
    weight: float

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The function's parameters; a function without a signature takes response and answer."""
        try:
            return inspect.signature(self.score).parameters  # type: ignore[arg-type]
        except (ValueError, TypeError):
            return inspect.signature(lambda text, answer: None).parameters


def reward_parts(reward: Reward) -> list[Part]:
    """Return the rewards as parts with unique names."""
    if isinstance(reward, str) or callable(reward):
        reward = [reward]
    parts: list[Part] = []
    for pair in reward.items() if isinstance(reward, Mapping) else reward:
        score, weight = pair if isinstance(pair, tuple) else (pair, 1.0)
        if not (isinstance(score, str) or callable(score)) or not isinstance(weight, (int, float)):
            raise ScorerSignatureError(
                f"a reward is a function or a name, with or without a weight, not {pair!r:.80}"
            )
        if isinstance(score, str):
            scorer_of(score)  # raises for an unknown name
        name = score if isinstance(score, str) else getattr(score, "__name__", type(score).__name__)
        name, names = name.strip("<>"), {part.name for part in parts}
        name = next(n for n in (name, *(f"{name}_{i}" for i in range(2, 99))) if n not in names)
        parts.append(Part(name, score, weight))
    return parts


def reads_prompt(parts: Sequence[Part]) -> bool:
    """Return whether a function reads the prompt, or TRL completions, whose format is the prompt's."""
    return any({"prompt", "completions"} & set(part.parameters) for part in parts)


def as_score_function(parts: Sequence[Part], columns: Collection[str]) -> Function:
    """Return one function with verl's signature; `columns` are the keys of `extra_info`."""
    calls = [_reward_call(part, columns) for part in parts]

    def results(source: str, text: str, answer: JsonValue, extra: Fields) -> list[Result]:
        row = {**extra, "data_source": source, "extra_info": extra}
        row |= dict.fromkeys(RESPONSE_NAMES, text) | dict.fromkeys(ANSWER_NAMES, answer)
        return [call(row) for call in calls]

    def score(
        data_source: str, solution_str: str, ground_truth: JsonValue, extra_info: Fields
    ) -> Result:
        return _weighted_sum(results(data_source, solution_str, ground_truth, extra_info), parts)

    async def score_async(
        data_source: str, solution_str: str, ground_truth: JsonValue, extra_info: Fields
    ) -> Result:
        values = results(data_source, solution_str, ground_truth, extra_info)
        return _weighted_sum([await r if inspect.isawaitable(r) else r for r in values], parts)

    is_asynchronous = any(callable(part.score) and is_async(part.score) for part in parts)
    function: Function = score_async if is_asynchronous else score
    if len(parts) == 1 and callable(parts[0].score):
        # Error messages then name the user's function; managers still read the signature of the wrapper.
        vars(function)["__signature__"] = inspect.signature(function)
        vars(function)["__wrapped__"] = parts[0].score
    vars(function)["has_own_deadline"] = any(
        getattr(part.score, "has_own_deadline", False) for part in parts
    )
    return function


def _weighted_sum(results: Sequence[Result], parts: Sequence[Part]) -> Result:
    """Return the weighted sum and each part's score; a single part of weight 1 is returned unchanged.

    A part that returns None counts as 0, as in TRL.
    """
    if len(parts) == 1 and parts[0].weight == 1:
        return results[0]
    scores: dict[str, float] = {}
    for part, result in zip(parts, results, strict=True):
        outcome = read_result(result) if result is not None else Scored(0.0)
        if isinstance(outcome, Failed):
            raise RewardError(f"{part.name}: {outcome.detail}")
        scores[part.name] = outcome.score
    return {"score": sum(part.weight * scores[part.name] for part in parts), **scores}


def _reward_call(part: Part, columns: Collection[str]) -> Callable[[Row], Result]:
    """Return a function that calls one reward on a row."""
    score, known = part.score, {*RESPONSE_NAMES, *ANSWER_NAMES, *OTHER_ARGUMENTS, *columns}
    if isinstance(score, str):
        return _rule_call(score)
    args = [p for p in part.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if "completions" in part.parameters:
        takes_kwargs = any(p.kind is p.VAR_KEYWORD for p in part.parameters.values())
        extra = {"prompts", *ANSWER_NAMES, *columns} if takes_kwargs else set()
        return _trl_call(score, {p.name for p in args} | extra)
    names = [p.name for p in args if p.name in known]
    required = [p.name for p in args if p.default is p.empty]
    if not names and len(required) in (1, 2):
        return lambda row: score(*(row["completion"], row["answer"])[: len(required)])
    if unknown := [name for name in required if name not in known]:
        others = ", ".join(sorted(known - {*RESPONSE_NAMES, *ANSWER_NAMES}))
        raise ScorerSignatureError(
            f"the reward function {describe(score)} takes {', '.join(unknown)}, which no row has; it may "
            f"take completion, answer, {others}"
        )
    return lambda row: score(**{name: row.get(name) for name in names})


def _rule_call(name: str) -> Callable[[Row], Result]:
    """Return a function that calls the built-in rule of this name on a row."""
    full_mark = scorer_of(name)[0].full_mark

    def call(row: Row) -> Result:
        result = default_compute_score(name, row["completion"], row["answer"], row["extra_info"])
        if isinstance(result, dict):
            return result
        return {"score": result, "acc": float(result >= full_mark)}

    return call


def _trl_call(score: Function, names: Collection[str]) -> Callable[[Row], Result]:
    """Return a function that calls a TRL reward on a row, with lists; a chat prompt has a chat completion."""

    def call(row: Row) -> Result:
        is_text, text = isinstance(row["prompt"], str), row["completion"]
        chat = [{"role": "assistant", "content": text}]
        row = {**row, "prompts": row["prompt"], "completions": text if is_text else chat}
        return score(**{name: [row.get(name)] for name in names})[0]

    return call
