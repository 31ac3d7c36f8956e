"""Calls a plain or async scorer with the keyword arguments that it accepts.

Built-in, user-defined and registered scorers have different signatures; only this file handles
that. It neither catches the scorer's exceptions nor checks its result.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from hone.event_loop import run_coroutine
from hone.rewards.failures import SetupError
from hone.rewards.places import definition_location, describe, unwrap_function
from hone.types import Fields, Function, Settings

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
_SERVICE_ARGUMENTS = (
    "sandbox_fusion_url",
    "concurrent_semaphore",
    "memory_limit_mb",
    "reward_router_address",
    "reward_model_tokenizer",
)
OPTIONAL_ARGUMENTS = frozenset({*FORMAT_ARGUMENTS, *_SERVICE_ARGUMENTS, "score_observations"})
"""Arguments that a scorer gets if it accepts them; other scorers are called without them."""


class ScorerSignatureError(SetupError, TypeError):
    """A scorer's signature does not fit the arguments that the manager passes."""


def is_async(function: Function) -> bool:
    """Returns whether a call of the function or object returns a coroutine."""
    unwrapped = unwrap_function(function)
    call = getattr(type(unwrapped), "__call__", None)  # noqa: B004
    return any(map(inspect.iscoroutinefunction, (function, unwrapped, call)))


def accepted_names(function: Function) -> frozenset[str] | None:
    """Returns the accepted keyword names; None if all are accepted or there is no signature."""
    try:
        return _accepted_names(function)
    except TypeError:  # the object is not hashable, so it cannot be cached
        return _accepted_names.__wrapped__(function)


@lru_cache(maxsize=1024)
def _accepted_names(function: Function) -> frozenset[str] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    keyword_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in keyword_kinds)


def init_parameter_names(cls: type) -> frozenset[str]:
    """Returns the parameter names of `__init__` in a class and its bases."""
    names: set[str] = set()
    for ancestor in cls.__mro__:
        if "__init__" in vars(ancestor) and ancestor is not object:
            names.update(inspect.signature(vars(ancestor)["__init__"]).parameters)
    return frozenset(names - {"self", "args", "kwargs", "options"})


def call_scorer(function: Function, arguments: Settings, options: Settings) -> Any:
    """Calls a scorer with the arguments it accepts, and awaits a coroutine."""
    result = function(**accepted_arguments(function, arguments, options))
    return run_coroutine(result) if inspect.iscoroutine(result) else result


def accepted_arguments(function: Function, arguments: Settings, options: Settings) -> Fields:
    """Returns the arguments and options that the scorer accepts; an unknown option is an error."""
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
        unknown = [] if names is None else sorted(set(function.keywords) - names)
        if unknown:
            raise ScorerSignatureError(
                f"{location}: the score function takes no argument "
                f"{', '.join(map(repr, unknown))}; check custom_reward_function.reward_kwargs"
            )
    names = accepted_names(function)
    call_arguments = accepted_arguments(function, dict.fromkeys(arguments), options)
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a builtin has no signature, so errors appear only in the first batch
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
    """Returns the end of the error message: a hint about a common mistake in the signature."""
    if names & {"completion", "completions", "prompt", "prompts"}:
        return f". This looks like a TRL reward function: a completion is in {arguments[1]} here"
    if names & set(BATCH_ARGUMENTS) and tuple(arguments) != BATCH_ARGUMENTS:
        return ". Lists are passed by reward_model.reward_manager=batch"
    if names & set(ROW_ARGUMENTS) and tuple(arguments) == BATCH_ARGUMENTS:
        return ". Rows are passed one by one by reward_model.reward_manager=naive"
    if names > set(arguments):
        return ". Arguments of your own come from custom_reward_function.reward_kwargs"
    return ""
