"""The loss mask of a conversation, with templates that delimit turns differently."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.config.sft import SFTDataConfig
from hone.data.conversation import encode_conversation
from hone.data.messages import PromptError
from hone.data.sft import SFTDataset

LOOP = "{% for m in messages %}"
OPEN = "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
TURN = "{{ '[' + m.role + ']' + m.content + '<|im_end|>\n' }}"

TOOL_BLOCK = (
    LOOP
    + "{% if m.role == 'tool' %}"
    + "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '[user]' }}{% endif %}"
    + "{{ '(' + m.content + ')' }}"
    + "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}"
    "{% endif %}" + "{% else %}" + TURN + "{% endif %}" + OPEN
)
"""A template with one block for all tool results of a turn."""
THINKING = (
    LOOP
    + "{{ '[' + m.role + ']' }}"
    + "{% if m.role == 'assistant' and loop.last %}{{ '{think}' }}{% endif %}"
    + "{{ m.content + '<|im_end|>\n' }}"
    + OPEN
)
"""A template with a thinking block in the last answer only."""
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '[system]Be kind.<|im_end|>\n' }}"
    "{% elif messages | length == 1 %}{{ raise_exception('a system prompt alone') }}{% endif %}"
    + LOOP
    + TURN
    + OPEN
)
MOVING_SYSTEM = (
    LOOP
    + "{% if loop.last and m.role == 'user' %}{{ 'Be kind. ' }}{% endif %}"
    + TURN
    + "{% endfor %}"
)
"""A template that adds text to a user turn if it is the last message."""
OTHER_END = LOOP + "{{ '[' + m.role + ']' + m.content + '<pad>\n' }}" + OPEN
WORD_END = LOOP + "{{ '[' + m.role + ']' + m.content + ' END\n' }}" + OPEN
NEWLINE_END = LOOP + "{{ '[' + m.role + ']' + m.content + '\n' }}" + OPEN
EOS_AT_THE_VERY_END = (
    LOOP
    + "{{ '[' + m.role + ']' + m.content + '<pad>\n' }}{% endfor %}"
    + "{{ '[assistant]' if add_generation_prompt else '<|im_end|>' }}"
)


def conversation(*turns: str) -> list[dict[str, Any]]:
    """Returns messages: `u:hello` is a user turn; `a:`, `s:` and `t:` are the other roles."""
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def text_with_targets(
    tokenizer: Any, messages: list[dict[str, Any]], template: str | None = None, **options: Any
) -> str:
    """Returns the conversation as text, with the targets between « and »."""
    kwargs = {} if template is None else {"chat_template": template}
    ids, mask = encode_conversation(messages, tokenizer, template_kwargs=kwargs, **options)
    assert len(ids) == len(mask)
    text = ""
    for token, is_target, was_target in zip(ids, mask, [0, *mask], strict=False):
        text += {(0, 1): "«", (1, 0): "»"}.get((was_target, is_target), "") + tokenizer.decode(
            [token]
        )
    return text + ("»" if mask[-1] else "")


def target_text(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    ids, mask = encode_conversation(messages, tokenizer, **options)
    return str(
        tokenizer.decode([token for token, is_target in zip(ids, mask, strict=True) if is_target])
    )


text = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=6)


@given(st.lists(st.tuples(text, text), min_size=1, max_size=4), st.none() | text)
def test_every_assistant_turn_and_nothing_else_is_learnt(
    tokenizer: Any, turns: list[tuple[str, str]], system: str | None
) -> None:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    ids, _ = encode_conversation(messages, tokenizer)
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert ids == whole
    assert target_text(tokenizer, messages) == "".join(f"{a}<|im_end|>" for _, a in turns)


def test_a_tool_turn_is_not_learnt(tokenizer: Any) -> None:
    messages = conversation("u:q", "a:call", "t:result", "a:done")
    assert target_text(tokenizer, messages) == "call<|im_end|>done<|im_end|>"


def test_a_template_that_drops_earlier_thinking_is_refused_or_learnt_as_written(
    forgetful_tokenizer: Any,
) -> None:
    messages = conversation("u:a", "a:THINK b", "u:c", "a:THINK d")
    with pytest.raises(PromptError, match="ignore_input_ids_mismatch"):
        encode_conversation(messages, forgetful_tokenizer)
    ids, _ = encode_conversation(messages, forgetful_tokenizer, ignore_mismatch=True)
    assert target_text(forgetful_tokenizer, messages, ignore_mismatch=True) == (
        "THINK b<|im_end|>THINK d<|im_end|>"
    )
    assert forgetful_tokenizer.decode(ids).count("<|im_start|>user\nc<|im_end|>\n") == 1


def test_turns_joined_as_written_keep_their_heads(tokenizer: Any) -> None:
    messages = conversation("u:q", "a:x", "u:rrrr", "a:y", "u:bye")
    assert text_with_targets(tokenizer, messages, THINKING, ignore_mismatch=True) == (
        "[user]q<|im_end|>\n[assistant]«{think}x<|im_end|>»\n"
        "[user]rrrr<|im_end|>\n[assistant]«{think}y<|im_end|>»\n[user]bye<|im_end|>\n"
    )


def test_tool_results_in_a_row_are_one_block(tokenizer: Any) -> None:
    messages = conversation("u:q", "a:call", "t:1", "t:2", "a:done")
    assert text_with_targets(tokenizer, messages, TOOL_BLOCK) == (
        "[user]q<|im_end|>\n[assistant]«call<|im_end|>»\n[user](1)(2)<|im_end|>\n"
        "[assistant]«done<|im_end|>»\n"
    )


def test_an_answer_to_nothing_learns_no_header_and_no_default_system_prompt(
    tokenizer: Any,
) -> None:
    assert text_with_targets(tokenizer, conversation("a:hi", "u:q", "a:x"), DEFAULT_SYSTEM) == (
        "[system]Be kind.<|im_end|>\n[assistant]«hi<|im_end|>»\n"
        "[user]q<|im_end|>\n[assistant]«x<|im_end|>»\n"
    )
    assert text_with_targets(tokenizer, conversation("a:0"), DEFAULT_SYSTEM) == (
        "[system]Be kind.<|im_end|>\n[assistant]«0<|im_end|>»\n"
    )


def test_a_system_prompt_alone_need_not_be_renderable(tokenizer: Any) -> None:
    assert text_with_targets(tokenizer, conversation("s:S", "a:hi"), DEFAULT_SYSTEM) == (
        "[system]S<|im_end|>\n[assistant]«hi<|im_end|>»\n"
    )


def test_an_end_token_inside_the_text_does_not_end_the_turn(tokenizer: Any) -> None:
    messages = conversation("u:q", "a:x<|im_end|>y")
    assert target_text(tokenizer, messages) == "x<|im_end|>y<|im_end|>"
    assert text_with_targets(tokenizer, messages, OTHER_END) == (
        "[user]q<pad>\n[assistant]«x<|im_end|>y<pad><|im_end|>»\n"
    )


def test_what_follows_the_end_of_a_turn_is_not_learnt(tokenizer: Any) -> None:
    turns = conversation("u:q", "a:x", "u:r", "a:y\n")
    assert text_with_targets(tokenizer, turns, WORD_END) == (
        "[user]q END\n[assistant]«x END»\n[user]r END\n[assistant]«y\n END<|im_end|>»\n"
    )
    assert text_with_targets(tokenizer, turns, OTHER_END) == (
        "[user]q<pad>\n[assistant]«x<pad>»\n[user]r<pad>\n[assistant]«y\n<pad><|im_end|>»\n"
    )


def test_words_that_follow_the_end_token_are_not_learnt(tokenizer: Any) -> None:
    template_with_rule = LOOP + "{{ '[' + m.role + ']' + m.content + '<|im_end|>--\n' }}" + OPEN
    assert text_with_targets(tokenizer, conversation("u:q", "a:x"), template_with_rule) == (
        "[user]q<|im_end|>--\n[assistant]«x<|im_end|>»--\n"
    )


def test_a_template_that_closes_turns_with_nothing_gets_the_end_token_at_each(
    tokenizer: Any,
) -> None:
    messages = conversation("u:q", "a:x", "t:1", "a:", "u:bye")
    assert text_with_targets(tokenizer, messages, NEWLINE_END) == (
        "[user]q\n[assistant]«x<|im_end|>»\n[tool]1\n[assistant]«<|im_end|>»\n[user]bye\n"
    )
    run_on = NEWLINE_END.replace("\n", "")
    assert text_with_targets(tokenizer, messages, run_on) == (
        "[user]q[assistant]«x<|im_end|>»[tool]1[assistant]«<|im_end|>»[user]bye"
    )


def test_one_question_and_answer_as_messages_are_learnt_as_in_two_columns(tokenizer: Any) -> None:
    kwargs = {"chat_template": NEWLINE_END}
    ids, mask = encode_conversation(conversation("u:q", "a:x"), tokenizer, template_kwargs=kwargs)
    config = dataclasses.replace(SFTDataConfig(), max_length=64, chat_template=NEWLINE_END)
    rows = [{config.prompt_key: "q", config.response_key: "x"}]
    single_turn = SFTDataset(None, tokenizer, config, rows=rows)[0]
    assert (ids[:-1], mask[:-1]) == (single_turn["input_ids"], single_turn["loss_mask"])
    assert (tokenizer.decode(ids[-1:]), mask[-1]) == ("\n", 0)


def test_an_end_token_the_template_lacks_is_put_in_also_where_turns_are_joined_as_written(
    tokenizer: Any,
) -> None:
    endless = THINKING.replace("<|im_end|>", "")
    messages = conversation("u:q", "a:x", "u:r", "a:y")
    assert text_with_targets(tokenizer, messages, endless, ignore_mismatch=True) == (
        "[user]q\n[assistant]«{think}x<|im_end|>»\n[user]r\n[assistant]«{think}y<|im_end|>»\n"
    )


def test_white_space_is_learnt_where_nothing_else_can_end_the_turn(tokenizer: Any) -> None:
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    assert (
        text_with_targets(endless, conversation("u:q", "a:x"), NEWLINE_END)
        == "[user]q\n[assistant]«x\n»"
    )


def test_an_end_token_at_the_very_end_is_learnt_with_what_leads_to_it(tokenizer: Any) -> None:
    assert text_with_targets(tokenizer, conversation("u:q", "a:x"), EOS_AT_THE_VERY_END) == (
        "[user]q<pad>\n[assistant]«x<pad>\n<|im_end|>»"
    )


def test_a_question_that_reads_otherwise_once_answered_is_refused_and_never_learnt(
    tokenizer: Any,
) -> None:
    messages = conversation("u:q", "a:x")
    with pytest.raises(PromptError, match="adding turn 2 changes how"):
        text_with_targets(tokenizer, messages, MOVING_SYSTEM)
    assert text_with_targets(tokenizer, messages, MOVING_SYSTEM, ignore_mismatch=True) == (
        "[user]q<|im_end|>\n[assistant]«x<|im_end|>»\n"
    )


def test_what_generation_opens_and_the_row_leaves_out_changes_nothing(tokenizer: Any) -> None:
    thinking_prompt = LOOP + TURN + OPEN.replace("'[assistant]'", "'[assistant]{think}'")
    assert text_with_targets(tokenizer, conversation("u:q", "a:x"), thinking_prompt) == (
        "[user]q<|im_end|>\n[assistant]«x<|im_end|>»\n"
    )
    assert text_with_targets(tokenizer, conversation("u:q", "a:{think}x"), thinking_prompt) == (
        "[user]q<|im_end|>\n[assistant]{think}«x<|im_end|>»\n"
    )


def test_turns_after_the_last_answer_are_shown(tokenizer: Any) -> None:
    messages = conversation("u:q", "a:x", "u:bye", "u:now")
    ids, mask = encode_conversation(messages, tokenizer)
    assert ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert target_text(tokenizer, messages) == "x<|im_end|>"
    assert len(mask) == len(ids)


def test_contents_in_parts_are_learnt_alike(tokenizer: Any) -> None:
    parts = LOOP + "{{ '[' + m.role + ']' }}{% for part in m.content %}{{ part.text }}{% endfor %}"
    parts += "{{ '<|im_end|>\n' }}" + OPEN
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in conversation("u:q", "a:x")
    ]
    assert (
        text_with_targets(tokenizer, messages, parts)
        == "[user]q<|im_end|>\n[assistant]«x<|im_end|>»\n"
    )


def test_a_template_that_leaves_answers_out_is_refused(tokenizer: Any) -> None:
    template_without_text = LOOP + "{{ '[' + m.role + ']' }}" + OPEN
    with pytest.raises(PromptError, match="omits the assistant's text"):
        text_with_targets(tokenizer, conversation("u:q", "a:x"), template_without_text)
