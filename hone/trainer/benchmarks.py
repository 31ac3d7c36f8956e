"""Benchmarks by name: find or build a benchmark's rows in a folder, generate, then score.

The rows come from `hone data prepare`; this file only knows which sets are benchmarks.
"""

from __future__ import annotations

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
    upstream's own files, from which the rows are then written below `work`.
    """
    known = OTHER_NAMES.get(name, ALIASES.get(name, name))
    if known not in NAMES:
        from difflib import get_close_matches

        near = get_close_matches(name, NAMES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise DataError(f"no benchmark is called {name!r}.{hint} Known: {', '.join(NAMES)}")
    if not folder.is_dir():
        raise DataError(f"the data folder {folder} does not exist; name it with --data")
    ready = [folder / known / "test.parquet", folder / "test.parquet"]
    for file in ready:
        if file.is_file() and _is_prepared(file):
            return file
    source = folder if RECIPES[known].builder else None
    prepare(known, local_dir=work / known, source_dir=source)
    return work / known / "test.parquet"


def _is_prepared(file: Path) -> bool:
    import pyarrow.parquet as pq

    return {"prompt", "data_source", "reward_model"} <= set(pq.read_schema(file).names)


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """(for generating, for scoring)."""

    def generates(override: str) -> bool:
        return override.lstrip("+~").partition("=")[0].partition(".")[0] in GENERATION_ROOTS

    return (
        [o for o in overrides if generates(o)],
        [o for o in overrides if not generates(o)],
    )
