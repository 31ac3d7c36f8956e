"""Score functions for tiny policies: lexical, so that a random policy already scores unevenly.

Each is named on a command line by `custom_reward_function.name`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

WANTED = "abcdefghijkl"


def share(solution_str: str) -> float:
    """Share of the characters that are wanted."""
    return sum(c in WANTED for c in solution_str) / max(len(solution_str), 1)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    return share(solution_str)


def detailed(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, Any]:
    """A dict: `score` counts, the rest are columns; `pred` is what a majority votes on."""
    return {
        "score": share(solution_str),
        "acc": float(solution_str[:1] in tuple(WANTED)),
        "format": float(len(solution_str) % 2),
        "pred": solution_str[:1],
    }


async def later(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    await asyncio.sleep(0)
    return share(solution_str)


def raises_on_a(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    if "a" in solution_str:
        raise RuntimeError("no a, please")
    return 1.0


def nan_on_a(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    return float("nan") if "a" in solution_str else 1.0


def hangs_on_row_0(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    if extra_info["index"] == 0:
        time.sleep(600)
    return share(solution_str)


def always_one(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    return 1.0


def by_row(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Rows with an even index always score 1: their groups carry no signal."""
    return 1.0 if extra_info["index"] % 2 == 0 else share(solution_str)


def fails_on_a(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, Any]:
    """As `detailed`, but no word about responses with an a."""
    if "a" in solution_str:
        raise RuntimeError("no a, please")
    return detailed(data_source, solution_str, ground_truth, extra_info)


_calls = itertools.count()


def fails_after_eight(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float]:
    if next(_calls) > 8:  # the first call is the trial before the run
        raise RuntimeError("no more")
    return {"score": 1.0, "format": 1.0}


def repeats_what_it_read(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any
) -> dict[str, Any]:
    return {"score": 1.0, "read": solution_str, "heard": extra_info["transcript"]}


def bonus_for_some(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, Any]:
    return {"score": share(solution_str)} | ({"bonus": 1.0} if "b" in solution_str else {})


def odd_extras(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, Any]:
    """Extras that no column of one type can hold as they are."""
    odd = len(solution_str) % 2 == 1 or extra_info["index"] % 2 == 1
    return {
        "score": share(solution_str),
        "pred": len(solution_str) if odd else solution_str,
        "sure": True if odd else 0.5,
        "large": 10**30,
        "vast": 10**5000,
        "broken": "half \ud800 a pair",
        "steps": [1, 2] if odd else {(1, 2): "\udfff"},
        "whole": 3 if odd else 0.25,
        "right": odd,
    }


def constant(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, Any]:
    return {"score": 1.0, "acc": 1.0}
