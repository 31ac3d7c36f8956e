"""All sums of two or three digits 0–9: 1,100 problems, 200 of them held out.

Usage: python recipes/sums/prepare.py OUT
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HELD_OUT = 200
QUESTION = "What is {sum}? Answer with the number only."


def problems() -> list[tuple[int, ...]]:
    """Every ordered tuple of two or three digits."""
    digits = range(10)
    return [*itertools.product(digits, repeat=2), *itertools.product(digits, repeat=3)]


def row(digits: tuple[int, ...], index: int, split: str) -> dict[str, Any]:
    question = QUESTION.format(sum=" + ".join(map(str, digits)))
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(sum(digits))},
        "extra_info": {"split": split, "index": index},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    shuffled = problems()
    random.Random(0).shuffle(shuffled)
    parts = {"test": shuffled[:HELD_OUT], "train": shuffled[HELD_OUT:]}
    for split, chosen in parts.items():
        rows = [row(digits, i, split) for i, digits in enumerate(chosen)]
        pq.write_table(pa.Table.from_pylist(rows), out / f"{split}.parquet")
        sys.stdout.write(f"{out / split}.parquet: {len(rows)} rows\n")


if __name__ == "__main__":
    main()
