"""Hostile rows raise only the documented errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.config.data import DataConfig
from hone.config.sft import SFTDataConfig
from hone.data.check import check_file
from hone.data.dataset import RLHFDataset
from hone.data.reading import read_rows
from hone.data.rows import BadRowPolicy, DataError
from hone.data.sft import MultiTurnSFTDataset

KEYS = (
    *("prompt", "messages", "role", "content", "type", "text", "reward_model", "ground_truth"),
    *("style", "extra_info", "index", "data_source", "agent_name", "tools_kwargs", "images"),
    *("interaction_kwargs", "tools", "name", "answer", "question"),
)
TEXTS = ("user", "assistant", "wizard", "os:getcwd", "\ud800", "\0", "é", "", "[" * 99, "model")
LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(TEXTS)
VALUE = st.recursive(
    LEAF,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(TEXTS), "content": VALUE})
ROW = st.dictionaries(st.sampled_from(KEYS), VALUE | st.lists(MESSAGE, max_size=2), max_size=5)
LINE = ROW.map(lambda row: json.dumps(row).encode()) | st.binary(max_size=30)
GOOD = {"prompt": "a", "messages": [{"role": "assistant", "content": "b"}]}


def error_text(call: Callable[[], Any]) -> str:
    """Returns the message of the documented error; any other error fails the test."""
    try:
        call()
    except DataError as error:
        return str(error)
    return "rows.jsonl, row"


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(LINE, min_size=1, max_size=3))
def test_no_row_breaks_what_reads_it(tokenizer: Any, tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([json.dumps(GOOD).encode(), *lines]) + b"\n")
    status, report = check_file(path, tokenizer=tokenizer, is_known_source=set().__contains__)
    assert status in (0, 1)
    report.encode("utf-8")
    config = replace(DataConfig(tool_config_path=None), on_bad_row="skip")
    data = RLHFDataset(str(path), tokenizer, config)
    for index in range(len(data)):
        assert "rows.jsonl, row" in error_text(lambda index=index: data[index])  # type: ignore[misc]
    raising = replace(config, on_bad_row="raise")
    assert "rows.jsonl, row" in error_text(lambda: RLHFDataset(str(path), tokenizer, raising))
    sft_config = replace(SFTDataConfig(), on_bad_row="skip")
    assert not MultiTurnSFTDataset(str(path), tokenizer, sft_config).encode_all()


def test_a_megabyte_is_refused_before_it_is_tokenised(
    tokenizer: Any, config: Callable[..., DataConfig], write_jsonl: Callable[..., str]
) -> None:
    path = write_jsonl([{"prompt": "a"}, {"prompt": "x" * 1_000_000}])
    lengths: list[int] = []

    class Counting:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def encode(self, text: str, **options: Any) -> Any:
            lengths.append(len(text))
            return self._inner.encode(text, **options)

    counting = Counting(tokenizer)
    data = RLHFDataset(path, counting, config(max_prompt_length=64, filter_overlong_prompts=True))
    assert (len(data), data.num_overlong_rows) == (1, 1)
    with pytest.raises(DataError, match=r"row 1: .*1,000,0\d\d characters"):
        RLHFDataset(path, counting, config(max_prompt_length=64))[1]
    report = check_file(path, tokenizer=counting, config=config(max_prompt_length=64))[1]
    assert "1 prompts have more than data.max_prompt_length=64" in report
    assert max(lengths) < 100_000


def test_a_long_text_that_fits_is_kept(
    plain_tokenizer: Any, config: Callable[..., DataConfig], write_jsonl: Callable[..., str]
) -> None:
    """A token may have many characters, so a text is refused only by the tokens of its start."""

    class OneToken:
        chat_template = None

        def encode(self, text: str, **options: Any) -> list[int]:
            return [7] * (1 + len(text) // 10_000)

    path = write_jsonl([{"prompt": "x" * 300_000}])
    assert len(RLHFDataset(path, OneToken(), config(max_prompt_length=64))[0]["prompt_ids"]) == 31


def test_rows_may_hold_nul_where_no_model_reads_it(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "a", "bytes": "\0"}) + "\n")
    assert len(read_rows(str(tmp_path / "x.jsonl"), BadRowPolicy("raise"))) == 1
    assert check_file(tmp_path / "x.jsonl")[0] == 0
