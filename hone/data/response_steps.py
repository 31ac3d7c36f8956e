"""Finds the reasoning steps of a response: by token ids, or by characters if the tokenizers differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.tokenizer import Tokenizer

UNFINISHED = "\ufffd"
"""How a tokenizer writes the bytes of a character that is not complete."""
MAX_CHARACTER_TOKENS = 4
"""A character has at most four bytes, so no more than four tokens."""


def separator_ids(tokenizer: Tokenizer, text: str) -> Tensor:
    """Returns every token whose text ends in `text`, including tokens with other characters before it."""
    ids = range(len(tokenizer))
    return torch.tensor([i for i in ids if tokenizer.decode([i]).endswith(text)], dtype=torch.int64)


class TokenTexts:
    """Splits a decoded response into the texts of its tokens; the texts of single tokens are cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {i for i, token in added.items() if token.special}
        self._alone: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Returns the text that each token adds; their concatenation is the decoded response.

        A character that is split over several tokens belongs to the last; special tokens have no text.
        """
        words = [i for i in ids if i not in self._special]
        texts = [self._decode([i]) for i in words]
        if "".join(texts) != self._decode(words):
            texts = self._in_context(words)
        each = iter(texts)
        return ["" if i in self._special else next(each) for i in ids]

    def _in_context(self, ids: Sequence[int]) -> list[str]:
        """Decodes a window of the last tokens with and without the new one, because the text of a token may
        depend on the one before it (leading spaces, parts of a character)."""
        texts: list[str] = []
        start = known = 0
        for end in range(1, len(ids) + 1):
            text = self._decode(ids[start:end])
            held = end - known
            if text.endswith(UNFINISHED) and held < MAX_CHARACTER_TOKENS and end < len(ids):
                texts.append("")
                continue
            texts.append(text[len(self._decode(ids[start:known])) :])
            start, known = known, end
        return texts

    def _decode(self, ids: Sequence[int]) -> str:
        if len(ids) == 1 and ids[0] in self._alone:
            return self._alone[ids[0]]
        text = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else ""
        if len(ids) == 1:
            self._alone[ids[0]] = text
        return text


def split_steps(
    texts: Sequence[str], by_policy: Sequence[bool], separator: str
) -> list[tuple[int, str]]:
    """Returns (index of the token that ends the step, text of the step without its separator) of each step.

    A step ends at the policy's token that completes a separator, and at its last token. Separators are
    only found in the policy's own text; the text of tools is part of the step in which it is read.
    """
    last = max((i for i, own in enumerate(by_policy) if own), default=-1)
    steps: list[tuple[int, str]] = []
    text = run = ""  # the step so far, and its end that the policy wrote without interruption
    for index in range(last + 1):
        text += texts[index]
        run = run + texts[index] if by_policy[index] else ""
        before, *after = run.split(separator)
        rest = after[-1] if after else ""
        if index == last and rest:  # its last token also has text after the separator
            steps.append((index, text))
        elif index == last or after:
            steps.append((index, text[: len(text) - len(run)] + before))
            text = run = rest
    return steps
