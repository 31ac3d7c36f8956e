"""`hone data show` prints rows as the model sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hone.config.data import DataConfig
from hone.data.rows import DataError
from hone.data.show import parse_row_numbers, show_file


def test_a_prompt_is_shown_with_its_special_tokens_tools_and_ground_truth(
    write_jsonl: Callable[..., str], tool_tokenizer: Any
) -> None:
    row = {
        "data_source": "mine",
        "prompt": "6*7=",
        "reward_model": {"ground_truth": "42"},
        "extra_info": {"index": 3},
    }
    tools = [{"type": "function", "function": {"name": "calc"}}]
    text = show_file(write_jsonl([row]), tokenizer=tool_tokenizer, tools=tools)
    assert text.splitlines()[0].endswith("rows.jsonl, row 0")
    assert (
        "tokens:\n  | calc\n  | <|im_start|>user\n  | 6*7=<|im_end|>\n  | <|im_start|>ass" in text
    )
    assert "ground truth: 42" in text
    assert 'extra_info: {"index": 3}' in text
    short = show_file(
        write_jsonl([row]), tokenizer=tool_tokenizer, config=DataConfig(max_prompt_length=5)
    )
    assert "tokens, more than the 5 that fit:" in short


def test_without_a_tokenizer_messages_are_shown_as_they_stand(
    write_jsonl: Callable[..., str],
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"}]
    text = show_file(write_jsonl([{"prompt": messages}]))
    assert "system:\n  | Be brief.\nuser:\n  | a\n  | b" in text


def test_what_supervised_training_learns_is_marked(
    write_jsonl: Callable[..., str], tokenizer: Any
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    text = show_file(write_jsonl([{"messages": messages}]), tokenizer=tokenizer)
    assert "learnt | yes<|im_end|>" in text
    assert "       | hi<|im_end|>" in text
    single = show_file(write_jsonl([{"question": "hi", "answer": "yes"}]), tokenizer=tokenizer)
    assert "learnt | yes<|im_end|>" in single


def test_a_row_that_cannot_be_shown_says_why_and_the_others_are_shown(
    write_jsonl: Callable[..., str],
) -> None:
    text = show_file(write_jsonl([{"prompt": "a"}, {"q": "b"}, {"prompt": 5}, {"prompt": "d"}]))
    assert "cannot be shown: column 'prompt' (--prompt-key) is missing; the row has q" in text
    assert (
        "cannot be shown: a prompt must be a string or a non-empty list of messages, got 5" in text
    )
    assert text.count("== ") == 3  # the first three rows


def test_rows_are_chosen_by_number() -> None:
    assert parse_row_numbers("0,3-5", 6) == [0, 3, 4, 5]
    with pytest.raises(DataError, match="write numbers and ranges, as in 0,3-5"):
        parse_row_numbers("first", 6)
    with pytest.raises(DataError, match="the file has rows 0 to 5, not 6"):
        parse_row_numbers("4-6", 6)


def test_a_row_that_cannot_be_trained_on_does_not_hide_the_others(
    write_jsonl: Callable[..., str], tokenizer: Any
) -> None:
    question, answer = ({"role": role, "content": "a"} for role in ("user", "assistant"))
    rows = [{"messages": [question]}, {"messages": [question, answer]}]
    text = show_file(write_jsonl(rows), tokenizer=tokenizer)
    assert "column 'messages' has no assistant turn, so nothing to learn\n\n==" in text
    assert "learnt | a<|im_end|>" in text
    with pytest.raises(DataError, match="rows 0 to 1, not 2"):
        parse_row_numbers("0-99999999999999999999", 2)


def test_two_dialogues_without_a_prompt_are_shown(write_jsonl: Callable[..., str]) -> None:
    dialogue = "\n\nHuman: 1+1=\n\nAssistant: "
    text = show_file(write_jsonl([{"chosen": f"{dialogue}2", "rejected": f"{dialogue}3"}]))
    assert "rejected: \\n\\nHuman: 1+1=\\n\\nAssistant: 3" in text
