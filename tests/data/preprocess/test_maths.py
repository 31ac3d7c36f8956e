from __future__ import annotations

import json
from pathlib import Path

import pytest

from hone.data.preprocess.maths import benchmark_splits, last_boxed, tidy_answer
from hone.data.preprocess.sources import Source


@pytest.mark.parametrize(
    ("answer", "tidy"),
    [
        ("9 (apples)", "9"),
        ("43.0", "43"),
        ("-2.0", "-2"),
        ("2.50", "2.50"),
        (204, "204"),
        ("f(x)", "f(x)"),
        ("(3, 4)", "(3, 4)"),
    ],
)
def test_units_and_empty_fractions_are_removed(answer: object, tidy: str) -> None:
    assert tidy_answer(answer) == tidy


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1}", "1"),
        (r"a \boxed{1} b \boxed{\frac{1}{2}} c", r"\frac{1}{2}"),
        (r"\fbox{x}", "x"),
        (r"$\boxed 7$ dollars", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{unclosed", None),
        ("nothing", None),
    ],
)
def test_the_last_box_is_found_with_balanced_braces(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_each_set_is_asked_in_the_form_its_scorer_reads(tmp_path: Path) -> None:
    (tmp_path / "math_eval").mkdir()
    line = json.dumps({"problem": "1+1?", "answer": "2"})
    for name in ("aime24", "math500"):
        (tmp_path / f"math_eval/{name}.jsonl").write_text(line)
    (aime,) = benchmark_splits(Source(tmp_path), name="aime24")["test"]
    assert "`Answer: <answer>`" in aime["prompt"][0]["content"]
    assert aime["data_source"] == "aime24"
    (boxed,) = benchmark_splits(Source(tmp_path), name="math500")["test"]
    assert boxed["prompt"][0]["content"].endswith(r"within \boxed{}.")
    assert boxed["data_source"] == "HuggingFaceH4/MATH-500"
    assert boxed["reward_model"]["ground_truth"] == "2"
