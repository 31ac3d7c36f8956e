"""The ends of steps: in merged tokens, split characters, split separators, tool output."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.response_steps import TokenTextSplitter, separator_ids, split_steps
from hone.models.tiny import character_tokenizer
from tests.data.tokenizers_of_bytes import byte_level_tokenizer, piece_tokenizer

TOKENIZERS = {
    "characters": cache(lambda: character_tokenizer(words=("\n\n", ".\n\n"))),
    "bytes": cache(byte_level_tokenizer),
    "pieces": cache(piece_tokenizer),
}


def pieces(texts: list[str]) -> list[tuple[int, str]]:
    return split_steps(texts, [True] * len(texts), "\n\n")


def test_merged_tokens_are_separators_too() -> None:
    tokenizer = TOKENIZERS["characters"]()
    ends = separator_ids(tokenizer, "\n\n").tolist()
    assert [tokenizer.decode([i]) for i in ends] == ["\n\n", ".\n\n"]
    assert separator_ids(character_tokenizer("ab"), "\n\n").numel() == 0


@pytest.mark.parametrize(
    ("texts", "steps"),
    [
        (["ab", ".\n\n", "cd"], [(1, "ab."), (2, "cd")]),
        (["ab", "\n", "\n", "cd"], [(2, "ab"), (3, "cd")]),  # split over two tokens
        (["ab\n", "\ncd", "e"], [(1, "ab"), (2, "cde")]),  # between two tokens
        (["\n\n", "ab"], [(0, ""), (1, "ab")]),  # at the start
        (["ab", "\n\n"], [(1, "ab")]),  # at the end: counted once
        (["ab", "\n\n", ""], [(1, "ab"), (2, "")]),  # a special token ends the last step
        (["ab", "\n\n", "\n\n", "cd"], [(1, "ab"), (2, ""), (3, "cd")]),  # an empty step
        (["ab", "\n\n\n\n", "cd"], [(1, "ab"), (2, "cd")]),  # two separators in one token
        (["ab", "\n", "\n", "\n", "cd"], [(2, "ab"), (4, "\ncd")]),  # three line breaks
        (["\n\n", "\n\n"], [(0, ""), (1, "")]),  # separators alone
        (["ab\n\ncd"], [(0, "ab\n\ncd")]),  # one token that goes on after the separator
        (["ab"], [(0, "ab")]),
        ([], []),
    ],
)
def test_steps_of_text(texts: list[str], steps: list[tuple[int, str]]) -> None:
    assert pieces(texts) == steps


def test_tool_output_is_read_but_ends_no_step() -> None:
    texts = ["a", "\n", "\n", "t\n\nt", "\n", "\nb", "\n\n", "c", "t\n\n"]
    policy = [True, True, False, False, False, True, True, True, False]
    steps = split_steps(texts, policy, "\n\n")
    # Neither the tool's separators nor those that it makes with the policy's line breaks count.
    assert steps == [(6, "a\n\nt\n\nt\n\nb"), (7, "c")]
    assert split_steps(["t\n\n", "t"], [False, False], "\n\n") == []


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@given(text=st.text(alphabet="ab. \n+=é∑😀漢so1", max_size=40))
@settings(max_examples=60, deadline=None)
def test_texts_of_tokens_make_up_the_decoded_response(name: str, text: str) -> None:
    tokenizer: Any = TOKENIZERS[name]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = [*ids[: len(ids) // 2], tokenizer.eos_token_id, *ids[len(ids) // 2 :]]
    texts = TokenTextSplitter(tokenizer)(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=True)
    if name != "characters":
        # Every step boundary of the text is found at a token: the steps are those of the text.
        steps = [step for _, step in pieces(texts)]
        assert "".join(steps) == "".join(texts).replace("\n\n", "")


@pytest.mark.parametrize("name", ["bytes", "pieces"])
def test_a_character_over_four_tokens_belongs_to_the_last(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode("😀", add_special_tokens=False)[-4:]
    assert TokenTextSplitter(tokenizer)(ids)[-4:] == ["", "", "", "😀"]


@pytest.mark.parametrize("name", ["bytes", "pieces"])
@given(numbers=st.lists(st.integers(0, 400), max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_tokens_have_a_text_each(name: str, numbers: list[int]) -> None:
    """Random bytes that are not valid characters."""
    tokenizer: Any = TOKENIZERS[name]()
    ids = [n % len(tokenizer) for n in numbers]
    texts = TokenTextSplitter(tokenizer)(ids)
    assert len(texts) == len(ids)
    assert pieces(texts)[-1][0] == len(ids) - 1 if ids else pieces(texts) == []


def test_a_shared_cache_does_not_change_the_texts() -> None:
    tokenizer = TOKENIZERS["pieces"]()
    cached = TokenTextSplitter(tokenizer)
    for text in ("so a", " so", "a so 😀 so"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert cached(ids) == TokenTextSplitter(tokenizer)(ids)


@given(st.lists(st.tuples(st.text("a\n", max_size=5), st.booleans()), max_size=12))
def test_steps_are_those_of_splitting_the_whole_text_after_each_token(
    tokens: list[tuple[str, bool]],
) -> None:
    texts, policy = [text for text, _ in tokens], [is_policy for _, is_policy in tokens]
    expected, text, policy_text = [], "", ""
    last = max((i for i, is_policy in enumerate(policy) if is_policy), default=-1)
    for i in range(last + 1):
        text += texts[i]
        policy_text = policy_text + texts[i] if policy[i] else ""
        before, *after = policy_text.split("\n\n")
        rest = after[-1] if after else ""
        if i == last and rest:
            expected.append((i, text))
        elif i == last or after:
            expected.append((i, text[: len(text) - len(policy_text)] + before))
            text = policy_text = rest
    assert split_steps(texts, policy, "\n\n") == expected
