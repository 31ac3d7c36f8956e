"""Responses with a label, true for a desirable response, for KTO.

A row is encoded as in RL: the policy's prompt, the response and the end token.
"""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.preference import PreferenceDataConfig
from hone.data.encoded import EncodedDataset, EncodedRow, UntrainableRow, check_row_text
from hone.data.messages import Message, PromptError, as_messages, check_message_roles
from hone.data.pairs import response_text, split_dialogue, truncate_prompt
from hone.text import short_repr
from hone.types import Row

_MESSAGES_COLUMN = "messages"


@dataclass(frozen=True)
class LabelledResponse:
    """A prompt with a response that is desirable or not."""

    prompt: str | list[Message]
    response: str
    is_desirable: bool


class LabelledDataset(EncodedDataset):
    """Rows with `prompt`, `completion` and `label`, or with a whole dialogue and `label`.

    `dataset[i]` is {"input_ids", "prompt_tokens", "label"}; the last two are lists of one number.
    """

    config: PreferenceDataConfig

    def response(self, row: Row) -> LabelledResponse:
        """Returns the labelled response of a row; raises PromptError on a bad row."""
        return read_labelled(row, self.config)

    def check(self, row: Row) -> None:
        check_row_text(row)
        check_labelled(self.response(row))

    def encode_row(self, row: Row) -> EncodedRow:
        response = self.response(row)
        prompt, ids = self.render(response.prompt), self.tokenise(response.response)
        if self.tokenizer.eos_token_id is not None:
            ids.append(int(self.tokenizer.eos_token_id))
        if not ids:
            raise UntrainableRow("empty response", "the response has no tokens")
        self.check_length(len(prompt) + len(ids))
        prompt = truncate_prompt(prompt, len(ids), self.max_length)
        return {
            "input_ids": prompt + ids,
            "prompt_tokens": [len(prompt)],
            "label": [int(response.is_desirable)],
        }


def read_labelled(row: Row, config: PreferenceDataConfig) -> LabelledResponse:
    """Returns the labelled response of a row; raises PromptError on a bad row."""
    completion, label = row.get(config.completion_key), row.get(config.label_key)
    if completion is None:
        completion = row.get(_MESSAGES_COLUMN)
    for key, value in ((config.completion_key, completion), (config.label_key, label)):
        if value is None:
            columns = ", ".join(map(str, row))
            raise PromptError(f"column {key!r} is missing or empty; the row has {columns}")
    if not isinstance(label, int) or label not in (0, 1):
        raise PromptError(
            f"column {config.label_key!r} must be true or false, got {short_repr(label)}"
        )
    prompt = row.get(config.prompt_key)
    if prompt is None:
        prompt, text = split_dialogue(completion)
    else:
        prompt = prompt if isinstance(prompt, str) else as_messages(prompt)
        text = response_text(completion)
    return LabelledResponse(prompt, text, bool(label))


def check_labelled(response: LabelledResponse) -> None:
    """Raises PromptError if nothing can be learnt from a response."""
    check_message_roles(as_messages(response.prompt))
    if not response.response.strip():
        raise UntrainableRow("empty response", "the response is empty")
