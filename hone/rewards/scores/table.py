"""The table of scorers by `data_source`, and `default_compute_score`, which calls the scorer of a row.

Registered scorers take precedence. Exact names precede prefixes and substrings, as in verl.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hone.data.values import is_missing
from hone.plugins import load_object
from hone.rewards.failures import SetupError
from hone.rewards.ground_truth import ground_truth_error
from hone.rewards.scorer import call_scorer
from hone.suggestions import suggestion
from hone.types import Fields, Function, JsonValue, Settings

_PACKAGE = "hone.rewards.scores"
_MATCH_KINDS = ("exact", "prefix", "substring")
_SEARCH_SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
_MATH_SETS = (
    *("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
    *("math500", "amc23", "olympiadbench", "minerva_math", "svamp", "asdiv", "mawps"),
)
_AIME_SETS = ("Maxwell-Jia/AIME_2024", "yentinglin/aime_2025", "HuggingFaceH4/aime_2024")
_CONTEST_SETS = ("codecontests", "apps", "codeforces", "taco")
_ASSERT_SETS = (
    *("mbpp", "google-research-datasets/mbpp", "humaneval", "openai/openai_humaneval", "leetcode"),
)
_NUMINA_SETS = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")


class UnknownSourceError(SetupError, NotImplementedError):
    """A row's data source has no scorer."""


@dataclass(frozen=True)
class Entry:
    """The scorer of a data source."""

    target: str | Function
    """`"module:function"`, or the function itself."""
    full_mark: float = 1.0
    """The lowest score of a right answer (`acc` = 1), for a scorer that returns only a number."""
    needs_ground_truth: bool = True
    """Whether a row needs a ground truth; some scorers read tests in `extra_info` instead."""


def _entries(
    module: str, *sources: str, function: str = "compute_score", **options: Any
) -> dict[str, Entry]:
    return {source: Entry(f"{_PACKAGE}.{module}:{function}", **options) for source in sources}


_EXACT: dict[str, Entry] = {
    **_entries("gsm8k", "openai/gsm8k", "gsm8k"),
    **_entries("math_reward", *_MATH_SETS),
    **_entries("math_dapo", "math_dapo", "math", "math_dapo_reasoning", *_AIME_SETS),
    **_entries("prime_math", *(f"numina_{name}" for name in _NUMINA_SETS)),
    **_entries("prime_code", *_CONTEST_SETS, function="score_details", needs_ground_truth=False),
    **_entries("geo3k", "hiyouga/geometry3k", function="score_details"),
    **_entries("qa_em", *_SEARCH_SETS, function="score_details"),
    **_entries("qa_em", *(f"searchR1_{name}" for name in _SEARCH_SETS), function="score_details"),
    **_entries("asserts", *_ASSERT_SETS, needs_ground_truth=False),
}
SYMBOLIC_MODULES = frozenset(
    f"{_PACKAGE}.{name}" for name in ("math_reward", "prime_math", "geo3k")
)
"""The modules of rules that compare expressions symbolically."""
_BUILT_IN: dict[str, dict[str, Entry]] = {
    "exact": _EXACT,
    "prefix": _entries("math_dapo", "aime"),
    "substring": {
        **_entries("countdown", "countdown"),
        **_entries("arithmetic", "multiply", "arithmetic"),
    },
}
_registered: dict[str, dict[str, Entry]] = {match: {} for match in _MATCH_KINDS}


def register_score(
    source: str,
    target: str | Function,
    *,
    match: str = "exact",
    full_mark: float = 1.0,
    needs_ground_truth: bool = False,
) -> None:
    """Sets the scorer of `source`: a function, `"pkg.mod:name"` or `"file.py:name"`.

    The function gets those of data_source, solution_str, ground_truth and extra_info that it accepts.
    The entry replaces a built-in entry. `match` may be exact, prefix or substring.
    """
    if match not in _MATCH_KINDS:
        raise ValueError(f"match={match!r} is not known; use one of {', '.join(_MATCH_KINDS)}")
    if isinstance(target, str) and ":" not in target:
        raise ValueError(f"score of {source!r}: got {target!r}; write 'pkg.mod:function'")
    _registered[match][source] = Entry(target, full_mark, needs_ground_truth)
    find_entry.cache_clear()
    scorer_of.cache_clear()


def registered_scores() -> dict[str, dict[str, Entry]]:
    """Returns the entries of `register_score` by kind of match, to restore them in another process."""
    return {match: dict(entries) for match, entries in _registered.items()}


def restore_scores(registered: Mapping[str, Mapping[str, Entry]]) -> None:
    """Replaces the registered entries by the `registered_scores` of another process."""
    for match in _MATCH_KINDS:
        _registered[match] = dict(registered.get(match, {}))
    find_entry.cache_clear()
    scorer_of.cache_clear()


@cache
def find_entry(data_source: str) -> Entry | None:
    """Returns the entry for `data_source`, or None."""
    for table in (_registered, _BUILT_IN):
        if data_source in table["exact"]:
            return table["exact"][data_source]
        entries = [
            *(entry for prefix, entry in table["prefix"].items() if data_source.startswith(prefix)),
            *(entry for text, entry in table["substring"].items() if text in data_source),
        ]
        if entries:
            return entries[0]
    return None


@cache
def scorer_of(data_source: str) -> tuple[Entry, Function]:
    """Returns the entry and the imported scorer, or raises UnknownSourceError."""
    entry = find_entry(data_source)
    if entry is None:
        raise UnknownSourceError(_unknown_source_message(data_source, "a row"))
    target = entry.target
    return entry, load_object(target) if isinstance(target, str) else target


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: JsonValue,
    extra_info: Settings | None = None,
    **options: Any,
) -> float | Fields:
    """Scores a response by the rule of its data source; returns a number, or a dict as verl's rule does."""
    entry, scorer = scorer_of(data_source)
    if entry.needs_ground_truth and is_missing(ground_truth):
        raise ground_truth_error(
            f"ground_truth is {ground_truth!r:.80}, which no response can equal"
        )
    arguments = {
        "data_source": data_source,
        "solution_str": solution_str,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
    }
    result = call_scorer(scorer, arguments, options)
    if isinstance(result, dict):
        returns_details = isinstance(entry.target, str) and entry.target.endswith(":score_details")
        return float(result["score"]) if returns_details else result
    return float(result[0]) if isinstance(result, (tuple, list)) else float(result)


def known_sources() -> dict[str, list[str]]:
    """Returns every name in the table, by kind of match."""
    return {match: sorted({*_registered[match], *_BUILT_IN[match]}) for match in _MATCH_KINDS}


def check_sources(
    rows: Iterable[str | Settings],
    key: str = "data_source",
    where: Callable[[int], str] = "row {}".format,
) -> None:
    """Raises UnknownSourceError for the first row without a scorer.

    A row is a data source, or a row of the data, which needs no scorer if its style is "model".
    `where(index)` returns the location of the row for the message.
    """
    checked_sources: set[str] = set()
    for index, row in enumerate(rows):
        if isinstance(row, str):
            source: JsonValue = row
        elif (row.get("reward_model") or {}).get("style") == "model":
            continue
        else:
            source = row.get(key)
        if not isinstance(source, str):
            raise UnknownSourceError(
                f"{where(index)} has no data source in column {key!r} (got {source!r}). Write one, "
                "or name the right column with data.reward_fn_key."
            )
        if source not in checked_sources and find_entry(source) is None:
            raise UnknownSourceError(_unknown_source_message(source, where(index)))
        checked_sources.add(source)


def _unknown_source_message(source: str, where: str) -> str:
    names = known_sources()
    num_others = sum(map(len, names.values())) - 4  # the message names four
    hint = suggestion(source, names["exact"])
    return (
        f"no scorer for data_source {source!r} ({where}).{hint} Known are openai/gsm8k, "
        f"lighteval/MATH, nq, countdown and {num_others} more (docs/rewards.md); name your own score "
        "function with custom_reward_function.path=FILE.py"
    )
