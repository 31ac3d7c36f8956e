"""Generates TinyZero's sums, differences and products, with disjoint splits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hone.data.preprocess.sources import Splits, task_row
from hone.data.rows import DataError

TEMPLATE = (
    "A conversation between User and Assistant. The User poses a problem; the Assistant first"
    " thinks it through and then gives the answer.\n"
    "User: Work out {question}. Show your work in <think> </think> tags, and give the final result"
    " in <answer> </answer> tags, for example <answer> RESULT_NUMBER </answer>.\n"
    "Assistant: Let me solve this step by step.\n<think>"
)
MAX_CONSECUTIVE_REPEATS = 100_000
"""Generation fails after more than this number of consecutive draws without a new problem."""


@dataclass(frozen=True)
class Problem:
    """The problem `a operation b`."""

    a: int
    operation: str
    b: int

    @property
    def question(self) -> str:
        return f"{self.a} {self.operation} {self.b}"

    @property
    def result(self) -> int:
        return {"+": self.a + self.b, "-": self.a - self.b, "*": self.a * self.b}[self.operation]

    @property
    def key(self) -> tuple[int, str, int]:
        """Identifies the problem; a+b and b+a have the same key."""
        a, b = (self.a, self.b) if self.operation == "-" else sorted((self.a, self.b))
        return a, self.operation, b


def _draw_operand(rng: random.Random) -> int:
    """Draws an operand as TinyZero does: up to 99 with probability 1/3, else up to 999."""
    return rng.randint(0, 99 if rng.randint(1, 3) == 1 else 999)


def distinct_problems(seed: int, operations: Sequence[str]) -> Iterator[Problem]:
    """Yields distinct problems without negative results, in an order set by the seed."""
    rng = random.Random(f"arithmetic:{seed}")
    drawn_keys: set[tuple[int, str, int]] = set()
    repeats = 0
    while repeats <= MAX_CONSECUTIVE_REPEATS:
        a, operation, b = _draw_operand(rng), rng.choice(list(operations)), _draw_operand(rng)
        if operation == "-" and a < b:
            a, b = b, a
        problem = Problem(a, operation, b)
        if problem.key in drawn_keys:
            repeats += 1
        else:
            repeats = 0
            drawn_keys.add(problem.key)
            yield problem
    raise DataError(f"there are only about {len(drawn_keys)} distinct problems; ask for fewer rows")


def tinyzero_splits(
    *,
    name: str,
    operations: Sequence[str],
    train_size: int = 32_768,
    test_size: int = 4_096,
    seed: int = 1,
) -> Splits:
    """Builds rows of the data source `yolo/<name>-3_digit`; the test rows are drawn first."""
    problems = distinct_problems(seed, operations)
    splits: Splits = {"train": [], "test": []}
    for split, size in (("test", test_size), ("train", train_size)):
        for index in range(size):
            problem = next(problems)
            question = problem.question
            prompt, source = TEMPLATE.format(question=question), f"yolo/{name}-3_digit"
            splits[split].append(
                task_row(source, prompt, "math", problem.result, split, index, question=question)
            )
    return splits
