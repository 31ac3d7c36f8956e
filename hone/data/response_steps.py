"""Splits a response into reasoning steps, by token ids or by text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.tokenizer import Tokenizer

REPLACEMENT_CHARACTER = "\ufffd"
"""The character that a tokenizer decodes an incomplete character to."""
MAX_CHARACTER_TOKENS = 4  # a character has at most four bytes in UTF-8, so at most four tokens


def separator_ids(tokenizer: Tokenizer, text: str) -> Tensor:
    """Returns the ids of all tokens whose text ends with `text`."""
    ids = range(len(tokenizer))
    return torch.tensor([i for i in ids if tokenizer.decode([i]).endswith(text)], dtype=torch.int64)


def blank_ids(tokenizer: Tokenizer) -> Tensor:
    """Returns the ids of all tokens without visible text, such as line breaks and special tokens."""
    texts = (tokenizer.decode([i], skip_special_tokens=True) for i in range(len(tokenizer)))
    return torch.tensor([i for i, text in enumerate(texts) if not text.strip()], dtype=torch.int64)


def written_ends(ends: Sequence[int], is_written: Sequence[bool]) -> list[int]:
    """Returns the last indices of the steps in which the policy wrote text; the others are not steps."""
    starts = (0, *(end + 1 for end in ends))
    return [
        end for start, end in zip(starts, ends, strict=False) if any(is_written[start : end + 1])
    ]


class TokenTextSplitter:
    """Splits a decoded response into the texts of its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added_tokens = getattr(tokenizer, "added_tokens_decoder", {})
        self._special_ids = {i for i, token in added_tokens.items() if token.special}
        self._token_texts: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Returns the text that each token adds; the concatenated texts are the decoded response.

        A character of several tokens belongs to its last token; special tokens have no text.
        """
        text_ids = [i for i in ids if i not in self._special_ids]
        texts = [self._decode([i]) for i in text_ids]
        if "".join(texts) != self._decode(text_ids):
            texts = self._decode_in_context(text_ids)
        remaining_texts = iter(texts)
        return ["" if i in self._special_ids else next(remaining_texts) for i in ids]

    def _decode_in_context(self, ids: Sequence[int]) -> list[str]:
        """Decodes each token after the previously decoded ones, on which its leading space may depend.

        Tokens that hold parts of one character are decoded together.
        """
        texts: list[str] = []
        start = decoded_end = 0
        for end in range(1, len(ids) + 1):
            text = self._decode(ids[start:end])
            can_extend = end - decoded_end < MAX_CHARACTER_TOKENS and end < len(ids)
            if can_extend and text.endswith(REPLACEMENT_CHARACTER):
                texts.append("")
                continue
            texts.append(text[len(self._decode(ids[start:decoded_end])) :])
            start, decoded_end = decoded_end, end
        return texts

    def _decode(self, ids: Sequence[int]) -> str:
        if len(ids) == 1 and ids[0] in self._token_texts:
            return self._token_texts[ids[0]]
        text = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else ""
        if len(ids) == 1:
            self._token_texts[ids[0]] = text
        return text


def split_steps(
    texts: Sequence[str], is_policy_token: Sequence[bool], separator: str
) -> list[tuple[int, str]]:
    """Returns (index of the last token, text without the separator) of each step.

    A step ends at a policy token that completes a separator, and at the policy's last token.
    Separators in observations do not count; an observation is part of the step around it.
    """
    last_index = max((i for i, is_policy in enumerate(is_policy_token) if is_policy), default=-1)
    steps: list[tuple[int, str]] = []
    text = ""  # the text of the current step
    policy_text = ""  # the policy's text since the step's start or the last observation
    for index in range(last_index + 1):
        text += texts[index]
        policy_text = policy_text + texts[index] if is_policy_token[index] else ""
        # Only the end is searched, because an earlier separator has already ended a step.
        has_separator = separator in policy_text[-len(separator) - len(texts[index]) :]
        text_before, *texts_after = policy_text.split(separator) if has_separator else [policy_text]
        next_step = texts_after[-1] if texts_after else ""
        if index == last_index and next_step:
            # A token ends at most one step, so the last step includes the text after the separator.
            steps.append((index, text))
        elif index == last_index or texts_after:
            steps.append((index, text[: len(text) - len(policy_text)] + text_before))
            text = policy_text = next_step
    return steps
