from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.preprocess.arithmetic import (
    Problem,
    generate_arithmetic,
    split_rows,
    tinyzero_splits,
)
from hone.data.rows import DataError
from hone.types import Row


def parsed(row: Row) -> Problem:
    a, operation, b = row["extra_info"]["question"].split()
    return Problem(int(a), operation, int(b))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(st.sampled_from("+-*"), min_size=1, unique=True),
    st.integers(1, 2),
    st.integers(0, 2),
    st.booleans(),
)
def test_problems_are_distinct_in_range_and_have_the_right_result(
    seed: int, operations: list[str], least: int, more: int, negative: bool
) -> None:
    rows = generate_arithmetic(
        40,
        seed=seed,
        operations=operations,
        min_digits=least,
        max_digits=least + more,
        allow_negative=negative,
    )
    problems = [parsed(row) for row in rows]
    assert len({problem.key for problem in problems}) == 40
    for row, problem in zip(rows, problems, strict=True):
        right = {
            "+": problem.a + problem.b,
            "-": problem.a - problem.b,
            "*": problem.a * problem.b,
        }
        assert row["reward_model"]["ground_truth"] == right[problem.operation]
        assert negative or row["reward_model"]["ground_truth"] >= 0
        assert problem.operation in operations
        for operand in (problem.a, problem.b):
            assert least <= len(str(operand)) <= least + more


def test_a_sum_and_its_twin_are_one_problem() -> None:
    assert Problem(3, "+", 5).key == Problem(5, "+", 3).key
    assert Problem(5, "-", 3).key != Problem(3, "-", 5).key
    sums = generate_arithmetic(55, seed=0, operations="+", max_digits=1)
    assert len({tuple(sorted((parsed(r).a, parsed(r).b))) for r in sums}) == 55


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 50))
def test_splits_are_disjoint_and_numbered_from_zero(seed: int, held_out: int) -> None:
    train, test = split_rows(generate_arithmetic(50, seed=seed), held_out)
    assert (len(train), len(test)) == (50 - held_out, held_out)
    assert not {parsed(row).key for row in train} & {parsed(row).key for row in test}
    for split, rows in (("train", train), ("test", test)):
        assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
        assert {row["extra_info"]["split"] for row in rows} <= {split}


def test_excluded_problems_never_appear() -> None:
    first = generate_arithmetic(30, seed=0, operations="+", max_digits=1)
    keys = {parsed(row).key for row in first}
    others = generate_arithmetic(25, seed=1, operations="+", max_digits=1, exclude=keys)
    assert not keys & {parsed(row).key for row in others}


def test_a_longer_list_begins_with_the_shorter_one() -> None:
    assert generate_arithmetic(50, seed=4)[:20] == generate_arithmetic(20, seed=4)
    assert generate_arithmetic(20, seed=4) != generate_arithmetic(20, seed=5)


def test_the_prompt_follows_the_template_given() -> None:
    row = generate_arithmetic(1, seed=0, template="{question} = ", data_source="sums")[0]
    problem = parsed(row)
    assert row["prompt"] == [{"role": "user", "content": f"{problem.question} = "}]
    assert row["data_source"] == "sums"


def test_too_small_a_range_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.data.preprocess.arithmetic.MAX_MISSES", 3000)
    with pytest.raises(DataError, match="only about 55 distinct"):
        generate_arithmetic(56, seed=0, operations="+", max_digits=1)
    with pytest.raises(DataError, match=r"operations \['/'\]"):
        generate_arithmetic(1, seed=0, operations="/")
    with pytest.raises(DataError, match="digits from 3 to 2"):
        generate_arithmetic(1, seed=0, min_digits=3)


def test_tinyzeros_sets_have_their_names_and_sizes() -> None:
    made = tinyzero_splits(name="multiply", operations="*", train_size=30, test_size=10)
    assert (len(made["train"]), len(made["test"])) == (30, 10)
    row = made["test"][0]
    assert row["data_source"] == "yolo/multiply-3_digit"
    assert "<answer> RESULT_NUMBER </answer>" in row["prompt"][0]["content"]
    assert all(max(parsed(r).a, parsed(r).b) <= 999 for r in made["train"])
