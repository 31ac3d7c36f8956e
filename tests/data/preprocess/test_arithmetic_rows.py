from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.preprocess.arithmetic import Problem, distinct_problems, tinyzero_splits
from hone.data.rows import DataError
from hone.types import Row


def problem_of(row: Row) -> Problem:
    a, operation, b = row["extra_info"]["question"].split()
    return Problem(int(a), operation, int(b))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.sampled_from("+-*"), min_size=1, unique=True))
def test_rows_are_distinct_disjoint_in_range_and_right(seed: int, operations: list[str]) -> None:
    splits = tinyzero_splits(
        name="arithmetic", operations=operations, train_size=30, test_size=10, seed=seed
    )
    problems = [problem_of(row) for rows in splits.values() for row in rows]
    assert len({problem.key for problem in problems}) == 40
    for split, rows in splits.items():
        assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
        assert {row["extra_info"]["split"] for row in rows} == {split}
        for row in rows:
            problem = problem_of(row)
            a, b = problem.a, problem.b
            result = {"+": a + b, "-": a - b, "*": a * b}[problem.operation]
            assert row["reward_model"]["ground_truth"] == result >= 0
            assert problem.operation in operations
            assert max(a, b) <= 999


def test_a_sum_and_its_twin_are_one_problem() -> None:
    assert Problem(3, "+", 5).key == Problem(5, "+", 3).key
    assert Problem(5, "-", 3).key != Problem(3, "-", 5).key


def test_a_seed_fixes_the_problems() -> None:
    first, again, other = (
        list(itertools.islice(distinct_problems(s, "+-*"), 20)) for s in (4, 4, 5)
    )
    assert first == again != other


def test_too_small_a_range_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.data.preprocess.arithmetic.MAX_CONSECUTIVE_REPEATS", 3000)
    monkeypatch.setattr(
        "hone.data.preprocess.arithmetic._draw_operand", lambda rng: rng.randint(0, 9)
    )
    with pytest.raises(DataError, match="only about 55 distinct"):
        list(distinct_problems(0, "+"))


def test_tinyzeros_sets_have_their_names_and_sizes() -> None:
    rows_by_split = tinyzero_splits(name="multiply", operations="*", train_size=30, test_size=10)
    assert (len(rows_by_split["train"]), len(rows_by_split["test"])) == (30, 10)
    row = rows_by_split["test"][0]
    assert row["data_source"] == "yolo/multiply-3_digit"
    assert "<answer> RESULT_NUMBER </answer>" in row["prompt"][0]["content"]
