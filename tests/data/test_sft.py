from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hone.config.data import CustomClassConfig
from hone.config.sft import MultiTurnDataConfig, SFTDataConfig
from hone.data.create import create_sft_dataset
from hone.data.loader import PromptLoader
from hone.data.prompt_ids import render_prompt
from hone.data.rows import DataError, write_parquet
from hone.data.sft import MultiTurnSFTDataset, SFTDataset


def sft_config(**changes: Any) -> SFTDataConfig:
    return replace(SFTDataConfig(max_length=200), **changes)


def target_text(tokenizer: Any, ids: list[int], mask: list[int]) -> str:
    assert len(ids) == len(mask)
    return str(
        tokenizer.decode([token for token, is_target in zip(ids, mask, strict=True) if is_target])
    )


def encoded(
    question: str, answer: str, tokenizer: Any, **settings: Any
) -> tuple[list[int], list[int]]:
    rows = [{"question": question, "answer": answer}]
    row = SFTDataset(None, tokenizer, sft_config(**settings), rows=rows)[0]
    return row["input_ids"], row["loss_mask"]


def test_only_the_response_and_its_end_are_learnt(tokenizer: Any) -> None:
    ids, mask = encoded("1+1?", "2", tokenizer)
    assert target_text(tokenizer, ids, mask) == "2<|im_end|>"
    prompt = render_prompt("1+1?", tokenizer)
    assert ids[: len(prompt)] == prompt
    assert mask == [0] * len(prompt) + [1, 1]


def test_a_raw_prompt_is_continued_as_it_is(tokenizer: Any) -> None:
    ids, mask = encoded("1+1=", "2", tokenizer, prompt_format="raw")
    assert tokenizer.decode(ids) == "1+1=2<|im_end|>"
    assert mask == [0, 0, 0, 0, 1, 1]


def test_rows_from_a_file_or_from_memory_give_the_same(
    tokenizer: Any, write_jsonl: Callable[..., str]
) -> None:
    rows = [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}]
    from_file = SFTDataset(write_jsonl(rows), tokenizer, sft_config())
    in_memory = SFTDataset(None, tokenizer, sft_config(), rows=rows)
    assert [from_file[i] for i in range(2)] == [in_memory[i] for i in range(2)]
    assert set(from_file[0]) == {"input_ids", "loss_mask"}


def test_keys_may_look_into_objects(tokenizer: Any) -> None:
    rows = [{"extra_info": {"question": "1+1", "answer": "2"}}]
    settings = sft_config(
        prompt_key="extra_info",
        prompt_dict_keys=("question",),
        response_key="extra_info",
        response_dict_keys=("answer",),
    )
    item = SFTDataset(None, tokenizer, settings, rows=rows)[0]
    assert target_text(tokenizer, item["input_ids"], item["loss_mask"]) == "2<|im_end|>"


@pytest.mark.parametrize(("truncation", "text"), [("left", "67<|im_end|>"), ("right", "456")])
def test_ids_and_mask_are_cut_alike(tokenizer: Any, truncation: str, text: str) -> None:
    settings = sft_config(prompt_format="raw", max_length=6, truncation=truncation)
    item = SFTDataset(None, tokenizer, settings, rows=[{"question": "123", "answer": "4567"}])[0]
    assert len(item["input_ids"]) == len(item["loss_mask"]) == 6
    assert target_text(tokenizer, item["input_ids"], item["loss_mask"])[-len(text) :] == text


def test_a_row_that_is_too_long_is_named(tokenizer: Any, write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([{"question": "123", "answer": "4567"}])
    data = SFTDataset(path, tokenizer, sft_config(prompt_format="raw", max_length=6))
    with pytest.raises(DataError, match=r"rows.jsonl, row 0: the row has 8 tokens"):
        data[0]


def test_bad_rows_are_named_or_skipped(tokenizer: Any, write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([{"question": "a", "answer": "b"}, {"question": "a"}, {"answer": 3}])
    with pytest.raises(DataError, match=r"row 1: column 'answer' \(data.response_key\) is missing"):
        SFTDataset(path, tokenizer, sft_config())
    data = SFTDataset(path, tokenizer, sft_config(on_bad_row="skip"))
    assert (len(data), data.bad_rows.total) == (1, 2)


def test_conversations_come_with_tools_and_thinking_of_their_own(tool_tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tools = '[{"type": "function", "function": {"name": "add"}}]'
    rows: list[dict[str, Any]] = [
        {"messages": turns, "tools": tools, "enable_thinking": False},
        {"messages": turns, "enable_thinking": True},
        {"messages": turns, "tools": "", "enable_thinking": None},
    ]
    thinking = "{% if enable_thinking is defined %}{{ enable_thinking }}\n{% endif %}"
    settings = sft_config(chat_template=thinking + tool_tokenizer.chat_template)
    data = MultiTurnSFTDataset(None, tool_tokenizer, settings, rows=rows)
    shown = [tool_tokenizer.decode(data[i]["input_ids"]) for i in range(3)]
    assert shown[0].startswith("False\nadd\n<|im_start|>")
    assert shown[1].startswith("True\n<|im_start|>")
    assert shown[2].startswith("<|im_start|>")


TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_tools_from_parquet_lose_the_nulls_it_fills_in(tokenizer: Any, tmp_path: Path) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
        for name, properties in (("add", {"a": {"type": "int"}}), ("find", {"b": {"type": "s"}}))
    ]
    write_parquet([{"messages": TALK, "tools": [tool]} for tool in tools], tmp_path / "t.parquet")
    settings = sft_config(chat_template="{{ tools | tojson }}\n" + tokenizer.chat_template)
    data = MultiTurnSFTDataset(tmp_path / "t.parquet", tokenizer, settings)
    for row, tool in enumerate(tools):
        first_line = tokenizer.decode(data[row]["input_ids"]).split("\n")[0]
        assert json.loads(first_line) == [tool]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("[{bad", "row 1: column 'tools' is text that is not JSON"),
        ('{"name": "add"}', "row 1: column 'tools' must be a list of tool schemas"),
        (["add"], "row 1: column 'tools' must be a list of tool schemas"),
    ],
)
def test_bad_tools_are_named_or_skipped(tokenizer: Any, tools: Any, message: str) -> None:
    rows = [{"messages": TALK}, {"messages": TALK, "tools": tools}]
    with pytest.raises(DataError, match=message):
        MultiTurnSFTDataset(None, tokenizer, sft_config(), rows=rows)
    data = MultiTurnSFTDataset(None, tokenizer, sft_config(on_bad_row="skip"), rows=rows)
    assert (len(data), data.bad_rows.total) == (1, 1)


def test_a_conversation_without_an_assistant_turn_is_a_bad_row(tokenizer: Any) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}]}]
    with pytest.raises(DataError, match="no assistant turn"):
        MultiTurnSFTDataset(None, tokenizer, sft_config(), rows=rows)


def test_a_conversation_as_text_is_a_bad_row(tokenizer: Any) -> None:
    rows = [{"messages": '[{"role": "assistant", "content": "b"}]'}]
    with pytest.raises(DataError, match="column 'messages': it must be a list of messages"):
        MultiTurnSFTDataset(None, tokenizer, sft_config(), rows=rows)


@pytest.mark.parametrize("column", ["messages", "question"])
def test_a_role_that_no_template_knows_is_a_bad_row(tokenizer: Any, column: str) -> None:
    kind = MultiTurnSFTDataset if column == "messages" else SFTDataset
    good = {column: TALK, "answer": "b"}
    bad = {column: [*TALK, {"role": "bot", "content": "c"}, TALK[1]], "answer": "b"}
    with pytest.raises(DataError, match=r"row 1: .*message 2 has role 'bot'.*system, user, assist"):
        kind(None, tokenizer, sft_config(), rows=[good, bad])
    data = kind(None, tokenizer, sft_config(on_bad_row="skip"), rows=[bad, good])
    assert (data.positions, data.bad_rows.counts) == ([1], {"not in the schema": 1})


def test_bad_rows_are_counted_by_reason(tokenizer: Any) -> None:
    good = {"question": "a", "answer": "b"}
    conversation = [{"role": "user", "content": "a"}] * 2
    rows = [
        good,
        {"question": "a"},
        {**good, "answer": "b" * 9},
        {**good, "question": conversation},
    ]
    settings = sft_config(prompt_format="raw", max_length=8, on_bad_row="skip")
    data = SFTDataset(None, tokenizer, settings, rows=rows)
    data.encode_all()
    assert data.bad_rows.counts == {
        "not in the schema": 1,
        "too long": 1,
        "cannot be rendered": 1,
    }


def test_the_fingerprint_names_the_content_and_the_rows_that_are_used(
    tokenizer: Any, write_jsonl: Callable[..., str]
) -> None:
    rows = [{"question": str(i), "answer": "a"} for i in range(4)]

    def name(rows: list[dict[str, Any]], file: str, max_samples: int = -1) -> str | None:
        settings = sft_config(shuffle=False)
        return SFTDataset(write_jsonl(rows, file), tokenizer, settings, max_samples).fingerprint

    whole = name(rows, "one.jsonl")
    assert whole == name(rows, "copy.jsonl")
    assert len({whole, name([*rows[:3], rows[0]], "b.jsonl"), name(rows, "one.jsonl", 3)}) == 3
    in_memory = [SFTDataset(None, tokenizer, sft_config(), rows=rows[n:]) for n in (0, 0, 1)]
    assert in_memory[0].fingerprint == in_memory[1].fingerprint != in_memory[2].fingerprint


def test_a_row_whose_response_is_cut_away_is_named(tokenizer: Any) -> None:
    settings = sft_config(prompt_format="raw", max_length=3, truncation="right")
    data = SFTDataset(None, tokenizer, settings, rows=[{"question": "123", "answer": "4"}])
    with pytest.raises(DataError, match="row 0: no target token is left"):
        data[0]


def test_the_first_token_alone_is_nothing_to_learn(tokenizer: Any) -> None:
    settings = sft_config(prompt_format="raw", max_length=1, truncation="right")
    data = SFTDataset(None, tokenizer, settings, rows=[{"question": "", "answer": "4"}])
    with pytest.raises(DataError, match="row 0: no target token is left"):
        data[0]


REFUSING = "{% if 'x' in messages[0].content %}{{ raise_exception('no x') }}{% endif %}u:"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_format": "raw"}, "row 1: the row has 13 tokens"),
        ({"prompt_format": "raw", "truncation": "right"}, "row 1: no target token is left"),
        ({"chat_template": REFUSING}, "row 1: .*no x"),
    ],
)
def test_rows_that_cannot_be_learnt_from_are_found_before_their_turn(
    tokenizer: Any, changes: dict[str, Any], message: str
) -> None:
    rows = [{"question": question, "answer": "1"} for question in ("a", "x" * 11, "b")]
    with pytest.raises(DataError, match=message + ".*on_bad_row=skip"):
        SFTDataset(None, tokenizer, sft_config(max_length=8, **changes), rows=rows).encode_all()
    settings = sft_config(max_length=8, on_bad_row="skip", **changes)
    data = SFTDataset(None, tokenizer, settings, rows=rows)
    done: list[int] = []
    data.encode_all(done.append)
    assert (data.positions, data.bad_rows.total, sum(done)) == ([0, 2], 1, 3)
    assert tokenizer.decode(data[1]["input_ids"]).endswith("1<|im_end|>")


@pytest.mark.parametrize("prompt_format", ["chat", "raw"])
@pytest.mark.parametrize("column", ["question", "answer"])
def test_text_that_is_not_unicode_is_a_bad_row(
    tokenizer: Any, column: str, prompt_format: str
) -> None:
    good = {"question": "1", "answer": "2"}
    settings = sft_config(prompt_format=prompt_format, on_bad_row="skip")
    data = SFTDataset(None, tokenizer, settings, rows=[{**good, column: "\ud800"}, good])
    data.encode_all()
    assert (data.positions, data.bad_rows.total) == ([1], 1)


def test_no_row_that_can_be_learnt_from_is_an_error(tokenizer: Any) -> None:
    settings = sft_config(max_length=3, on_bad_row="skip")
    data = SFTDataset(None, tokenizer, settings, rows=[{"question": "a", "answer": "b"}])
    with pytest.raises(DataError, match="no good row is left: rows in memory, row 0: the row has"):
        data.encode_all()


def test_rows_encoded_before_are_kept_as_far_as_memory_goes(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": str(i), "answer": "12"} for i in range(5)]
    settings = sft_config(prompt_format="raw")
    fresh = SFTDataset(None, tokenizer, settings, rows=rows)
    expected = [fresh[i] for i in range(5)]
    monkeypatch.setattr("hone.data.encoded.MAX_CACHED_TOKENS", 3 * len(expected[0]["input_ids"]))
    monkeypatch.setattr("hone.data.encoded.CHUNK_ROWS", 2)
    data = SFTDataset(None, tokenizer, settings, rows=rows)
    data.encode_all()
    encoded_questions: list[str] = []
    encode = data.encode_untruncated

    def encode_and_record(row: dict[str, Any]) -> Any:
        encoded_questions.append(row["question"])
        return encode(row)

    monkeypatch.setattr(data, "encode_untruncated", encode_and_record)
    assert [data[i] for i in range(5)] == expected
    assert encoded_questions == ["3", "4"]


def test_the_kind_of_data_set_follows_from_the_config_or_the_file(
    tokenizer: Any, write_jsonl: Callable[..., str]
) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    conversation = write_jsonl([{"messages": turns, "question": "q", "answer": "a"}], "talk.jsonl")
    plain = write_jsonl([{"question": "q", "answer": "a"}], "plain.jsonl")

    def kind(path: str, enable: bool | None) -> type:
        config = sft_config(multiturn=MultiTurnDataConfig(enable=enable))
        return type(create_sft_dataset(path, config, tokenizer))

    assert kind(conversation, None) is MultiTurnSFTDataset
    assert kind(plain, None) is SFTDataset
    assert kind(conversation, False) is SFTDataset
    own = sft_config(custom_cls=CustomClassConfig("hone.data.sft", "SFTDataset"))
    assert type(create_sft_dataset(conversation, own, tokenizer)) is SFTDataset


def test_a_chat_template_of_ones_own_replaces_the_tokenizers(plain_tokenizer: Any) -> None:
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    rows = [{"question": "1", "answer": "2"}]
    data = SFTDataset(None, plain_tokenizer, sft_config(chat_template=template), rows=rows)
    assert plain_tokenizer.decode(data[0]["input_ids"]) == "[1]2<|im_end|>"


def test_rows_kept_are_the_first_or_a_seeded_draw(tokenizer: Any) -> None:
    rows = [{"question": str(i), "answer": "a"} for i in range(30)]

    def sampled_rows(**changes: Any) -> list[int]:
        settings = sft_config(**changes)
        return SFTDataset(None, tokenizer, settings, max_samples=8, rows=rows).positions

    assert sampled_rows(shuffle=False) == list(range(8))
    assert sampled_rows(seed=1) == sampled_rows(seed=1) != sampled_rows(seed=2)


def test_the_loader_serves_supervised_rows_too(
    tokenizer: Any, write_jsonl: Callable[..., str]
) -> None:
    path = write_jsonl([{"question": str(i), "answer": "a"} for i in range(5)])
    data = SFTDataset(path, tokenizer, sft_config())
    loader = PromptLoader(data, 2, shuffle=True, seed=0, drop_last=False)
    batches = list(loader.first_epoch())
    assert [len(batch["input_ids"]) for batch in batches] == [2, 2, 1]
    assert len({uid for batch in batches for uid in batch["uid"]}) == 5


@pytest.mark.parametrize("tools", [{"type": "function"}, 5, True])
def test_tools_that_are_no_list_are_a_bad_row(tokenizer: Any, tools: object) -> None:
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    rows = [{"messages": messages}, {"messages": messages, "tools": tools}]
    data = MultiTurnSFTDataset(None, tokenizer, sft_config(on_bad_row="skip"), rows=rows)
    assert (len(data), data.bad_rows.total) == (1, 1)
    assert "must be a list of tool schemas" in data.bad_rows.examples[0]
