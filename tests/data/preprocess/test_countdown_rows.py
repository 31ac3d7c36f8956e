from __future__ import annotations

import ast
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.preprocess.countdown import (
    Ranges,
    countdown_row,
    generate_problems,
    generated_splits,
    problem_key,
    upstream_splits,
)
from hone.data.preprocess.sources import Source
from hone.data.rows import DataError


def is_solvable(numbers: tuple[int, ...], target: int) -> bool:
    """Returns whether a solution exists, by trying all expressions."""

    def search(values: tuple[Fraction, ...]) -> bool:
        if len(values) == 1:
            return values[0] == target
        for i, j in permutations(range(len(values)), 2):
            a, b = values[i], values[j]
            rest = tuple(v for k, v in enumerate(values) if k not in (i, j))
            results = [a - b]
            if i < j:
                results += [a + b, a * b]
            if b != 0:
                results.append(a / b)
            if any(search((*rest, result)) for result in results):
                return True
        return False

    return search(tuple(Fraction(number) for number in numbers))


def value_and_numbers(expression: str) -> tuple[Fraction, list[int]]:
    """Returns the value of an expression and its numbers, from its syntax tree."""
    numbers_used: list[int] = []

    def walk(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            assert isinstance(node.value, int)
            numbers_used.append(node.value)
            return Fraction(node.value)
        assert isinstance(node, ast.BinOp)
        left, right = walk(node.left), walk(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        assert isinstance(node.op, ast.Div)
        return left / right

    return walk(ast.parse(expression, mode="eval").body), sorted(numbers_used)


def test_the_independent_solver_knows_right_from_wrong() -> None:
    assert is_solvable((3, 5, 7), 22)
    assert is_solvable((1, 5, 5, 5), 24)  # 5 * (5 - 1/5): needs a fraction on the way
    assert not is_solvable((1, 1, 1), 10)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(2, 4),
    st.integers(0, 2),
    st.integers(0, 30),
    st.integers(20, 200),
)
def test_generated_problems_are_solvable_distinct_and_in_range(
    seed: int, min_numbers: int, extra: int, min_number: int, max_target: int
) -> None:
    ranges = Ranges(
        min_numbers, min(min_numbers + extra, 4), min_number, min_number + 40, 5, max_target
    )
    problems = generate_problems(12, seed=seed, ranges=ranges)
    assert len({problem.key for problem in problems}) == 12
    for problem in problems:
        assert ranges.min_numbers <= len(problem.numbers) <= ranges.max_numbers
        assert ranges.min_number <= min(problem.numbers)
        assert max(problem.numbers) <= ranges.max_number
        assert ranges.min_target <= problem.target <= ranges.max_target
        assert is_solvable(problem.numbers, problem.target)


def test_the_worked_solution_uses_every_number_once_and_reaches_the_target() -> None:
    for problem in generate_problems(300, seed=1, ranges=Ranges()):
        value, numbers_used = value_and_numbers(problem.solution)
        assert value == problem.target
        assert numbers_used == sorted(problem.numbers)


def test_a_seed_fixes_the_problems_and_another_changes_them() -> None:
    first, again, other = (generate_problems(20, seed=s, ranges=Ranges()) for s in (3, 3, 4))
    assert first == again
    assert first != other


@given(st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_train_never_holds_a_test_problem(seed: int) -> None:
    splits = generated_splits(
        train_size=60, test_size=30, seed=seed, max_numbers=3, min_number=1, max_number=9
    )
    keys = [
        {problem_key(row["nums"], row["target"]) for row in splits[split]}
        for split in ("train", "test")
    ]
    assert (len(keys[0]), len(keys[1])) == (60, 30)
    assert not keys[0] & keys[1]


def test_a_row_has_tinyzeros_schema() -> None:
    row = generated_splits(train_size=1, test_size=1, seed=0)["train"][0]
    truth = row["reward_model"]["ground_truth"]
    assert row["data_source"] == "countdown"
    assert row["ability"] == "math"
    assert row["reward_model"]["style"] == "rule"
    assert set(truth) == {"target", "numbers"}
    assert row["extra_info"] == {"split": "train", "index": 0}
    (message,) = row["prompt"]
    assert message["role"] == "user"
    assert str(truth["numbers"]) in message["content"]
    assert message["content"].endswith("Assistant: Let me solve this step by step.\n<think>")


def test_templates_carry_their_markers() -> None:
    def prompt_of(template: str) -> str:
        record = {"nums": [1, 2, 3], "target": 6}
        row = countdown_row(record, "train", 0, template=template)
        content: str = row["prompt"][0]["content"]
        return content

    chatml = prompt_of("qwen-instruct")
    assert "<|im_start|>assistant\nLet me solve this step by step.\n<think>" in chatml
    assert "Assistant:" not in prompt_of("chat")
    with pytest.raises(DataError, match="template 'llama'"):
        prompt_of("llama")


def test_a_range_that_holds_too_few_problems_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.data.preprocess.countdown.MAX_CONSECUTIVE_MISSES", 2000)
    with pytest.raises(DataError, match="found only"):
        generate_problems(100, seed=0, ranges=Ranges(2, 2, 1, 2, 1, 3))


def test_wrong_ranges_are_named() -> None:
    with pytest.raises(DataError, match="numbers per problem"):
        Ranges(min_numbers=1)
    with pytest.raises(DataError, match="numbers from 9 to 3"):
        Ranges(min_number=9, max_number=3)


def test_upstreams_file_is_cut_by_position_and_cleared_of_test_problems(tmp_path: Path) -> None:
    lines = [f'{{"nums": [{n}, 2, 3], "target": {n + 5}}}' for n in [1, 2, 3, 4, 5, 6, 2]]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    rows_by_split = upstream_splits(Source(tmp_path), train_size=4, test_size=3)
    assert [row["nums"][0] for row in rows_by_split["test"]] == [5, 6, 2]
    assert [row["nums"][0] for row in rows_by_split["train"]] == [1, 3, 4]
    assert [row["extra_info"]["index"] for row in rows_by_split["train"]] == [0, 1, 2]
