"""Checks the signature of a scorer before training; the error message shows the expected signature."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial

from hone.plugins import definition_location, unwrap_function
from hone.rewards.scorer import (
    BATCH_ARGUMENTS,
    ROW_ARGUMENTS,
    ScorerSignatureError,
    accepted_arguments,
    accepted_names,
)
from hone.rewards.scorer_code import describe
from hone.types import Function, Settings


def check_signature(function: Function, arguments: Sequence[str], options: Settings) -> None:
    """Raises ScorerSignatureError if the scorer cannot be called with these arguments."""
    if not callable(function):
        raise ScorerSignatureError(
            f"the score function is {function!r:.80}, which cannot be called; "
            "name a function with custom_reward_function.name"
        )
    location = definition_location(function) or describe(function)
    if isinstance(function, partial):  # custom_reward_function.reward_kwargs are bound
        names = accepted_names(function.func)
        unknown_names = [] if names is None else sorted(set(function.keywords) - names)
        if unknown_names:
            raise ScorerSignatureError(
                f"{location}: the score function takes no argument "
                f"{', '.join(map(repr, unknown_names))}; check custom_reward_function.reward_kwargs"
            )
    names = accepted_names(function)
    call_arguments = accepted_arguments(function, dict.fromkeys(arguments), options)
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a builtin may have no signature; a wrong one fails in the first batch
    try:
        signature.bind(**call_arguments)
        if names is None or not names.isdisjoint(arguments):
            return
        problem = "it takes none of these"
    except TypeError as error:
        problem = str(error)
    name = getattr(unwrap_function(function), "__name__", "compute_score")
    raise ScorerSignatureError(
        f"{location}: the score function {name}{signature} cannot be called with "
        f"{', '.join(arguments)} ({problem}); write it as def {name}({', '.join(arguments[:-1])}, "
        f"{arguments[-1]}=None){_signature_hint(set(signature.parameters), arguments)}"
    )


def _signature_hint(names: set[str], arguments: Sequence[str]) -> str:
    """Returns a hint about a common mistake in a signature; the hint ends an error message."""
    if names & {"completion", "completions", "prompt", "prompts"}:
        return f". This looks like a TRL reward function: a completion is in {arguments[1]} here"
    if names & set(BATCH_ARGUMENTS) and tuple(arguments) != BATCH_ARGUMENTS:
        return ". Lists are passed by reward_model.reward_manager=batch"
    if names & set(ROW_ARGUMENTS) and tuple(arguments) == BATCH_ARGUMENTS:
        return ". Rows are passed one by one by reward_model.reward_manager=naive"
    if names > set(arguments):
        return ". Arguments of your own come from custom_reward_function.reward_kwargs"
    return ""
