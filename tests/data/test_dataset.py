from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.data.dataset import RLHFDataset
from hone.data.rows import DataError, write_parquet


def test_a_row_has_verls_columns_and_all_others(
    tokenizer: Any, config: Any, tmp_path: Path
) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2", "unit": "none"},
        "extra_info": {
            "split": "train",
            "index": 7,
            "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "2"}}},
            "interaction_kwargs": {"name": "gsm8k"},
        },
        "agent_name": "tool_agent",
    }
    write_parquet([row], tmp_path / "x.parquet")
    item = RLHFDataset(str(tmp_path / "x.parquet"), tokenizer, config())[0]
    assert item["raw_prompt"] == row["prompt"]
    assert tokenizer.decode(item["prompt_ids"]).endswith("1+1?<|im_end|>\n<|im_start|>assistant\n")
    assert all(type(token) is int for token in item["prompt_ids"])
    assert item["reward_model"] == row["reward_model"]
    assert item["extra_info"] == row["extra_info"]
    assert item["tools_kwargs"] == row["extra_info"]["tools_kwargs"]  # type: ignore[index]
    assert item["interaction_kwargs"] == {"name": "gsm8k"}
    assert (item["agent_name"], item["index"], item["ability"]) == ("tool_agent", 7, "math")
    assert "prompt" not in item


def test_a_bare_row_gets_empty_columns(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str]
) -> None:
    item = RLHFDataset(write_jsonl([{"prompt": "hi"}]), tokenizer, config())[0]
    assert item["data_source"] == "unknown"
    assert item["agent_name"] is None
    assert (item["reward_model"], item["extra_info"], item["tools_kwargs"]) == ({}, {}, {})
    assert item["index"] == 0


def test_raw_prompts_stay_text(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str]
) -> None:
    path = write_jsonl([{"prompt": [{"role": "user", "content": "User: hi"}]}])
    item = RLHFDataset(path, tokenizer, config(prompt_format="raw"))[0]
    assert item["raw_prompt"] == "User: hi"
    assert tokenizer.decode(item["prompt_ids"]) == "User: hi"


@pytest.mark.parametrize(
    ("truncation", "remaining_text"), [("left", "6789"), ("right", "0123"), ("middle", "0189")]
)
def test_truncation_cuts_the_prompt_ids(
    tokenizer: Any,
    config: Any,
    write_jsonl: Callable[..., str],
    truncation: str,
    remaining_text: str,
) -> None:
    settings = config(prompt_format="raw", max_prompt_length=4, truncation=truncation)
    item = RLHFDataset(write_jsonl([{"prompt": "0123456789"}]), tokenizer, settings)[0]
    assert tokenizer.decode(item["prompt_ids"]) == remaining_text


def test_truncation_error_names_file_row_and_lengths(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str]
) -> None:
    path = write_jsonl([{"prompt": "ok"}, {"prompt": "0123456789"}])
    data = RLHFDataset(path, tokenizer, config(prompt_format="raw", max_prompt_length=4))
    with pytest.raises(DataError, match=r"rows\.jsonl, row 1: the prompt has 10 tokens"):
        data[1]


def test_overlong_prompts_are_left_out_and_counted_with_the_template_measured(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str]
) -> None:
    path = write_jsonl([{"prompt": "a" * n} for n in range(1, 11)])
    overhead = len(RLHFDataset(path, tokenizer, config())[0]["prompt_ids"]) - 1
    settings = config(max_prompt_length=overhead + 4, filter_overlong_prompts=True)
    data = RLHFDataset(path, tokenizer, settings)
    assert [len(row["raw_prompt"][0]["content"]) for row in map(data.__getitem__, range(4))] == [
        1,
        2,
        3,
        4,
    ]
    assert (len(data), data.num_overlong_rows) == (4, 6)
    with pytest.raises(DataError, match="all 10 prompts"):
        RLHFDataset(path, tokenizer, config(max_prompt_length=1, filter_overlong_prompts=True))


def test_max_samples_takes_the_first_in_order_or_a_seeded_draw(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str], make_rows: Any
) -> None:
    path = write_jsonl(make_rows(50))

    def indices(**changes: Any) -> list[int]:
        data = RLHFDataset(path, tokenizer, config(**changes), max_samples=10)
        return [data[i]["index"] for i in range(len(data))]

    assert indices(shuffle=False) == list(range(10))
    drawn = indices(shuffle=True, seed=1)
    assert len(set(drawn)) == 10
    assert drawn == indices(shuffle=True, seed=1) != indices(shuffle=True, seed=2)


BAD = [
    ({"question": "?"}, "missing prompt"),
    ({"prompt": ""}, "missing prompt"),
    ({"prompt": 3}, "wrong type"),
    ({"prompt": "a", "reward_model": "42"}, "wrong type"),
    ({"prompt": "a", "extra_info": [1]}, "wrong type"),
    ({"prompt": "a", "data_source": 1}, "wrong type"),
    ({"prompt": [{"role": "user", "content": "a"}]}, "mixed schema"),
    ({"prompt": "a", "reward_model": {"ground_truth": {"target": 1}}}, "mixed schema"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_a_bad_row_is_an_error_with_its_location_or_is_skipped_and_counted(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str], bad: Any, reason: str
) -> None:
    good = {"prompt": "a", "reward_model": {"ground_truth": "1"}}
    path = write_jsonl([good, bad, good])
    with pytest.raises(DataError, match=r"rows\.jsonl, row 1: .*on_bad_row=skip"):
        RLHFDataset(path, tokenizer, config())
    data = RLHFDataset(path, tokenizer, config(on_bad_row="skip"))
    assert len(data) == 2
    assert data.bad_rows.counts == {reason: 1}


def test_ground_truths_may_differ_in_kind_between_files(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str]
) -> None:
    first = write_jsonl([{"prompt": "a", "reward_model": {"ground_truth": "1"}}], "one.jsonl")
    second = write_jsonl([{"prompt": "a", "reward_model": {"ground_truth": {"t": 1}}}], "two.jsonl")
    data = RLHFDataset([first, second], tokenizer, config())
    assert data[1]["reward_model"]["ground_truth"] == {"t": 1}
    assert data.indices_by_file() == [[0], [1]]


def test_tool_schemas_enter_the_prompt_of_rows_that_may_use_them(
    tool_tokenizer: Any, config: Any, write_jsonl: Callable[..., str], tmp_path: Path
) -> None:
    tools = tmp_path / "tools.yaml"
    tools.write_text(
        "tools:\n- class_name: x.Y\n  config: {}\n  tool_schema:\n    type: function\n"
        "    function: {name: add}\n"
    )
    path = write_jsonl([{"prompt": "a"}, {"prompt": "a", "agent_name": "single_turn_agent"}])
    data = RLHFDataset(path, tool_tokenizer, config(tool_config_path=str(tools)))
    assert tool_tokenizer.decode(data[0]["prompt_ids"]).startswith("add\n")
    assert not tool_tokenizer.decode(data[1]["prompt_ids"]).startswith("add")


def test_added_rows_join_and_travel_in_the_state(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str], make_rows: Any
) -> None:
    path = write_jsonl(make_rows(3))
    data = RLHFDataset(path, tokenizer, config())
    data.append([{"prompt": "new"}])
    assert len(data) == 4
    again = RLHFDataset(path, tokenizer, config())
    again.load_state_dict(data.state_dict())
    assert again[3] == data[3]
    assert again.key(3) == data.key(3) != data.key(2)
    with pytest.raises(DataError, match="added by on_batch_end"):
        data.append([{"question": "no prompt"}])


def test_state_of_other_data_is_refused(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str], make_rows: Any
) -> None:
    state = RLHFDataset(write_jsonl(make_rows(3)), tokenizer, config()).state_dict()
    other = RLHFDataset(write_jsonl(make_rows(4), "other.jsonl"), tokenizer, config())
    with pytest.raises(DataError, match="differ from the checkpoint's data"):
        other.load_state_dict(state)


def test_another_selection_of_the_same_rows_is_other_data(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str], make_rows: Any
) -> None:
    path = write_jsonl(make_rows(30))
    first = RLHFDataset(path, tokenizer, config(seed=1), max_samples=10)
    second = RLHFDataset(path, tokenizer, config(seed=2), max_samples=10)
    with pytest.raises(DataError, match="differ from the checkpoint's data"):
        second.load_state_dict(first.state_dict())


def test_a_prompt_with_a_picture_is_named_or_skipped(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str]
) -> None:
    picture = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]
    path = write_jsonl([{"prompt": [{"role": "user", "content": "a"}]}, {"prompt": picture}])
    with pytest.raises(
        DataError, match="row 1: message 0 has a part of type 'image'; give text only"
    ):
        RLHFDataset(path, tokenizer, config())[1]
    settings = config(filter_overlong_prompts=True, on_bad_row="skip")
    data = RLHFDataset(path, tokenizer, settings)
    assert (len(data), data.bad_rows.counts) == (1, {"cannot be rendered": 1})


def test_arguments_of_tools_that_a_row_does_not_name_are_dropped(
    tokenizer: Any, config: Any, tmp_path: Path
) -> None:
    rows = [{"prompt": "a", "extra_info": {"tools_kwargs": {name: {"x": 1}}}} for name in "ab"]
    write_parquet(rows, tmp_path / "x.parquet")
    data = RLHFDataset(str(tmp_path / "x.parquet"), tokenizer, config())
    assert data[0]["tools_kwargs"] == {"a": {"x": 1}}
    assert data[1]["tools_kwargs"] == {"b": {"x": 1}}


def test_arguments_of_a_tool_may_be_a_text(tokenizer: Any, config: Any) -> None:
    rows = [{"prompt": "a", "extra_info": {"tools_kwargs": {"mine": "a text"}}}]
    assert RLHFDataset(rows, tokenizer, config())[0]["tools_kwargs"] == {"mine": "a text"}


def test_the_error_of_a_row_without_a_prompt_names_its_columns(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str]
) -> None:
    with pytest.raises(DataError, match=r"row 0: column 'prompt' .*the row has question, id"):
        RLHFDataset(write_jsonl([{"question": "a", "id": 1}]), tokenizer, config())


def test_a_file_without_any_known_column_is_skipped_row_by_row(
    tokenizer: Any, config: Any, tmp_path: Path
) -> None:
    write_parquet([{"x": 1}, {"x": 2}], tmp_path / "other.parquet")
    write_parquet([{"prompt": "a"}], tmp_path / "good.parquet")
    files = [str(tmp_path / "other.parquet"), str(tmp_path / "good.parquet")]
    dataset = RLHFDataset(files, tokenizer, config(on_bad_row="skip"))
    assert (dataset.positions, dataset.bad_rows.total) == ([2], 2)
