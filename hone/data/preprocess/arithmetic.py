"""Generated sums, differences and products: seeded, distinct, with train and test disjoint.

`generate_arithmetic` gives rows; `prepare_arithmetic` and `prepare_multiply` write TinyZero's kind.
Leaves out division: results stay integers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from hone.data.rows import DataError
from hone.types import Row

OPERATIONS = ("+", "-", "*")

BASE_TEMPLATE = (
    "A conversation between User and Assistant. The User poses a problem; the Assistant first"
    " thinks it through and then gives the answer.\n"
    "User: Work out {question}. Show your work in <think> </think> tags, and give the final result"
    " in <answer> </answer> tags, for example <answer> RESULT_NUMBER </answer>.\n"
    "Assistant: Let me solve this step by step.\n<think>"
)

# Draws that find nothing new before we say that the range holds too few problems.
MAX_MISSES = 100_000


@dataclass(frozen=True)
class Problem:
    a: int
    operation: str
    b: int

    @property
    def question(self) -> str:
        return f"{self.a} {self.operation} {self.b}"

    @property
    def result(self) -> int:
        if self.operation == "+":
            return self.a + self.b
        return self.a - self.b if self.operation == "-" else self.a * self.b

    @property
    def key(self) -> tuple[int, str, int]:
        """a+b and b+a are one problem: knowing one gives away the other."""
        if self.operation == "-":
            return self.a, self.operation, self.b
        return min(self.a, self.b), self.operation, max(self.a, self.b)


def draw_by_digits(min_digits: int, max_digits: int) -> Callable[[random.Random], int]:
    """Operands whose number of digits is uniform, so that long ones do not crowd out short ones."""
    if not 1 <= min_digits <= max_digits:
        raise DataError(f"digits from {min_digits} to {max_digits}: need 1 <= smallest <= largest")

    def draw(rng: random.Random) -> int:
        digits = rng.randint(min_digits, max_digits)
        return rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)

    return draw


def draw_three_digit(rng: random.Random) -> int:
    """TinyZero's operands: one third up to 99, two thirds up to 999."""
    return rng.randint(0, 99 if rng.randint(1, 3) == 1 else 999)


def distinct_problems(
    *,
    seed: int,
    operations: Sequence[str],
    draw: Callable[[random.Random], int],
    allow_negative: bool,
    exclude: Collection[tuple[int, str, int]] = (),
) -> Iterator[Problem]:
    """Endless distinct problems in a fixed order; stops with an error when the range is used up."""
    unknown = [name for name in operations if name not in OPERATIONS]
    if unknown or not operations:
        raise DataError(f"operations {list(operations)}: choose from {', '.join(OPERATIONS)}")
    rng = random.Random(f"arithmetic:{seed}")
    seen = set(exclude)
    misses = 0
    while True:
        a, operation, b = draw(rng), rng.choice(list(operations)), draw(rng)
        if operation == "-" and a < b and not allow_negative:
            a, b = b, a
        problem = Problem(a, operation, b)
        if problem.key in seen:
            misses += 1
            if misses > MAX_MISSES:
                raise DataError(
                    f"the range holds only about {len(seen)} distinct problems; ask for fewer,"
                    " more digits, or more operations"
                )
            continue
        misses = 0
        seen.add(problem.key)
        yield problem


def arithmetic_row(
    problem: Problem, *, template: str, data_source: str, split: str, index: int
) -> Row:
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": template.format(question=problem.question)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.result},
        "extra_info": {"split": split, "index": index, "question": problem.question},
    }


def generate_arithmetic(
    count: int,
    *,
    seed: int,
    operations: Sequence[str] = OPERATIONS,
    min_digits: int = 1,
    max_digits: int = 2,
    allow_negative: bool = False,
    exclude: Collection[tuple[int, str, int]] = (),
    template: str = BASE_TEMPLATE,
    data_source: str = "arithmetic",
    split: str = "train",
) -> list[Row]:
    """`count` distinct problems as rows. `template` holds `{question}`, such as `3 + 14`.

    The first rows are the same for every count, so one call cut in two gives disjoint splits;
    `split_rows` does that.
    """
    problems = distinct_problems(
        seed=seed,
        operations=operations,
        draw=draw_by_digits(min_digits, max_digits),
        allow_negative=allow_negative,
        exclude=exclude,
    )
    return [
        arithmetic_row(
            next(problems), template=template, data_source=data_source, split=split, index=index
        )
        for index in range(count)
    ]


def split_rows(rows: Sequence[Row], test_count: int) -> tuple[list[Row], list[Row]]:
    """(train, test): the first `test_count` rows become the test split, numbered from 0 again."""
    if not 0 <= test_count <= len(rows):
        raise DataError(f"cannot hold out {test_count} of {len(rows)} rows")
    test, train = rows[:test_count], rows[test_count:]
    return _renumbered(train, "train"), _renumbered(test, "test")


def _renumbered(rows: Sequence[Row], split: str) -> list[Row]:
    return [
        {**row, "extra_info": {**row["extra_info"], "split": split, "index": index}}
        for index, row in enumerate(rows)
    ]


def tinyzero_splits(
    *,
    name: str,
    operations: Sequence[str],
    train_size: int = 32_768,
    test_size: int = 4_096,
    seed: int = 1,
) -> dict[str, list[Row]]:
    """TinyZero's arithmetic and multiply sets: `yolo/<name>-3_digit`, operands up to 999."""
    problems = distinct_problems(
        seed=seed, operations=operations, draw=draw_three_digit, allow_negative=False
    )
    rows = [
        arithmetic_row(
            next(problems),
            template=BASE_TEMPLATE,
            data_source=f"yolo/{name}-3_digit",
            split="train",
            index=index,
        )
        for index in range(train_size + test_size)
    ]
    train, test = split_rows(rows, test_size)
    return {"train": train, "test": test}
