"""Finds the file of a benchmark's test rows, or prepares the file as `hone data prepare` does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hone.data.prepare import ALIASES, DATASETS, prepare
from hone.data.rows import DataError
from hone.suggestions import suggestion

SEARCH_BENCHMARKS = (
    "nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle",
)  # fmt: skip
MATH_BENCHMARKS = (
    "math500", "aime24", "aime25", "amc23", "olympiadbench", "minerva_math", "svamp", "asdiv", "mawps",
)  # fmt: skip
RAW_PROMPT_BENCHMARKS = ("countdown", "multiply")
"""Benchmarks whose prompts are raw text, without a chat template."""
BENCHMARKS = (
    "gsm8k", *MATH_BENCHMARKS, "humaneval", "mbpp", *RAW_PROMPT_BENCHMARKS, *SEARCH_BENCHMARKS,
)  # fmt: skip
ALTERNATIVE_NAMES = {"minerva": "minerva_math", "2wiki": "2wikimultihopqa"}
GENERATION_BLOCKS = ("trainer", "data", "model", "rollout", "search", "actor", "ray_kwargs")
"""Overrides of these blocks configure generation; the others configure scoring."""


def benchmark_file(name: str, folder: Path, work_folder: Path) -> Path:
    """Returns the parquet file of a benchmark's test rows.

    `folder` holds the output of `hone data prepare` (NAME/test.parquet or test.parquet), or the original
    files of the data set, which are then prepared in a subfolder of `work_folder`. A prepared file is used
    only if all of its rows belong to this benchmark.
    """
    benchmark = ALTERNATIVE_NAMES.get(name, ALIASES.get(name, name))
    if benchmark not in BENCHMARKS:
        hint = suggestion(name, BENCHMARKS)
        raise DataError(f"there is no benchmark {name!r}.{hint} Known: {', '.join(BENCHMARKS)}")
    if not folder.is_dir():
        raise DataError(f"the data folder {folder} does not exist; name it with --data")
    mismatch_message = ""
    for file in (folder / benchmark / "test.parquet", folder / "test.parquet"):
        sources = _data_sources(file) if file.is_file() else []
        other_sources = [
            source
            for source in sources
            if _normalize_name(benchmark) not in _normalize_name(source)
        ]
        if sources and not other_sources:
            return file
        if other_sources:
            mismatch_message = (
                f"{file} holds rows of {', '.join(other_sources[:3])}, not of {benchmark} alone"
            )
            if file.parent.name == benchmark:
                raise DataError(
                    f"{mismatch_message}; prepare {benchmark} there (`hone data prepare`)"
                )
    needs_source = DATASETS[benchmark].source_builder is not None  # otherwise rows are generated
    try:
        prepare(
            benchmark,
            local_dir=work_folder / benchmark,
            source_dir=folder if needs_source else None,
        )
    except (DataError, KeyError) as error:
        if mismatch_message:
            raise DataError(
                f"{mismatch_message}, and {folder} has no other file of {benchmark}"
            ) from error
        raise
    return work_folder / benchmark / "test.parquet"


def _data_sources(file: Path) -> list[str]:
    """Returns the data sources of a prepared file; an original file has none."""
    import pyarrow.parquet as pq

    if not {"prompt", "data_source", "reward_model"} <= set(pq.read_schema(file).names):
        return []
    column = pq.read_table(file, columns=["data_source"], partitioning=None).column(0)
    return [str(source) for source in column.unique().to_pylist()]


def _normalize_name(name: str) -> str:
    """Keeps lower-case letters and digits, and shortens years: `AIME_2024` becomes `aime24`."""
    return re.sub(r"20(?=\d\d)", "", re.sub(r"[^a-z0-9]", "", name.lower()))


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits overrides into those for generation and those for scoring."""
    generation_overrides: list[str] = []
    scoring_overrides: list[str] = []
    for override in overrides:
        block = override.lstrip("+~").partition("=")[0].partition(".")[0]
        is_generation = block in GENERATION_BLOCKS
        (generation_overrides if is_generation else scoring_overrides).append(override)
    return generation_overrides, scoring_overrides
