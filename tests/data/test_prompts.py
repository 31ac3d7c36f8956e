from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.data.messages import PromptError, as_messages
from hone.data.prompt_ids import render_prompt
from hone.data.prompts import truncate


def test_a_string_is_one_user_turn(tokenizer: Any) -> None:
    ids = render_prompt("hi", tokenizer)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids == render_prompt([{"role": "user", "content": "hi"}], tokenizer)


def test_raw_text_is_tokenised_as_it_is_without_special_tokens(tokenizer: Any) -> None:
    assert tokenizer.decode(render_prompt("User: hi\n", tokenizer, "raw")) == "User: hi\n"


def test_raw_takes_the_content_of_a_single_message(tokenizer: Any) -> None:
    ids = render_prompt([{"role": "user", "content": "2+2="}], tokenizer, "raw")
    assert ids == render_prompt("2+2=", tokenizer, "raw")


def test_raw_refuses_a_conversation(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(PromptError, match="prompt_format=chat"):
        render_prompt(turns, tokenizer, "raw")


def test_messages_without_a_chat_template_are_told_to_use_raw(plain_tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="prompt_format=raw"):
        render_prompt([{"role": "user", "content": "hi"}], plain_tokenizer)


def test_a_string_without_a_chat_template_is_taken_as_it_is(plain_tokenizer: Any) -> None:
    assert plain_tokenizer.decode(render_prompt("hi", plain_tokenizer)) == "hi"


def test_template_kwargs_reach_the_template(tokenizer: Any) -> None:
    ids = render_prompt("hi", tokenizer, template_kwargs={"add_generation_prompt": False})
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n"


def test_continue_final_message_leaves_the_assistant_turn_open(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so"}]
    ids = render_prompt(turns, tokenizer, template_kwargs={"continue_final_message": True})
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\nso")


def test_an_unknown_format_is_named(tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="prompt_format='chatty'"):
        render_prompt("hi", tokenizer, "chatty")


def test_typed_parts_without_a_role_are_one_user_turn() -> None:
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]
    assert as_messages(parts) == [{"role": "user", "content": parts}]


def test_nulls_that_parquet_fills_in_are_dropped() -> None:
    message = {"role": "user", "content": "a", "tool_calls": None}
    assert as_messages([message]) == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("prompt", [None, 3, [], ["text"], [{"content": "a"}], [{"role": "user"}]])
def test_a_prompt_of_another_shape_is_refused(prompt: Any) -> None:
    with pytest.raises(PromptError):
        as_messages(prompt)


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 40))
def test_truncation_keeps_the_named_part(ids: list[int], limit: int) -> None:
    if len(ids) <= limit:
        for truncation in ("left", "right", "middle", "error"):
            assert truncate(ids, limit, truncation) == ids
        return
    assert truncate(ids, limit, "left") == ids[-limit:]
    assert truncate(ids, limit, "right") == ids[:limit]
    middle = truncate(ids, limit, "middle")
    head = limit // 2
    assert len(middle) == limit
    assert middle[:head] == ids[:head]
    assert middle[head:] == ids[-(limit - head) :]
    with pytest.raises(PromptError, match=f"{len(ids)} tokens, data.max_prompt_length={limit}"):
        truncate(ids, limit, "error")


def test_an_unknown_truncation_is_named_even_for_a_short_prompt() -> None:
    with pytest.raises(PromptError, match="truncation='start'"):
        truncate([1], 5, "start")
