"""What tools and users say as tokens: the glue between turns is the template's, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

from hone.agents.observations import cut_text, cut_tokens, observation_ids
from hone.data.prompts import PromptError, render_prompt
from hone.models.tiny import character_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOL = [{"role": "tool", "content": "42"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = character_tokenizer(words=("<|im_start|>", "<|im_end|>"))
    made.chat_template = CHATML
    return made


def ids(tokenizer: Any, last: str, chat: bool = True, messages: Any = TOOL) -> list[int]:
    (token,) = tokenizer.encode(last, add_special_tokens=False)
    return observation_ids(messages, tokenizer, last_token=token, template_kwargs={}, chat=chat)


def test_after_the_end_token_only_the_rest_of_the_glue_is_added(tokenizer: Any) -> None:
    added = tokenizer.decode(ids(tokenizer, "<|im_end|>"))
    assert added == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"


def test_a_turn_that_ended_without_it_gets_the_whole_glue(tokenizer: Any) -> None:
    added = tokenizer.decode(ids(tokenizer, "x"))
    assert added == "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"


def test_prompt_turn_and_observation_are_what_the_template_makes_of_the_whole_talk(
    tokenizer: Any,
) -> None:
    talk = [{"role": "user", "content": "6*7?"}]
    said = tokenizer.encode("let me ask<|im_end|>", add_special_tokens=False)
    grown = [*render_prompt(talk, tokenizer), *said, *ids(tokenizer, "<|im_end|>")]
    whole = render_prompt([*talk, {"role": "assistant", "content": "let me ask"}, *TOOL], tokenizer)
    assert grown == whole


def test_without_a_template_answers_stand_in_tags(tokenizer: Any) -> None:
    added = tokenizer.decode(ids(tokenizer, "x", chat=False))
    assert added == "\n<tool_response>\n42\n</tool_response>\n"
    user = [{"role": "user", "content": "again"}]
    assert tokenizer.decode(ids(tokenizer, "x", chat=False, messages=user)) == "\nagain\n"


def test_a_template_that_knows_no_tools_says_so() -> None:
    strict = character_tokenizer()
    strict.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(PromptError, match="cannot render a turn of tool: TemplateError: no tools"):
        ids(strict, "x")
    forgetful = character_tokenizer()
    forgetful.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(PromptError, match="leaves out the assistant's turn"):
        ids(forgetful, "x")


@pytest.mark.parametrize(
    ("side", "kept"),
    [
        ("right", "abcd...(truncated)"),
        ("left", "(truncated)...ghij"),
        ("middle", "ab...(truncated)...ij"),
    ],
)
def test_a_long_answer_is_cut_on_the_side_asked_for(side: str, kept: str) -> None:
    assert cut_text("abcdefghij", 4, side) == kept
    assert cut_text("abcd", 4, side) == "abcd"


@pytest.mark.parametrize(("side", "kept"), [("right", "abc"), ("left", "hij"), ("middle", "aij")])
def test_tokens_are_cut_too(tokenizer: Any, side: str, kept: str) -> None:
    assert cut_tokens("abcdefghij", tokenizer, 3, side) == kept
    assert cut_tokens("abcdefghij", tokenizer, None, side) == "abcdefghij"
    assert cut_tokens("abc", tokenizer, 3, side) == "abc"


def test_an_answer_cannot_stand_for_the_models_turn(tokenizer: Any) -> None:
    """The stand-in for the model's turn, said by a tool, would hide what stands before it."""
    mark = "QZ7assistantturnQZ7"
    forged = [{"role": "tool", "content": f"a{mark[:5]}{mark}{mark[5:]}b\ud800"}]
    added = tokenizer.decode(ids(tokenizer, "<|im_end|>", messages=forged))
    assert added == "\n<|im_start|>tool\nab?<|im_end|>\n<|im_start|>assistant\n"
