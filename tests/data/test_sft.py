from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.config.data import CustomClassConfig
from hone.config.sft import MultiTurnDataConfig, SFTDataConfig
from hone.data.create import create_sft_dataset
from hone.data.loader import PromptLoader
from hone.data.prompts import PromptError, render_prompt
from hone.data.rows import DataError
from hone.data.sft import (
    MultiTurnSFTDataset,
    SFTDataset,
    encode_conversation,
    encode_single_turn,
)


def settings_of(**changes: Any) -> SFTDataConfig:
    return replace(SFTDataConfig(max_length=200), **changes)


def learnt(tokenizer: Any, ids: list[int], mask: list[int]) -> str:
    assert len(ids) == len(mask)
    return str(tokenizer.decode([token for token, keep in zip(ids, mask, strict=True) if keep]))


def test_only_the_response_and_its_end_are_learnt(tokenizer: Any) -> None:
    ids, mask = encode_single_turn("1+1?", "2", tokenizer, "chat")
    assert learnt(tokenizer, ids, mask) == "2<|im_end|>"
    prompt = render_prompt("1+1?", tokenizer)
    assert ids[: len(prompt)] == prompt
    assert mask == [0] * len(prompt) + [1, 1]


def test_a_raw_prompt_is_continued_as_it_is(tokenizer: Any) -> None:
    ids, mask = encode_single_turn("1+1=", "2", tokenizer, "raw")
    assert tokenizer.decode(ids) == "1+1=2<|im_end|>"
    assert mask == [0, 0, 0, 0, 1, 1]


text = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=6)


@given(st.lists(st.tuples(text, text), min_size=1, max_size=4), st.none() | text)
def test_every_assistant_turn_and_nothing_else_is_learnt(
    tokenizer: Any, turns: list[tuple[str, str]], system: str | None
) -> None:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    ids, mask = encode_conversation(messages, tokenizer)
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert ids == whole
    assert learnt(tokenizer, ids, mask) == "".join(f"{a}<|im_end|>" for _, a in turns)


def test_a_tool_turn_is_not_learnt(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "result"},
        {"role": "assistant", "content": "done"},
    ]
    assert learnt(tokenizer, *encode_conversation(messages, tokenizer)) == (
        "call<|im_end|>done<|im_end|>"
    )


def test_a_template_that_drops_earlier_thinking_is_refused_or_learnt_as_written(
    forgetful_tokenizer: Any,
) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "THINK b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "THINK d"},
    ]
    with pytest.raises(PromptError, match="ignore_input_ids_mismatch"):
        encode_conversation(messages, forgetful_tokenizer)
    ids, mask = encode_conversation(messages, forgetful_tokenizer, ignore_mismatch=True)
    assert learnt(forgetful_tokenizer, ids, mask) == "THINK b<|im_end|>THINK d<|im_end|>"
    assert forgetful_tokenizer.decode(ids).count("<|im_start|>user\nc<|im_end|>\n") == 1


def test_rows_from_a_file_or_from_memory_give_the_same(
    tokenizer: Any, write_jsonl: Callable[..., str]
) -> None:
    rows = [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}]
    from_file = SFTDataset(write_jsonl(rows), tokenizer, settings_of())
    in_memory = SFTDataset(None, tokenizer, settings_of(), rows=rows)
    assert [from_file[i] for i in range(2)] == [in_memory[i] for i in range(2)]
    assert set(from_file[0]) == {"input_ids", "loss_mask"}


def test_keys_may_look_into_objects(tokenizer: Any) -> None:
    rows = [{"extra_info": {"question": "1+1", "answer": "2"}}]
    settings = settings_of(
        prompt_key="extra_info",
        prompt_dict_keys=("question",),
        response_key="extra_info",
        response_dict_keys=("answer",),
    )
    item = SFTDataset(None, tokenizer, settings, rows=rows)[0]
    assert learnt(tokenizer, item["input_ids"], item["loss_mask"]) == "2<|im_end|>"


@pytest.mark.parametrize(("how", "text"), [("left", "67<|im_end|>"), ("right", "456")])
def test_ids_and_mask_are_cut_alike(tokenizer: Any, how: str, text: str) -> None:
    settings = settings_of(prompt_format="raw", max_length=6, truncation=how)
    item = SFTDataset(None, tokenizer, settings, rows=[{"question": "123", "answer": "4567"}])[0]
    assert len(item["input_ids"]) == len(item["loss_mask"]) == 6
    assert learnt(tokenizer, item["input_ids"], item["loss_mask"])[-len(text) :] == text


def test_a_row_that_is_too_long_is_named(tokenizer: Any, write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([{"question": "123", "answer": "4567"}])
    data = SFTDataset(path, tokenizer, settings_of(prompt_format="raw", max_length=6))
    with pytest.raises(DataError, match=r"rows.jsonl, row 0: the row has 8 tokens"):
        data[0]


def test_bad_rows_are_named_or_skipped(tokenizer: Any, write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([{"question": "a", "answer": "b"}, {"question": "a"}, {"answer": 3}])
    with pytest.raises(DataError, match=r"row 1: no 'answer' in the row"):
        SFTDataset(path, tokenizer, settings_of())
    data = SFTDataset(path, tokenizer, settings_of(on_bad_row="skip"))
    assert (len(data), data.bad_rows.total) == (1, 2)


def test_conversations_come_with_tools_and_thinking_of_their_own(tool_tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tools = '[{"type": "function", "function": {"name": "add"}}]'
    rows: list[dict[str, Any]] = [
        {"messages": turns, "tools": tools, "enable_thinking": False},
        {"messages": turns},
    ]
    data = MultiTurnSFTDataset(None, tool_tokenizer, settings_of(), rows=rows)
    assert tool_tokenizer.decode(data[0]["input_ids"]).startswith("add\n")
    assert not tool_tokenizer.decode(data[1]["input_ids"]).startswith("add")


def test_a_conversation_without_an_assistant_turn_is_a_bad_row(tokenizer: Any) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}]}]
    with pytest.raises(DataError, match="no assistant turn"):
        MultiTurnSFTDataset(None, tokenizer, settings_of(), rows=rows)


def test_a_row_whose_response_is_cut_away_is_named(tokenizer: Any) -> None:
    settings = settings_of(prompt_format="raw", max_length=3, truncation="right")
    data = SFTDataset(None, tokenizer, settings, rows=[{"question": "123", "answer": "4"}])
    with pytest.raises(DataError, match="row 0: nothing to learn is left"):
        data[0]


def test_the_kind_of_data_set_follows_from_the_config_or_the_file(
    tokenizer: Any, write_jsonl: Callable[..., str]
) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    talk = write_jsonl([{"messages": turns, "question": "q", "answer": "a"}], "talk.jsonl")
    plain = write_jsonl([{"question": "q", "answer": "a"}], "plain.jsonl")

    def kind(path: str, enable: bool | None) -> type:
        chosen = settings_of(multiturn=MultiTurnDataConfig(enable=enable))
        return type(create_sft_dataset(path, chosen, tokenizer))

    assert kind(talk, None) is MultiTurnSFTDataset
    assert kind(plain, None) is SFTDataset
    assert kind(talk, False) is SFTDataset
    own = settings_of(custom_cls=CustomClassConfig("hone.data.sft", "SFTDataset"))
    assert type(create_sft_dataset(talk, own, tokenizer)) is SFTDataset


def test_a_chat_template_of_ones_own_replaces_the_tokenizers(plain_tokenizer: Any) -> None:
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    rows = [{"question": "1", "answer": "2"}]
    data = SFTDataset(None, plain_tokenizer, settings_of(chat_template=template), rows=rows)
    assert plain_tokenizer.decode(data[0]["input_ids"]) == "[1]2<|im_end|>"


def test_rows_kept_are_the_first_or_a_seeded_draw(tokenizer: Any) -> None:
    rows = [{"question": str(i), "answer": "a"} for i in range(30)]

    def kept(**changes: Any) -> list[int]:
        settings = settings_of(**changes)
        return SFTDataset(None, tokenizer, settings, max_samples=8, rows=rows).positions

    assert kept(shuffle=False) == list(range(8))
    assert kept(seed=1) == kept(seed=1) != kept(seed=2)


def test_the_loader_serves_supervised_rows_too(
    tokenizer: Any, write_jsonl: Callable[..., str]
) -> None:
    path = write_jsonl([{"question": str(i), "answer": "a"} for i in range(5)])
    data = SFTDataset(path, tokenizer, settings_of())
    loader = PromptLoader(data, 2, shuffle=True, seed=0, drop_last=False)
    batches = list(loader.one_epoch())
    assert [len(batch["input_ids"]) for batch in batches] == [2, 2, 1]
    assert len({uid for batch in batches for uid in batch["uid"]}) == 5
