"""Labelled responses: the sequences of each layout, and the errors of bad rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hone.config.preference import PreferenceDataConfig
from hone.data.labelled import LabelledDataset
from hone.data.rows import DataError

PLAIN = {"prompt": "1+1=", "completion": "2", "label": True}
USER = {"role": "user", "content": "1+1="}
ANSWER = {"role": "assistant", "content": "2"}


def dataset(tokenizer: Any, *rows: Any, **changes: Any) -> LabelledDataset:
    config = replace(PreferenceDataConfig(), **changes)
    return LabelledDataset(None, tokenizer, config, rows=list(rows))


def test_every_layout_is_the_policys_prompt_the_response_and_the_end(tokenizer: Any) -> None:
    rows = dataset(
        tokenizer,
        PLAIN,
        {"prompt": [USER], "completion": [ANSWER], "label": True},
        {"messages": [USER, ANSWER], "label": True},
        {"completion": "\n\nHuman: 1+1=\n\nAssistant: 2", "label": 1},
    )
    start = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    for i in range(len(rows)):
        assert tokenizer.decode(rows[i]["input_ids"]) == start + "2<|im_end|>"
        assert tokenizer.decode(rows[i]["input_ids"][: rows[i]["prompt_tokens"][0]]) == start
        assert rows[i]["label"] == [1]
    assert dataset(tokenizer, PLAIN | {"label": False})[0]["label"] == [0]


def test_truncation_drops_the_start_of_the_prompt_and_never_the_response(tokenizer: Any) -> None:
    row = dataset(tokenizer, PLAIN, prompt_format="raw", max_length=4)[0]
    assert tokenizer.decode(row["input_ids"]) == "1=2<|im_end|>"
    with pytest.raises(DataError, match=r"row 0: no prompt is left.*the response has 2; raise it"):
        dataset(tokenizer, PLAIN, prompt_format="raw", max_length=2).encode_all()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (PLAIN | {"completion": " "}, "row 0: the response is empty"),
        (
            PLAIN | {"completion": None},
            "row 0: column 'completion' is missing or empty; the row has",
        ),
        (PLAIN | {"label": None}, "row 0: column 'label' is missing or empty"),
        (PLAIN | {"label": "good"}, "row 0: column 'label' must be true or false, got 'good'"),
        (PLAIN | {"label": 2}, "row 0: column 'label' must be true or false, got 2"),
    ],
)
def test_bad_rows_say_what_is_wrong(tokenizer: Any, row: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        dataset(tokenizer, row)
