"""Writes pairs of responses whose true preference is known: `prepare.py OUT [--train N] [--test N]`.

A response is a row of words. Its true reward is the number of its pleasant words minus that of its unpleasant
words; the other words mean nothing. The preferred response of a pair has the higher reward.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

PLEASANT = ["thanks", "sunny", "kind", "honest", "gentle", "happy", "clear", "fair"]
UNPLEASANT = ["stupid", "rotten", "cruel", "false", "nasty", "angry", "broken", "dirty"]
NEUTRAL = [
    "table",
    "river",
    "stone",
    "paper",
    "seven",
    "under",
    "morning",
    "train",
    "window",
    "letter",
    "garden",
    "street",
]
PLACES = ["Rome", "Oslo", "Lima", "Cairo", "Paris", "Delhi", "Quito", "Tokyo"]


def reward(response: str) -> int:
    """Return the true reward of a response."""
    words = response.split()
    return sum(w in PLEASANT for w in words) - sum(w in UNPLEASANT for w in words)


def pairs(count: int, generator: random.Random) -> list[dict[str, str]]:
    """Return `count` pairs of responses with different rewards."""
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        words = (*PLEASANT, *UNPLEASANT, *NEUTRAL)
        first, second = (
            " ".join(generator.choices(words, k=generator.randint(4, 10))) for _ in range(2)
        )
        if reward(first) != reward(second):
            chosen, rejected = sorted((first, second), key=reward, reverse=True)
            place = generator.choice(PLACES)
            rows.append({"prompt": f"Write about {place}.", "chosen": chosen, "rejected": rejected})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=4000)
    parser.add_argument("--test", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    generator = random.Random(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", options.train), ("test", options.test)):
        text = "".join(json.dumps(row) + "\n" for row in pairs(count, generator))
        (options.out / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
