"""All sums of two or three digits 0–9: 1,100 problems, 200 of them held out.

No sum is in both parts as it is written; most held-out sums are in the other with their digits in
another order, and how many is printed.

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

from hone.tracking import atomic_path

HELD_OUT = 200
QUESTION = "What is {sum}? Answer with the number only."


def problems() -> list[tuple[int, ...]]:
    """Every ordered tuple of two or three digits."""
    digits = range(10)
    return [*itertools.product(digits, repeat=2), *itertools.product(digits, repeat=3)]


def splits() -> dict[str, list[tuple[int, ...]]]:
    shuffled = problems()
    random.Random(0).shuffle(shuffled)
    return {"test": shuffled[:HELD_OUT], "train": shuffled[HELD_OUT:]}


def reordered(held_out: list[tuple[int, ...]], train: list[tuple[int, ...]]) -> int:
    """How many held-out sums have one in `train` of the same digits in another order."""
    trained = {tuple(sorted(digits)) for digits in train}
    return sum(tuple(sorted(digits)) in trained for digits in held_out)


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
    parts = splits()
    for split, chosen in parts.items():
        rows = [row(digits, i, split) for i, digits in enumerate(chosen)]
        with atomic_path(out / f"{split}.parquet") as temporary:
            pq.write_table(pa.Table.from_pylist(rows), temporary)
        sys.stdout.write(f"{out / split}.parquet: {len(rows)} rows\n")
    count = reordered(parts["test"], parts["train"])
    sys.stdout.write(f"{count} of the {HELD_OUT} held-out sums are in train in another order\n")


if __name__ == "__main__":
    main()
