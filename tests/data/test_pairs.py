"""Pairs of responses: the sequences of each layout, and the errors of bad rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hone.config.sft import PairDataConfig
from hone.data.pairs import PairDataset
from hone.data.rows import DataError

PLAIN = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
USER = {"role": "user", "content": "1+1="}
HH = {
    "chosen": "\n\nHuman: 1+1=\n\nAssistant: what?\n\nHuman: the sum\n\nAssistant: 2",
    "rejected": "\n\nHuman: 1+1=\n\nAssistant: what?\n\nHuman: the sum\n\nAssistant: 3",
}


def dataset(tokenizer: Any, *rows: Any, **changes: Any) -> PairDataset:
    config = replace(PairDataConfig(), **changes)
    return PairDataset(None, tokenizer, config, rows=list(rows))


def texts(tokenizer: Any, row: dict[str, list[Any]]) -> tuple[str, str]:
    chosen, rejected = (tokenizer.decode(row[key]) for key in ("input_ids", "rejected_ids"))
    return str(chosen), str(rejected)


def test_every_layout_is_the_policys_prompt_the_response_and_the_end(tokenizer: Any) -> None:
    answer = {"role": "assistant", "content": "2"}
    worse = {"role": "assistant", "content": "3"}
    rows = dataset(
        tokenizer,
        PLAIN,
        {"prompt": [USER], "chosen": [answer], "rejected": worse},
        {"chosen": [USER, answer], "rejected": [USER, worse]},
        {
            "conversations": [{"from": "human", "value": "1+1="}],
            "chosen": {"from": "gpt", "value": "2"},
            "rejected": {"from": "gpt", "value": "3"},
        },
        {
            "chosen": "\n\nHuman: 1+1=\n\nAssistant: 2",
            "rejected": "\n\nHuman: 1+1=\n\nAssistant: 3",
        },
    )
    start = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    for i in range(len(rows)):
        assert texts(tokenizer, rows[i]) == (start + "2<|im_end|>", start + "3<|im_end|>")
        assert len(tokenizer.decode(rows[i]["input_ids"][: rows[i]["prompt_tokens"][0]])) == len(
            start
        )
        assert rows[i]["margin"] == [0.0]


def test_a_dialogue_keeps_its_turns_and_a_raw_prompt_its_text(tokenizer: Any) -> None:
    chosen, _ = texts(tokenizer, dataset(tokenizer, HH)[0])
    assert "assistant\nwhat?<|im_end|>\n<|im_start|>user\nthe sum" in chosen
    raw = dataset(tokenizer, PLAIN | {"margin": 0.5}, prompt_format="raw")[0]
    assert texts(tokenizer, raw) == ("1+1=2<|im_end|>", "1+1=3<|im_end|>")
    assert raw["margin"] == [0.5]


def test_truncation_drops_the_start_of_the_prompt_of_both(tokenizer: Any) -> None:
    row = dataset(tokenizer, PLAIN, prompt_format="raw", max_length=4)[0]
    assert texts(tokenizer, row) == ("1=2<|im_end|>", "1=3<|im_end|>")
    with pytest.raises(DataError, match="row 0: no prompt is left"):
        dataset(tokenizer, PLAIN, prompt_format="raw", max_length=2).encode_all()
    with pytest.raises(DataError, match=r"row 0: the row has 6 tokens, data\.max_length=5"):
        dataset(
            tokenizer, PLAIN, prompt_format="raw", max_length=5, truncation="error"
        ).encode_all()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (PLAIN | {"rejected": " 2"}, "the two responses of the pair are the same"),
        (PLAIN | {"chosen": " "}, "a response of the pair is empty"),
        (PLAIN | {"chosen": None}, "column 'chosen' is missing or empty"),
        (PLAIN | {"chosen": 2}, "a response must be text or a message with text"),
        (PLAIN | {"margin": "much"}, "column 'margin' must be a number"),
        (PLAIN | {"prompt": [{"role": "usr", "content": "1"}]}, "which no chat template knows"),
        (HH | {"chosen": "2"}, "must be a dialogue that starts with Human:"),
        (HH | {"chosen": HH["chosen"].replace("what?", "why?")}, "differ before their last turn"),
        (HH | {"chosen": HH["chosen"] + "\n\nHuman: ok"}, "must end with the assistant's response"),
    ],
)
def test_a_bad_row_is_refused_with_its_number_and_the_reason(
    tokenizer: Any, row: Any, reason: str
) -> None:
    with pytest.raises(DataError, match=r"row 1: .*") as caught:
        dataset(tokenizer, PLAIN, row)
    assert reason in str(caught.value)
    assert len(dataset(tokenizer, PLAIN, row, on_bad_row="skip")) == 1


def test_repeated_and_contradicting_pairs_are_left_out_where_asked(tokenizer: Any) -> None:
    swapped = PLAIN | {"chosen": "3", "rejected": "2"}
    rows = (PLAIN, PLAIN, swapped)
    assert len(dataset(tokenizer, *rows)) == 3
    filtered = dataset(tokenizer, *rows, drop_duplicates=True, on_bad_row="skip")
    assert filtered.bad_rows.counts == {"duplicate": 1, "contradiction": 1}


def test_two_dialogues_with_from_and_value_are_a_pair(tokenizer: Any) -> None:
    human = {"from": "human", "value": "1+1="}
    row = {
        key: [human, {"from": "gpt", "value": text}]
        for key, text in (("chosen", "2"), ("rejected", "3"))
    }
    assert dataset(tokenizer, row)[0] == dataset(tokenizer, PLAIN)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": None, "conversations": 5},
        {"prompt": None, "conversations": []},
        {"prompt": None, "conversations": [{"from": ["human"], "value": "1+1="}]},
        {"prompt": None, "conversations": [{"from": "human"}]},
        {"margin": 10**400},
    ],
)
def test_an_odd_value_is_a_bad_row(tokenizer: Any, changes: dict[str, Any]) -> None:
    data = dataset(tokenizer, PLAIN, {**PLAIN, **changes}, on_bad_row="skip")
    assert (len(data), data.bad_rows.total) == (1, 1)
