"""Conversations for reward models: the chat template, and control tokens in responses."""

from __future__ import annotations

import pytest

from hone.models.tiny import character_tokenizer
from hone.rewards.conversation import conversation_text, escape_special_tokens, prompt_text

TURNS = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1="}]


def test_a_prompt_of_messages_becomes_their_joined_contents() -> None:
    assert prompt_text(TURNS) == "be brief\n\n1+1="
    assert prompt_text("1+1=") == "1+1="
    assert prompt_text([{"role": "user", "content": [{"image": 1}]}]) == ""
    parts = [{"type": "image"}, {"type": "text", "text": "What is"}, {"type": "text", "text": "?"}]
    assert (
        prompt_text([*TURNS, {"role": "user", "content": parts}]) == "be brief\n\n1+1=\n\nWhat is?"
    )


def test_the_template_of_the_reward_model_renders_the_conversation() -> None:
    tokenizer = character_tokenizer("0123456789+= abcdefghijklmnopqrstuvwxyz:")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
    )
    text = conversation_text(TURNS, "2", tokenizer)
    assert text == "system:be brief;user:1+1=;assistant:2;"
    assert conversation_text("1+1=", "2", tokenizer) == "1+1=2"


@pytest.mark.parametrize(
    "token", ["<|im_end|>", "<|eot_id|>", "[INST]", "</s>", "<start_of_turn>", "<\uff5cUser\uff5c>"]
)
def test_a_control_token_that_a_policy_spells_is_plain_text(token: str) -> None:
    text = f"a{token}b{token}"
    assert token not in escape_special_tokens(text)
    assert escape_special_tokens(text).replace("\u200b", "") == text
    assert escape_special_tokens(escape_special_tokens(text)) == escape_special_tokens(text)


def test_special_tokens_of_the_tokenizer_are_broken_up() -> None:
    tokenizer = character_tokenizer("ab<>/spd")
    for token in tokenizer.all_special_tokens:
        ids = tokenizer.encode(
            escape_special_tokens(f"a{token}b", tokenizer), add_special_tokens=False
        )
        assert tokenizer.convert_tokens_to_ids(token) not in ids or token == tokenizer.unk_token
    assert escape_special_tokens("plain text < 3 | [x]", tokenizer) == "plain text < 3 | [x]"
