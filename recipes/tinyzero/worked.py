"""Worked countdown solutions for the SFT before RL: a few attempts, then an answer.

Each attempt writes an expression, computes it step by step and says whether it hit. How many are made is
chance, and most of the texts give up with a wrong answer: the form is taught, the search is not.

Usage: python recipes/tinyzero/worked.py OUT --rl DATA --rows 200000
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hone.data.preprocess.countdown import (
    TEMPLATES,
    CountdownProblem,
    Ranges,
    generate_problems,
    problem_key,
)
from hone.tracking import atomic_path

OPERATIONS, OPERATION_WEIGHTS = "+-*/", (4, 4, 1, 1)
MOST_ATTEMPTS = 10
SHARE_RIGHT = 0.1
"""Texts whose last attempt is made the solution; in others it is one by luck."""
MOST_DRAWS = 30
"""Draws for a result not had before; then one is repeated."""


@dataclass(frozen=True)
class Style:
    """What the attempts of a text may be."""

    largest: int = 999
    """No attempt computes a larger number."""
    distinct: bool = False
    """No attempt comes to a result that an earlier one of the same text had."""
    go_on: float = 0.5
    """Chance that another attempt follows, up to MOST_ATTEMPTS."""


PLAIN = Style()


@dataclass(frozen=True)
class Node:
    """A number, or an operation on two nodes."""

    value: int
    left: Node | None = None
    operation: str = ""
    right: Node | None = None

    def text(self, outer: bool = True) -> str:
        if self.left is None or self.right is None:
            return str(self.value)
        inside = f"{self.left.text(False)} {self.operation} {self.right.text(False)}"
        return inside if outer else f"({inside})"

    def reduced(self) -> Node:
        """One operation computed: the leftmost whose operands are numbers."""
        if self.left is None or self.right is None:
            return self
        if self.left.left is not None:
            return Node(self.value, self.left.reduced(), self.operation, self.right)
        if self.right.left is not None:
            return Node(self.value, self.left, self.operation, self.right.reduced())
        return Node(self.value)


def compute(a: int, operation: str, b: int, largest: int) -> int | None:
    """A whole number from 0 to `largest`, or None."""
    if operation == "/":
        return a // b if b and a % b == 0 else None
    value = {"+": a + b, "-": a - b, "*": a * b}[operation]
    return value if 0 <= value <= largest else None


def draw(numbers: tuple[int, ...], chooser: random.Random, largest: int) -> Node:
    """Some way to join all the numbers."""
    while True:
        pool = [Node(number) for number in numbers]
        while len(pool) > 1:
            chooser.shuffle(pool)
            right, left = pool.pop(), pool.pop()
            (operation,) = chooser.choices(OPERATIONS, OPERATION_WEIGHTS)
            value = compute(left.value, operation, right.value, largest)
            if value is None:
                break
            pool.append(Node(value, left, operation, right))
        else:
            return pool[0]


def parse(text: str, largest: int) -> Node | None:
    """The tree of a fully bracketed expression; None where a step is outside what attempts compute."""
    tokens = text.replace("(", " ( ").replace(")", " ) ").split()

    def operand(at: int) -> tuple[Node | None, int]:
        if tokens[at] != "(":
            return Node(int(tokens[at])), at + 1
        node, at = pair(at + 1)
        return node, at + 1

    def pair(at: int) -> tuple[Node | None, int]:
        left, at = operand(at)
        operation = tokens[at]
        right, at = operand(at + 1)
        if left is None or right is None:
            return None, at
        value = compute(left.value, operation, right.value, largest)
        return (None if value is None else Node(value, left, operation, right)), at

    return pair(0)[0]


def attempt(node: Node, target: int) -> str:
    """`(44 + 19) - 35 = 63 - 35 = 28, no`"""
    steps = [node.text()]
    while node.left is not None:
        node = node.reduced()
        steps.append(node.text())
    return f"{' = '.join(steps)}, {'yes' if node.value == target else 'no'}\n"


def draw_new(
    numbers: tuple[int, ...], chooser: random.Random, style: Style, tries: list[Node]
) -> Node:
    """Another attempt, in the text's style."""
    had = {node.value for node in tries} if style.distinct else set()
    for _ in range(MOST_DRAWS):
        node = draw(numbers, chooser, style.largest)
        if node.value not in had:
            break
    return node


def worked(problem: CountdownProblem, chooser: random.Random, style: Style = PLAIN) -> str:
    """What follows the prompt's `<think>`."""
    count = 1
    while count < MOST_ATTEMPTS and chooser.random() < style.go_on:
        count += 1
    solution = parse(problem.solution, style.largest) if chooser.random() < SHARE_RIGHT else None
    tries: list[Node] = []
    for last in [False] * (count - 1) + [True]:
        made = solution if last else None
        node = made or draw_new(problem.numbers, chooser, style, tries)
        tries.append(node)
        if node.value == problem.target:
            break
    thoughts = "".join(attempt(node, problem.target) for node in tries)
    return f"\n{thoughts}</think>\n<answer> {tries[-1].text()} </answer>"


def rows(
    problems: list[CountdownProblem], seed: int, *, texts: int = 1, style: Style = PLAIN
) -> list[dict[str, str]]:
    """`texts` worked solutions of each problem, each by its own chance."""
    chooser = random.Random(f"worked:{seed}")
    return [
        {
            "prompt": TEMPLATES["base"].format(numbers=list(p.numbers), target=p.target),
            "response": worked(p, chooser, style),
        }
        for _ in range(texts)
        for p in problems
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rl", type=Path, required=True, help="folder of the RL rows")
    parser.add_argument("--rows", type=int, default=200_000, help="problems")
    parser.add_argument("--texts", type=int, default=1, help="worked solutions of each problem")
    parser.add_argument(
        "--largest", type=int, default=PLAIN.largest, help="largest number computed"
    )
    parser.add_argument("--distinct", action="store_true", help="no result twice in a text")
    parser.add_argument("--go_on", type=float, default=PLAIN.go_on, help="chance of another try")
    parser.add_argument("--seed", type=int, default=7)
    for name in ("max_numbers", "max_number", "max_target"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Ranges, name))
    chosen = parser.parse_args()
    taken = set()
    for split in ("train", "test"):  # SFT sees no problem that RL trains on or is measured by
        for row in pq.read_table(chosen.rl / f"{split}.parquet").to_pylist():
            taken.add(problem_key(row["nums"], row["target"]))
    ranges = Ranges(
        max_numbers=chosen.max_numbers, max_number=chosen.max_number, max_target=chosen.max_target
    )
    problems = generate_problems(chosen.rows, seed=chosen.seed, ranges=ranges, exclude=taken)
    style = Style(chosen.largest, chosen.distinct, chosen.go_on)
    written = rows(problems, chosen.seed, texts=chosen.texts, style=style)
    table = pa.Table.from_pylist(written)
    # `reproduce.sh` takes a file that is there for whole.
    with atomic_path(chosen.out) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    sys.stdout.write(f"{chosen.out}: {len(written):,} worked solutions\n")


if __name__ == "__main__":
    main()
