"""Counting tokens in several threads gives the counts of single prompts, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hone.data import token_counts as counting
from hone.data.messages import PromptError, PromptTooLong
from hone.data.prompt_ids import render_prompt
from hone.data.prompts import render_text_or_ids
from hone.data.token_counts import token_counts


def counts(prompts: list[Any], tokenizer: Any, max_tokens: int | None = None) -> list[Any]:
    def call(prompt: Any) -> Callable[[], str | list[int]]:
        return lambda: render_text_or_ids(prompt, tokenizer)

    return list(token_counts(map(call, prompts), tokenizer, max_tokens))


@pytest.mark.parametrize("threads", [1, 4])
def test_counts_equal_those_of_rendering_one_by_one(
    tokenizer: Any, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "usable_cores", lambda: threads)
    prompts = ["abc" * (i % 7) + str(i) for i in range(3 * counting.COUNT_BATCH_SIZE + 5)]
    expected = [len(render_prompt(prompt, tokenizer)) for prompt in prompts]
    assert counts(prompts, tokenizer) == expected


def test_a_prompt_that_cannot_be_rendered_does_not_affect_others(
    tokenizer: Any,
) -> None:
    results = counts(["a", 5, "b" * 100_000, "\ud800", "c"], tokenizer, max_tokens=10)
    assert isinstance(results[1], PromptError)
    assert isinstance(results[2], PromptTooLong)
    assert isinstance(results[3], PromptError)
    assert results[0] == results[4] == len(render_prompt("a", tokenizer))


def test_a_tokenizer_that_differs_from_its_backend_encodes_each_text(tokenizer: Any) -> None:
    class Doubling:
        chat_template = None
        backend_tokenizer = tokenizer.backend_tokenizer

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return 2 * tokenizer.encode(text, add_special_tokens=add_special_tokens)

    assert counts(["abc", "de"], Doubling()) == [6, 4]
