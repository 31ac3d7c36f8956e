"""Countdown, the task of reaching a target with given numbers: TinyZero's rows and a generator."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial

from hone.data.preprocess.sources import Source, Splits, UpstreamDataset, rows_by_split, task_row
from hone.data.rows import DataError
from hone.types import Fields, Row

_CONVERSATION_INTRO = (
    "A conversation between User and Assistant. The User poses a problem; the Assistant first"
    " thinks it through and then gives the answer.\n"
)
_TASK = (
    "Use the numbers {numbers} to make an equation that equals {target}. The basic operations"
    " (+, -, *, /) are allowed, and each number may be used only once. Show your work in"
    " <think> </think> tags, and give the final answer in <answer> </answer> tags, for example"
    " <answer> (1 + 2) / 3 </answer>."
)
_SYSTEM = "You are a helpful assistant. Think a problem through first, then give the answer."
_RESPONSE_START = "Let me solve this step by step.\n<think>"

TEMPLATES = {
    "base": f"{_CONVERSATION_INTRO}User: {_TASK}\nAssistant: {_RESPONSE_START}",
    "qwen-instruct": (
        f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{_TASK}<|im_end|>\n"
        f"<|im_start|>assistant\n{_RESPONSE_START}"
    ),
    "chat": _TASK,
}
"""`base` and `qwen-instruct` are pre-rendered (data.prompt_format=raw); `chat` is one user turn."""

UPSTREAM = UpstreamDataset(("countdown", "Countdown-Tasks-3to4"), "Jiayi-Pan/Countdown-Tasks-3to4")
MAX_CONSECUTIVE_MISSES = 100_000
"""Generation fails after more than this number of consecutive draws without a new problem."""

ProblemKey = tuple[tuple[int, ...], int]


def problem_key(numbers: Iterable[int], target: int) -> ProblemKey:
    """Returns a key that identifies a problem regardless of the order of its numbers."""
    return tuple(sorted(int(number) for number in numbers)), int(target)


@dataclass(frozen=True)
class CountdownProblem:
    """The numbers, their target, and an expression of the numbers that equals the target."""

    numbers: tuple[int, ...]
    target: int
    solution: str

    @property
    def key(self) -> ProblemKey:
        return problem_key(self.numbers, self.target)


@dataclass(frozen=True)
class Ranges:
    """The ranges of generated problems; the defaults resemble Countdown-Tasks-3to4."""

    min_numbers: int = 3
    max_numbers: int = 4
    min_number: int = 1
    max_number: int = 99
    min_target: int = 10
    max_target: int = 100

    def __post_init__(self) -> None:
        if not 2 <= self.min_numbers <= self.max_numbers:
            counts = f"{self.min_numbers} to {self.max_numbers}"
            raise DataError(f"{counts} numbers per problem: need 2 <= min <= max")
        if not 0 <= self.min_number <= self.max_number:
            numbers = f"{self.min_number} to {self.max_number}"
            raise DataError(f"numbers from {numbers}: need 0 <= min <= max")


def _draw_problem(rng: random.Random, ranges: Ranges) -> CountdownProblem | None:
    """Combines random pairs of terms until one is left; returns None on an inexact division."""
    count = rng.randint(ranges.min_numbers, ranges.max_numbers)
    numbers = tuple(rng.randint(ranges.min_number, ranges.max_number) for _ in range(count))
    terms = [(number, str(number)) for number in numbers]
    while len(terms) > 1:
        rng.shuffle(terms)
        (a, left), (b, right) = terms.pop(), terms.pop()
        operation = rng.choice("+-*/")
        if operation == "/" and (b == 0 or a % b):
            return None
        if operation == "-" and a < b:
            (a, left), (b, right) = (b, right), (a, left)
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operation]
        terms.append((value, f"({left} {operation} {right})"))
    value, text = terms[0]
    return CountdownProblem(numbers, value, text[1:-1] if text.startswith("(") else text)


def generate_problems(
    count: int, *, seed: int, ranges: Ranges, exclude: Collection[ProblemKey] = ()
) -> list[CountdownProblem]:
    """Generates `count` distinct solvable problems whose keys are not in `exclude`."""
    rng = random.Random(f"countdown:{seed}")
    used_keys = set(exclude)
    problems: list[CountdownProblem] = []
    misses = 0
    while len(problems) < count:
        if misses > MAX_CONSECUTIVE_MISSES:
            raise DataError(
                f"found only {len(problems)} of {count} distinct countdown problems; widen the"
                " range of numbers or targets, or ask for fewer"
            )
        misses += 1
        problem = _draw_problem(rng, ranges)
        if problem is None or not ranges.min_target <= problem.target <= ranges.max_target:
            continue
        if problem.key not in used_keys:
            misses = 0
            used_keys.add(problem.key)
            problems.append(problem)
    return problems


def countdown_row(record: Row, split: str, index: int, *, template: str) -> Row:
    """Builds a row from a record with `nums`, `target` and an optional `solution`."""
    if template not in TEMPLATES:
        raise DataError(f"template {template!r} is not known; use one of {', '.join(TEMPLATES)}")
    numbers, target = [int(number) for number in record["nums"]], int(record["target"])
    prompt = TEMPLATES[template].format(numbers=numbers, target=record["target"])
    truth: Fields = {"target": target, "numbers": list(numbers)}
    row = task_row("countdown", prompt, "math", truth, split, index)
    row = {"target": target, "nums": numbers, **row}
    if record.get("solution") is not None:
        row["solution"] = record["solution"]
    return row


def upstream_splits(
    source: Source,
    *,
    train_size: int | None = 327_680,
    test_size: int = 1_024,
    template_type: str = "base",
) -> Splits:
    """Builds rows of the upstream problems; drops training problems that are in the test set."""
    records = source.existing_splits(UPSTREAM)
    train = records["train"]
    if "test" in records:
        test = records["test"][:test_size]
    else:
        test_start = min(train_size or len(train), len(train) - test_size)
        train, test = train[:test_start], train[test_start : test_start + test_size]
    test_keys = {problem_key(record["nums"], record["target"]) for record in test}
    train = [
        record
        for record in train[:train_size]
        if problem_key(record["nums"], record["target"]) not in test_keys
    ]
    return rows_by_split(
        {"train": train, "test": test}, partial(countdown_row, template=template_type)
    )


def generated_splits(
    *,
    train_size: int = 327_680,
    test_size: int = 1_024,
    template_type: str = "base",
    seed: int = 42,
    min_numbers: int = Ranges.min_numbers,
    max_numbers: int = Ranges.max_numbers,
    min_number: int = Ranges.min_number,
    max_number: int = Ranges.max_number,
    min_target: int = Ranges.min_target,
    max_target: int = Ranges.max_target,
) -> Splits:
    """Generates the test problems first, then other problems for training."""
    ranges = Ranges(min_numbers, max_numbers, min_number, max_number, min_target, max_target)
    test = generate_problems(test_size, seed=seed, ranges=ranges)
    test_keys = {problem.key for problem in test}
    train = generate_problems(train_size, seed=seed + 1, ranges=ranges, exclude=test_keys)
    records = {
        split: [{"nums": p.numbers, "target": p.target, "solution": p.solution} for p in problems]
        for split, problems in (("train", train), ("test", test))
    }
    return rows_by_split(records, partial(countdown_row, template=template_type))
