"""Rows of arithmetic with an operator of its own: `a @ b` is `2 * a + b`, and only the tool knows it.

    python examples/math_expression/create_dataset.py --local_dir DIR [--train_size 512] [--test_size 64]

Every row names the agent loop `math_expression` of agent.yaml.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PROMPT = (
    "Compute {expression}, from left to right. The operator @ is not a known one: use the tool "
    "calculate for every step. End with the result alone on a line: #### RESULT"
)


def expression(draw: random.Random) -> tuple[str, int]:
    """An expression of two or three operators, and its value."""
    value = draw.randint(1, 9)
    text = str(value)
    for _ in range(draw.randint(1, 2)):
        operator, number = draw.choice("@+-"), draw.randint(1, 9)
        value = {"@": 2 * value + number, "+": value + number, "-": value - number}[operator]
        text += f" {operator} {number}"
    return text, value


def rows(split: str, count: int) -> list[dict[str, Any]]:
    draw = random.Random(f"math_expression {split}")
    made = [expression(draw) for _ in range(count)]
    return [
        {
            "data_source": "math_expression",
            "agent_name": "math_expression",
            "prompt": [{"role": "user", "content": PROMPT.format(expression=text)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(value)},
            "extra_info": {"split": split, "index": index},
        }
        for index, (text, value) in enumerate(made)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_dir", default="~/data/math_expression")
    parser.add_argument("--train_size", type=int, default=512)
    parser.add_argument("--test_size", type=int, default=64)
    chosen = parser.parse_args()
    folder = Path(chosen.local_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", chosen.train_size), ("test", chosen.test_size)):
        pq.write_table(pa.Table.from_pylist(rows(split, count)), folder / f"{split}.parquet")
        print(folder / f"{split}.parquet")


if __name__ == "__main__":
    main()
