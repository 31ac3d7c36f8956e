from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hone.data.preprocess.search_qa import closed_world_splits, question_splits
from hone.data.preprocess.sources import Source
from hone.data.rows import DataError


def write(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "nq_open/dev.jsonl", [{"question": " who is it ", "answer": ["A", "B"]}])
    write(tmp_path / "ambig_nq/train.jsonl", [{"question": "when?", "answers": ["1989"]}])
    write(tmp_path / "hotpotqa/dev.jsonl", [{"question": "yes?", "golden_answers": ["no"]}])
    return tmp_path


def test_a_row_has_search_r1s_schema(folder: Path) -> None:
    rows_by_split = question_splits(Source(folder), data_sources="nq")
    row = rows_by_split["test"][0]
    assert row["data_source"] == "nq"
    assert row["ability"] == "fact-reasoning"
    assert row["reward_model"] == {"style": "rule", "ground_truth": {"target": ["A", "B"]}}
    assert row["extra_info"] == {"split": "test", "index": 0}
    (message,) = row["prompt"]
    assert message["content"].startswith("Answer the given question")
    assert message["content"].endswith("Question: who is it?\n")
    for tag in (
        "<think>",
        "<search> query </search>",
        "<information>",
        "<answer> Beijing </answer>",
    ):
        assert tag in message["content"]


def test_ambignq_stands_in_for_nqs_training_file(folder: Path) -> None:
    assert question_splits(Source(folder), data_sources="nq")["train"][0]["reward_model"][
        "ground_truth"
    ] == {"target": ["1989"]}


def test_several_sets_are_merged_and_dev_serves_as_test(folder: Path) -> None:
    rows_by_split = question_splits(Source(folder), data_sources="nq,hotpotqa")
    assert [row["data_source"] for row in rows_by_split["test"]] == ["nq", "hotpotqa"]
    assert [row["data_source"] for row in rows_by_split["train"]] == ["nq"]


def test_without_search_the_prompt_does_not_offer_it(folder: Path) -> None:
    row = question_splits(Source(folder), data_sources="nq", style="reason")["test"][0]
    assert "<search>" not in row["prompt"][0]["content"]


def test_the_tool_form_names_the_source_and_carries_the_tools_arguments(folder: Path) -> None:
    row = question_splits(Source(folder), data_sources="nq", style="tool")["test"][0]
    assert row["data_source"] == "searchR1_nq"
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["extra_info"]["need_tools_kwargs"] is True
    assert row["extra_info"]["tools_kwargs"]["search"]["create_kwargs"] == {
        "ground_truth": {"target": ["A", "B"]},
        "question": "who is it?",
        "data_source": "searchR1_nq",
    }


def test_closed_world_questions_hold_out_each_eighth_answerable_one(tmp_path: Path) -> None:
    write(
        tmp_path / "wiki_corpus/questions.jsonl",
        [
            {
                "data_source": "nq",
                "question": f"q{i}?",
                "answers": ["a"],
                "answer_in_corpus": i < 16,
            }
            for i in range(20)
        ],
    )
    rows_by_split = closed_world_splits(Source(tmp_path))
    assert (len(rows_by_split["train"]), len(rows_by_split["test"])) == (14, 2)
    assert "q7?" in rows_by_split["test"][0]["prompt"][0]["content"]


def test_mistakes_are_named(folder: Path) -> None:
    with pytest.raises(DataError, match="data_sources is empty; use nq, "):
        question_splits(Source(folder), data_sources=" ,")
    with pytest.raises(DataError, match="'trivia' is not known"):
        question_splits(Source(folder), data_sources="trivia")
    with pytest.raises(DataError, match="style 'chat'"):
        question_splits(Source(folder), data_sources="nq", style="chat")
    with pytest.raises(DataError, match="has none of train, test"):
        question_splits(Source(folder), data_sources="musique")
    write(folder / "bamboogle/test.jsonl", [{"question": "q"}])
    with pytest.raises(DataError, match="has no answers"):
        question_splits(Source(folder), data_sources="bamboogle")
