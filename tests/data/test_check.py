from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.config.data import DataConfig
from hone.data.check import check_file, histogram


def test_a_good_file_is_described_and_passes(
    write_jsonl: Callable[..., str], make_rows: Any
) -> None:
    status, report = check_file(
        write_jsonl(make_rows(30)), is_known_source={"arithmetic"}.__contains__
    )
    assert status == 0
    assert "30 rows" in report
    assert "prompt length in characters: shortest 4, median 5, longest 5" in report
    assert "arithmetic: 30" in report
    assert "reward_model  object" in report
    assert report.endswith("0 errors, 0 warnings")


def test_lengths_are_in_tokens_with_a_tokenizer(
    write_jsonl: Callable[..., str], make_rows: Any, tokenizer: Any
) -> None:
    config = DataConfig(max_prompt_length=8)
    status, report = check_file(write_jsonl(make_rows(3)), tokenizer=tokenizer, config=config)
    assert status == 0
    assert "prompt length in tokens" in report
    assert "3 prompts have more than data.max_prompt_length=8 tokens" in report


def test_bad_rows_are_errors_with_file_and_row(write_jsonl: Callable[..., str]) -> None:
    good = {"prompt": "a", "reward_model": {"ground_truth": "1"}}
    path = write_jsonl([good, {"question": "x"}, {**good, "prompt": 5}, good])
    status, report = check_file(path)
    assert status == 1
    assert "error: 1 rows: missing prompt" in report
    assert "rows.jsonl, row 1: column 'prompt'" in report
    assert "rows.jsonl, row 2" in report


def test_ground_truths_missing_in_part_are_an_error(write_jsonl: Callable[..., str]) -> None:
    rows = [{"prompt": f"{i}", "reward_model": {"ground_truth": "1"}} for i in range(3)]
    rows.append({"prompt": "x", "reward_model": {}})
    status, report = check_file(write_jsonl(rows))
    assert status == 1
    assert "1 rows have no reward_model.ground_truth (rows 3)" in report


def test_no_ground_truth_at_all_is_a_warning(write_jsonl: Callable[..., str]) -> None:
    status, report = check_file(write_jsonl([{"prompt": "a"}, {"prompt": "b"}]))
    assert status == 0
    assert "warning: no row has reward_model.ground_truth" in report


def test_rows_for_a_reward_model_or_with_tests_need_no_ground_truth(
    write_jsonl: Callable[..., str],
) -> None:
    rows: list[Any] = [
        {"prompt": "a", "reward_model": {"style": "model"}},
        {"prompt": "b", "extra_info": {"test_cases": [{"input": "1"}]}},
        {"prompt": "c", "reward_model": {"ground_truth": "1"}},
    ]
    assert check_file(write_jsonl(rows))[0] == 0


def test_rows_of_a_reward_model_do_not_count_as_other_rows(write_jsonl: Callable[..., str]) -> None:
    rows = [
        {"prompt": "a", "reward_model": {"style": "model", "ground_truth": "x"}},
        {"prompt": "b", "reward_model": {"style": "rule"}},
    ]
    status, report = check_file(write_jsonl(rows))
    assert (status, "no row of a rule has reward_model.ground_truth" in report) == (0, True)


def test_unknown_sources_are_errors_by_any_predicate(
    write_jsonl: Callable[..., str], make_rows: Any
) -> None:
    path = write_jsonl(make_rows(2, source="my_task"))
    status, report = check_file(path, is_known_source={"openai/gsm8k"}.__contains__)
    assert status == 1
    assert "no scorer knows data_source 'my_task'" in report
    assert check_file(path, is_known_source=lambda name: name.startswith("my_"))[0] == 0


def test_rows_for_a_reward_model_need_no_scorer(write_jsonl: Callable[..., str]) -> None:
    row = {"prompt": "a", "data_source": "talk", "reward_model": {"style": "model"}}
    assert check_file(write_jsonl([row]), is_known_source=set().__contains__)[0] == 0


def test_duplicate_prompts_are_counted(write_jsonl: Callable[..., str], make_rows: Any) -> None:
    rows = make_rows(4)
    status, report = check_file(write_jsonl([*rows, rows[2], rows[2]]))
    assert status == 0
    assert "2 rows repeat an earlier prompt (such as rows 2, 4, 5)" in report


def test_the_same_words_about_another_picture_are_no_duplicate(
    write_jsonl: Callable[..., str],
) -> None:
    rows = [
        {"prompt": "x?", "images": [{"path": f"{i}.png"}], "reward_model": {"ground_truth": "1"}}
        for i in range(2)
    ]
    assert "0 warnings" in check_file(write_jsonl(rows))[1]


def test_missing_empty_and_unreadable_files_fail(tmp_path: Path) -> None:
    assert check_file(tmp_path / "no.parquet")[0] == 1
    for name, content in (("x.jsonl", b""), ("x.parquet", b"junk")):
        (tmp_path / name).write_bytes(content)
        status, report = check_file(tmp_path / name)
        assert status == 1
        assert report.startswith("error: ")


def test_a_column_that_some_rows_lack_is_reported(write_jsonl: Callable[..., str]) -> None:
    report = check_file(write_jsonl([{"prompt": "a", "x": 1}, {"prompt": "b", "x": None}]))[1]
    assert "x       number, missing in 1" in report


def test_the_histogram_counts_every_length_once() -> None:
    lines = histogram([1, 1, 2, 9, 10], "tokens", num_buckets=5)
    counts = [int(line.split()[3]) for line in lines[1:]]
    assert counts == [3, 0, 0, 0, 2]
    assert histogram([], "tokens") == []


def test_files_for_supervised_training_are_asked_for_no_ground_truth(
    write_jsonl: Callable[..., str],
) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    for rows in (
        [{"messages": turns}, {"messages": [*turns, *turns]}],
        [{"question": "a", "answer": "b"}, {"question": "a", "answer": "c"}],
        [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "c"}],
    ):
        status, report = check_file(write_jsonl(rows), is_known_source=set().__contains__)
        assert status == 0, report
        assert "for supervised training" in report
        assert report.endswith("0 errors, 0 warnings")
    status, report = check_file(write_jsonl([{"messages": turns}, {"messages": []}]))
    assert status == 1
    assert "row 1: column 'messages'" in report


def test_preferences_are_checked_as_training_reads_them(write_jsonl: Callable[..., str]) -> None:
    question, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
    dialogue = "\n\nHuman: hi\n\nAssistant: "
    for rows, command in (
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "hone dpo"),
        ([{"chosen": dialogue + "a", "rejected": dialogue + "b"}], "hone dpo"),
        (
            [{"prompt": "a", "completion": "b", "label": label} for label in (True, False)],
            "hone dpo algorithm.loss_type=kto",
        ),
        ([{"messages": [question, answer], "label": False}], "hone dpo algorithm.loss_type=kto"),
    ):
        status, report = check_file(write_jsonl(rows), is_known_source=set().__contains__)
        assert status == 0, report
        assert f"\nfor training on preferences: {command}\n" in report
        assert report.endswith("0 errors, 0 warnings")
    for row, message in (
        (
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            "the two responses of the pair are the same",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "a response of the pair is empty"),
        ({"prompt": "a", "chosen": "b"}, "column 'rejected' is missing or empty"),
    ):
        good = {"prompt": "a", "chosen": "b", "rejected": "c"}
        status, report = check_file(write_jsonl([good, row]))
        assert status == 1
        assert f"row 1: {message}" in report
    bad_label = {"prompt": "a", "completion": "b", "label": "yes"}
    status, report = check_file(write_jsonl([bad_label]))
    assert status == 1
    assert "row 0: column 'label' must be true or false" in report


def test_rows_that_supervised_training_refuses_are_errors(write_jsonl: Callable[..., str]) -> None:
    question, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
    conversations = [{"messages": [question, answer]}, {"messages": [question]}]
    status, report = check_file(write_jsonl(conversations))
    assert status == 1
    assert "row 1: column 'messages' has no assistant turn" in report
    for row, message in (
        ({"question": "a"}, "row 1: column 'answer' is missing"),
        ({"question": "a", "answer": 5}, "row 1: column 'answer' must be text, got number"),
        ({"answer": "b"}, "row 1: column 'question' (data.prompt_key) is missing"),
    ):
        status, report = check_file(write_jsonl([{"question": "x", "answer": "y"}, row]))
        assert status == 1
        assert message in report
        assert report.endswith("1 error (1 bad row), 0 warnings")


def test_a_question_is_no_prompt_where_a_scorer_is_named(write_jsonl: Callable[..., str]) -> None:
    row = {"question": "a", "answer": "b", "data_source": "known"}
    status, report = check_file(write_jsonl([row]), is_known_source={"known"}.__contains__)
    assert status == 1
    assert "column 'prompt' (data.prompt_key) is missing" in report


def test_the_last_line_counts_errors_and_bad_rows(write_jsonl: Callable[..., str]) -> None:
    good = {"prompt": "a", "reward_model": {"ground_truth": "1"}}
    bad: list[Any] = [{"x": 1}, {"x": 2}, {**good, "prompt": 5}]
    report = check_file(write_jsonl([good, *bad]))[1]
    assert report.endswith("2 errors (3 bad rows), 0 warnings")
    assert [line.startswith("  ") for line in report.splitlines()[-4:-1]] == [True] * 3


def test_the_error_of_a_missing_file_names_no_config_key(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "no.parquet", "does not exist"), (tmp_path, "is a folder")):
        status, report = check_file(path)
        assert (status, f"error: {path} {message}" in report) == (1, True)
        assert "data.train_files" not in report


def test_an_answer_column_does_not_excuse_a_row_with_a_data_source(
    write_jsonl: Callable[..., str],
) -> None:
    row = {"prompt": "a", "answer": "b", "data_source": "mystery"}
    status, report = check_file(write_jsonl([row]), is_known_source={"known"}.__contains__)
    assert status == 1
    assert "no scorer knows data_source 'mystery'" in report


@pytest.mark.parametrize(
    ("row", "pattern"),
    [
        ({"agent_name": "evil.py:Loop"}, "not its import path"),
        ({"agent_name": "unheard_of"}, "use single_turn_agent, tool_agent"),
        ({"agent_name": 5}, "'agent_name' must be text, got number"),
        ({"prompt": "a\ud800"}, "lone surrogate"),
        ({"extra_info": {"x": ["\udfff"]}}, "lone surrogate"),
        ({"prompt": "a\0b"}, "NUL"),
        ({"prompt": [{"role": "wizard", "content": "a"}]}, "role 'wizard'"),
        ({"prompt": [{"role": "user", "content": ["a"]}]}, "every part"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "every part"),
        (
            {"tools_kwargs": "abc"},
            "tools_kwargs must be an object|'tools_kwargs' must be an object",
        ),
        ({"extra_info": {"tools_kwargs": {"t": 5}}}, "extra_info.tools_kwargs.t must be an object"),
    ],
)
def test_what_training_would_refuse_is_an_error(
    write_jsonl: Callable[..., str], make_rows: Any, row: dict[str, Any], pattern: str
) -> None:
    rows = [*make_rows(1), {**make_rows(1)[0], **row}]
    if isinstance(row.get("prompt"), list):
        rows[0]["prompt"] = [{"role": "user", "content": "a"}]
    status, report = check_file(write_jsonl(rows))
    assert status == 1
    assert re.search(f"row 1: .*({pattern})", report), report
    assert "1 bad row" in report


def test_deep_json_is_a_bad_row_of_the_report(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "a"}\n' + "[" * 100_000 + "\n")
    status, report = check_file(path)
    assert (status, "row 1: not JSON: it is nested" in report) == (1, True)


def test_loops_of_ones_own_may_be_named(write_jsonl: Callable[..., str], make_rows: Any) -> None:
    path = write_jsonl([{**make_rows(1)[0], "agent_name": "mine"}])
    assert check_file(path, known_loops=["mine"])[0] == 0


def test_a_limit_that_is_given_makes_long_prompts_errors_with_their_rows(
    write_jsonl: Callable[..., str], tokenizer: Any
) -> None:
    path = write_jsonl([{"prompt": "a"}, {"prompt": "a" * 90}, {"prompt": "b" * 9000}])
    status, report = check_file(path, tokenizer=tokenizer, max_prompt_length=60)
    assert status == 1
    assert "error: 2 prompts have more than data.max_prompt_length=60 tokens (rows 1, 2)" in report
    assert check_file(path, tokenizer=tokenizer, max_prompt_length=9999)[0] == 0


@pytest.mark.parametrize(
    ("columns", "prompt_key"),
    [(("question", "answer"), "question"), (("prompt", "answer"), "prompt")],
)
def test_a_scorer_is_called_on_rows_with_answers_beside_prompts(
    columns: tuple[str, str], prompt_key: str, write_jsonl: Callable[..., str]
) -> None:
    path = write_jsonl([dict(zip(columns, ("1+1?", "2"), strict=True))])
    seen = []

    def score(row: dict[str, Any]) -> float:
        seen.append(row)
        return 1.0

    config = DataConfig(prompt_key=prompt_key, prompt_format="raw")
    status, report = check_file(path, score=score, config=config)
    assert status == 0
    assert "1 in 1 rows" in report
    truth = (seen[0].get("reward_model") or {}).get("ground_truth")
    assert truth == ("2" if prompt_key == "question" else None)  # PURE's layout


def test_a_scorer_of_ones_own_is_called_on_every_row(write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([{"prompt": f"{i}", "data_source": "my/own"} for i in range(5)])

    def score(row: Any) -> float | str:
        return "exception: no" if row["prompt"] in "24" else float(row["prompt"] == "0")

    status, report = check_file(path, score=score)
    assert status == 1
    assert "scores when the ground truth is the response: 1 in 1, 0 in 2 rows" in report
    assert "error: 2 rows cannot be scored (rows 2, 4); row 2: exception: no" in report
    assert check_file(path, score=lambda row: 0.5)[0] == 0
