"""Benchmarks by name: find or build a benchmark's rows in a folder, generate, then score.

The rows come from `hone data prepare`; this file only knows which sets are benchmarks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hone.data.prepare import ALIASES, RECIPES, prepare
from hone.data.rows import DataError

SEARCH = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
MATHS = (
    *("math500", "aime24", "aime25", "amc23", "olympiadbench", "minerva_math"),
    *("svamp", "asdiv", "mawps"),
)
NAMES = ("gsm8k", *MATHS, "humaneval", "mbpp", "countdown", "multiply", *SEARCH)
RAW = ("countdown", "multiply")
"""Their prompts are whole texts: no chat template is put around them."""
OTHER_NAMES = {"minerva": "minerva_math", "2wiki": "2wikimultihopqa"}
GENERATION_ROOTS = ("trainer", "data", "model", "rollout", "actor", "ray_kwargs")
"""Overrides of these blocks say how to generate; the others how to score."""


def benchmark_file(name: str, folder: Path, work: Path) -> Path:
    """The parquet file of a benchmark's test rows.

    `folder` holds either what `hone data prepare` wrote (NAME/test.parquet or test.parquet) or
    upstream's own files, from which the rows are then written below `work`. A prepared file counts
    only where its rows say that they are of this benchmark.
    """
    known = OTHER_NAMES.get(name, ALIASES.get(name, name))
    if known not in NAMES:
        from difflib import get_close_matches

        near = get_close_matches(name, NAMES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise DataError(f"no benchmark is called {name!r}.{hint} Known: {', '.join(NAMES)}")
    if not folder.is_dir():
        raise DataError(f"the data folder {folder} does not exist; name it with --data")
    stranger = ""
    for file in (folder / known / "test.parquet", folder / "test.parquet"):
        if file.is_file() and _is_prepared(file):
            others = [source for source in _sources(file) if not _is_of(source, known)]
            if not others:
                return file
            stranger = f"{file} holds rows of {', '.join(others[:3])}, not of {known} alone"
            if file.parent.name == known:
                raise DataError(f"{stranger}; prepare {known} there (`hone data prepare`)")
    source = folder if RECIPES[known].builder else None
    try:
        prepare(known, local_dir=work / known, source_dir=source)
    except (DataError, KeyError) as error:
        if stranger:
            raise DataError(f"{stranger}, and {folder} has no other file of it") from error
        raise
    return work / known / "test.parquet"


def _is_prepared(file: Path) -> bool:
    import pyarrow.parquet as pq

    return {"prompt", "data_source", "reward_model"} <= set(pq.read_schema(file).names)


def _sources(file: Path) -> list[str]:
    import pyarrow.parquet as pq

    column = pq.read_table(file, columns=["data_source"], partitioning=None).column(0)
    return [str(source) for source in column.unique().to_pylist()]


def _is_of(source: str, name: str) -> bool:
    """Whether a data source names a benchmark: `HuggingFaceH4/MATH-500`, `searchR1_nq`, `aime_2024`."""

    def plain(text: str) -> str:
        return re.sub(r"20(?=\d\d)", "", re.sub(r"[^a-z0-9]", "", text.lower()))

    return plain(name) in plain(source)


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """(for generating, for scoring)."""

    def generates(override: str) -> bool:
        return override.lstrip("+~").partition("=")[0].partition(".")[0] in GENERATION_ROOTS

    return (
        [o for o in overrides if generates(o)],
        [o for o in overrides if not generates(o)],
    )
