"""Maths benchmarks that are only for testing, and DAPO's integer problems for training.

Each set keeps its own `data_source`, so that validation reports it by itself.
Leaves out MATH and GSM8K, which have files of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hone.data.preprocess.math_dataset import SUFFIX as BOXED
from hone.data.preprocess.sources import Source, Upstream
from hone.data.rows import DataError
from hone.types import JsonValue, Row

ANSWER_LINE = (
    "Solve the problem step by step. Write the final answer on the last line, in the form"
    " `Answer: <answer>`.\n\n{problem}"
)


@dataclass(frozen=True)
class Benchmark:
    """One set: how it is named where, and how its answer is asked for."""

    data_source: str
    upstream: Upstream
    split: str = "test"
    asks_for_line: bool = False
    """`Answer: …` on the last line, as its scorer wants; else `\\boxed{}`."""


def _test_only(name: str, data_source: str, hub: str, asks_for_line: bool = False) -> Benchmark:
    upstream = Upstream(("math_eval", name), {"test": (name, "test", "train")}, hub)
    return Benchmark(data_source, upstream, asks_for_line=asks_for_line)


BENCHMARKS = {
    "math500": _test_only("math500", "HuggingFaceH4/MATH-500", "HuggingFaceH4/MATH-500"),
    "aime24": _test_only("aime24", "aime24", "HuggingFaceH4/aime_2024", asks_for_line=True),
    "aime25": _test_only("aime25", "aime25", "math-ai/aime25", asks_for_line=True),
    "amc23": _test_only("amc23", "amc23", "math-ai/amc23"),
    "olympiadbench": _test_only("olympiadbench", "olympiadbench", "math-ai/olympiadbench"),
    "minerva_math": _test_only("minerva_math", "minerva_math", "math-ai/minervamath"),
    "svamp": _test_only("svamp", "svamp", "ChilleD/SVAMP"),
    "asdiv": _test_only("asdiv", "asdiv", "EleutherAI/asdiv"),
    "mawps": _test_only("mawps", "mawps", "MU-NLPC/Calc-mawps"),
    "dapo_math": Benchmark(
        "math_dapo",
        Upstream(("dapo_math",), {"train": ("train",)}, "BytedTsinghua-SIA/DAPO-Math-17k"),
        split="train",
        asks_for_line=True,
    ),
}


def tidy_answer(answer: JsonValue) -> str:
    """The answer as a solver would write it: no unit in brackets behind it, no `.0`."""
    text = re.sub(r"(?<=\d)\s*\([^()]*\)$", "", str(answer).strip())
    return re.sub(r"^(-?\d+)\.0$", r"\1", text)


def row(record: Row, benchmark: Benchmark, index: int) -> Row:
    problem = record.get("problem") or record.get("question")
    if not problem:
        raise DataError(f"record {index} of {benchmark.data_source} has no problem")
    content = ANSWER_LINE.format(problem=problem)
    if not benchmark.asks_for_line:
        content = f"{problem} {BOXED}"
    return {
        "data_source": benchmark.data_source,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": tidy_answer(record["answer"])},
        "extra_info": {"split": benchmark.split, "index": index},
    }


def splits(source: Source, *, name: str) -> dict[str, list[Row]]:
    benchmark = BENCHMARKS[name]
    records = source.need(benchmark.upstream, benchmark.split)[benchmark.split]
    return {
        benchmark.split: [row(record, benchmark, index) for index, record in enumerate(records)]
    }
