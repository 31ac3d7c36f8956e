"""The end of a response, and the requests that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from hone.rollout.contract import RolloutError, Sampling, StopReason
from hone.rollout.requests import Request, RequestRules

from .models import EOS, TOKENIZER


class ByteTokenizer:
    """One token a byte: a character may take several tokens."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")


def request_with(tokens: list[int], **options: Any) -> Request:
    sampling = Sampling(**{"max_tokens": 100, "temperature": 1.0, "seed": 0, **options})
    return Request([1], sampling, "r", token_ids=tokens)


class ByteFallbackTokenizer:
    """As SentencePiece decodes: bytes in a row are characters together, or none of them is."""

    def decode(self, ids: list[int], **_: Any) -> str:
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(ids)


@pytest.mark.parametrize("text", ["語" * n + "x" * m for n in range(1, 5) for m in range(3)])
def test_a_stop_string_after_characters_of_several_bytes_is_found(text: str) -> None:
    rules = RequestRules(frozenset(), ByteFallbackTokenizer())
    tokens = list((text + "\n").encode())
    assert rules.stop_reason(request_with(tokens, stop=("\n",))) is StopReason.STOP
    assert rules.stop_reason(request_with(tokens[:-1], stop=("\n",))) is None


def test_a_stop_string_of_many_bytes_is_found() -> None:
    rules = RequestRules(frozenset(), ByteTokenizer())
    stop = "答案是四十二吗"
    tokens = list(("so " + stop).encode())
    assert rules.stop_reason(request_with(tokens, stop=(stop,))) is StopReason.STOP
    assert rules.stop_reason(request_with(tokens[:-1], stop=(stop,))) is None


def test_the_end_token_counts_before_the_length() -> None:
    rules = RequestRules(frozenset({EOS}), TOKENIZER)
    assert rules.stop_reason(request_with([5, EOS], max_tokens=2)) is StopReason.STOP
    assert (
        rules.stop_reason(request_with([5, EOS], max_tokens=2, ignore_eos=True))
        is StopReason.LENGTH
    )


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(RolloutError, match="built without one"):
        RequestRules(frozenset()).check(request_with([], stop=("x",)))
