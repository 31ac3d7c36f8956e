"""Labelled steps: the tokens and labels of each layout, and the errors of bad rows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hone.config import ConfigError
from hone.config.sft import StepDataConfig
from hone.data.rows import DataError
from hone.data.steps import StepDataset, single_token_id

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
TRL = {"prompt": "1+1=", "completions": ["1+1", " 3\n"], "labels": [True, False]}
SHEPHERD = {
    "input": "What is 1+1? Step 1: 1+1 = 2 ки\nStep 2: The answer is: 3 ки",
    "label": "What is 1+1? Step 1: 1+1 = 2 +\nStep 2: The answer is: 3 -",
    "task": "GSM8K",
}
PRM800K = {
    "question": {"problem": "1+1?"},
    "label": {
        "steps": [
            {
                "completions": [{"text": "one", "rating": 1}, {"text": "two", "rating": -1}],
                "chosen_completion": 0,
                "human_completion": None,
            },
            {
                "completions": [{"text": "three", "rating": None}, {"text": "four", "rating": 0}],
                "chosen_completion": None,
                "human_completion": {"text": "mine"},
            },
            {
                "completions": [{"text": "five", "rating": 0}],
                "chosen_completion": None,
                "human_completion": None,
            },
        ]
    },
}


def step_config(**changes: Any) -> StepDataConfig:
    return replace(StepDataConfig(prompt_format="raw"), **changes)


def dataset(tokenizer: Any, *rows: Any, **changes: Any) -> StepDataset:
    return StepDataset(None, tokenizer, step_config(**changes), rows=list(rows))


def labelled_texts(tokenizer: Any, row: dict[str, list[Any]]) -> list[tuple[str, float]]:
    """Returns the text up to each label, and the label."""
    ids = row["input_ids"]
    return [
        (tokenizer.decode(ids[: i + 1]), label)
        for i, (has_label, label) in enumerate(zip(row["loss_mask"], row["labels"], strict=True))
        if has_label
    ]


def test_the_separator_after_each_step_carries_its_label(tokenizer: Any) -> None:
    row = dataset(tokenizer, TRL)[0]
    assert labelled_texts(tokenizer, row) == [("1+1=1+1\n", 1.0), ("1+1=1+1\n3\n", 0.0)]
    assert row["prompt_tokens"] == [4]


def test_a_prompt_is_rendered_as_the_rollout_renders_it(tokenizer: Any) -> None:
    from hone.data.prompt_ids import render_prompt

    messages = [{"role": "user", "content": "1+1="}]
    rows = dataset(tokenizer, TRL, TRL | {"prompt": messages}, prompt_format="chat")
    prompt = render_prompt(messages, tokenizer)
    assert rows[0] == rows[1]
    assert rows[0]["input_ids"][: len(prompt)] == prompt


def test_labels_may_be_probabilities_and_steps_without_one_are_context(tokenizer: Any) -> None:
    row = TRL | {"labels": [0.25, None]}
    assert [label for _, label in labelled_texts(tokenizer, dataset(tokenizer, row)[0])] == [0.25]


def test_math_shepherd_labels_are_read_where_the_marks_stand(tokenizer: Any) -> None:
    row = dataset(tokenizer, SHEPHERD)[0]
    first = "What is 1+1?Step 1: 1+1 = 2\n"
    assert labelled_texts(tokenizer, row) == [
        (first, 1.0),
        (first + "Step 2: The answer is: 3\n", 0.0),
    ]


def test_prm800k_has_one_row_per_rated_step_in_both_of_its_layouts(tokenizer: Any) -> None:
    rows = dataset(tokenizer, PRM800K)
    assert [labelled_texts(tokenizer, rows[i])[0] for i in range(len(rows))] == [
        ("1+1?one\n", 1.0),
        ("1+1?two\n", 0.0),
        ("1+1?one\nfour\n", 1.0),
        ("1+1?one\nmine\nfive\n", 1.0),
    ]
    assert rows.bad_rows.counts == {"no rating": 1}
    step = {"instruction": "1+1?", "responses": ["one"], "next_response": "four", "rating": 0.0}
    assert dataset(tokenizer, step)[0] == rows[2]
    assert len(dataset(tokenizer, PRM800K, neutral_label=None)) == 2
    soft = dataset(tokenizer, step, neutral_label=0.5)[0]
    assert labelled_texts(tokenizer, soft)[0][1] == 0.5


def test_processbench_rows_are_good_before_the_first_error_and_unlabelled_after_it(
    tokenizer: Any,
) -> None:
    row = {"problem": "1", "steps": ["a", "b", "c"], "label": 1}
    assert [label for _, label in labelled_texts(tokenizer, dataset(tokenizer, row)[0])] == [
        1.0,
        0.0,
    ]
    right = dataset(tokenizer, row | {"label": -1})[0]
    assert [label for _, label in labelled_texts(tokenizer, right)] == [1.0] * 3


def test_truncation_keeps_the_end_as_the_worker_of_rl_does(tokenizer: Any) -> None:
    whole = dataset(tokenizer, TRL)[0]
    left = dataset(tokenizer, TRL, max_length=5)[0]
    assert left["input_ids"] == whole["input_ids"][-5:]
    assert labelled_texts(tokenizer, left) == [("+1\n", 1.0), ("+1\n3\n", 0.0)]
    right = dataset(tokenizer, TRL, max_length=9, truncation="right")[0]
    assert [label for _, label in labelled_texts(tokenizer, right)] == [1.0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (TRL | {"labels": [True]}, "2 steps and 'labels' 1 labels"),
        (TRL | {"labels": [True, 2]}, "a probability from 0 to 1, or null; got 2"),
        (TRL | {"labels": [True, float("nan")]}, "a probability from 0 to 1"),
        (TRL | {"labels": [True, "yes"]}, "got 'yes'"),
        (TRL | {"labels": [None, None]}, "no step of the row has a label"),
        (TRL | {"completions": ["1", " "]}, "step 1 of 'completions' is not text, or is empty"),
        (TRL | {"completions": "1"}, "'completions' must be a list"),
        (TRL | {"completions": [], "labels": []}, "has no steps"),
        (TRL | {"prompt": None}, "a prompt must be a string"),
        ({"question": "1", "answer": "2"}, "not a known layout of labelled steps"),
        (SHEPHERD | {"label": SHEPHERD["input"]}, "'label' differs from 'input' at step 1"),
        (SHEPHERD | {"label": SHEPHERD["label"] + " more"}, "after the last"),
        ({"input": "no steps", "label": "no steps"}, "which ends a step"),
        ({"input": "1 ки", "label": "1 +"}, "no 'Step 1:'"),
        ({"problem": "1", "steps": ["a"], "label": 1}, "first wrong of 1 steps"),
        ({"instruction": "1", "responses": [], "next_response": "a", "rating": 7}, "-1, 0, 1"),
        ({"question": {"problem": "1"}, "label": {"steps": [{}]}}, "has no next_response"),
    ],
)
def test_a_bad_row_is_refused_with_its_number_and_the_reason(
    tokenizer: Any, row: Any, reason: str
) -> None:
    with pytest.raises(DataError, match=r"row 1: .*") as caught:
        dataset(tokenizer, TRL, row)
    assert reason in str(caught.value)
    skipping = dataset(tokenizer, TRL, row, on_bad_row="skip")
    assert len(skipping) == 1


def test_a_row_that_is_too_long_stops_the_run_only_where_truncation_is_refused(
    tokenizer: Any,
) -> None:
    rows = dataset(tokenizer, TRL, max_length=5, truncation="error")
    with pytest.raises(DataError, match=r"row 0: the row has 10 tokens, data\.max_length=5"):
        rows.encode_all()


def test_a_separator_of_several_tokens_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"step_separator='ab' has 2 tokens"):
        single_token_id(tokenizer, "ab")


@pytest.mark.parametrize("name", ["prm800k_phase1", "processbench"])
def test_the_public_files_are_read_whole(name: str, tmp_path: Path, tokenizer: Any) -> None:
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip("the data sets are not on this machine")
    (file,) = sorted(folder.glob("*test*.jsonl*")) or sorted(folder.glob("gsm8k.jsonl"))
    opener: Callable[..., Any] = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8") as lines:
        first_rows = [json.loads(line) for line, _ in zip(lines, range(300), strict=False)]
    rows = dataset(tokenizer, *first_rows, max_length=100_000)  # one token per character
    rows.encode_all()
    assert len(rows) > 200
    assert set(rows.bad_rows.counts) <= {"no rating"}


def test_a_rating_too_large_for_a_float_is_a_bad_row(tokenizer: Any) -> None:
    row = {"instruction": "i", "responses": ["a"], "next_response": "b", "rating": 10**400}
    with pytest.raises(DataError, match="'rating' must be -1, 0, 1 or null"):
        dataset(tokenizer, row)
