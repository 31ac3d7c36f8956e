"""`hone data show FILE`: rows as the model will see them, special tokens included.

With a tokenizer a prompt is shown as its tokens read, and what supervised training learns is marked; without
one, messages are shown as they stand. Leaves out judging: `hone data check` does that.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hone.config.data import DataConfig
from hone.config.sft import SFTDataConfig
from hone.data.check import Findings, recognised
from hone.data.prompts import Message, PromptError, Tools, as_messages, render_prompt
from hone.data.rows import BadRows, DataError, FileRows, read_file
from hone.data.sft import MultiTurnSFTDataset, SFTDataset
from hone.text import shown
from hone.tokenizer import Tokenizer
from hone.types import JsonValue, Row

DEFAULT_ROWS = "0-2"
KEYS = "the file name"
_SHORT = 300
"""Characters of a column that is neither the prompt nor what is learnt."""


def row_numbers(text: str, count: int) -> list[int]:
    """`0,3-5` as numbers; DataError names what is not a row of the file."""
    numbers: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise DataError(f"--rows {text}: write numbers and ranges, as in 0,3-5")
        first, last = int(match[1]), int(match[2] or match[1])
        numbers += range(first, last + 1)
    absent = [number for number in numbers if number >= count]
    if absent:
        raise DataError(f"--rows {text}: the file has rows 0 to {count - 1}, so none {absent[0]}")
    return numbers


def show_file(
    path: str | os.PathLike[str],
    *,
    rows: str | None = None,
    tokenizer: Tokenizer | None = None,
    config: DataConfig | None = None,
    tools: Tools | None = None,
) -> str:
    """The chosen rows of a file, a block each; `tools` are schemas that the chat template shows."""
    file = read_file(path, BadRows("raise", skip_key=None), KEYS)
    assert file is not None  # an unreadable or empty file has been refused
    findings = Findings()
    settings = recognised(set(file.rows[0]), findings, config or DataConfig())
    chosen = rows if rows is not None else f"0-{min(2, len(file.rows) - 1)}"
    view = _View(file, findings, settings, tokenizer, tools)
    return "\n\n".join("\n".join(view.block(i)) for i in row_numbers(chosen, len(file.rows)))


class _View:
    def __init__(
        self,
        file: FileRows,
        findings: Findings,
        settings: DataConfig,
        tokenizer: Tokenizer | None,
        tools: Tools | None,
    ) -> None:
        self.file, self.findings, self.settings = file, findings, settings
        self.tokenizer, self.tools = tokenizer, tools

    def block(self, index: int) -> Iterator[str]:
        row = self.file.rows[index]
        try:
            body = list(self._supervised(row) if self.findings.supervised else self._prompt(row))
        except PromptError as error:
            body = [f"cannot be shown: {error}"]
        yield f"== {self.file.where(index)}"
        yield from body

    def _prompt(self, row: Row) -> Iterator[str]:
        key = self.settings.prompt_key
        if row.get(key) is None:
            raise PromptError(
                f"column {key!r} (--prompt-key) is missing; the row has {', '.join(map(str, row))}"
            )
        if self.tokenizer is None:
            yield from _messages(as_messages(row[key]))
        else:
            ids = render_prompt(
                row[key],
                self.tokenizer,
                self.settings.prompt_format,
                tools=self.tools,
                template_kwargs=self.settings.apply_chat_template_kwargs,
            )
            limit = self.settings.max_prompt_length
            more = f", more than the {limit:,} that fit" if len(ids) > limit else ""
            yield f"prompt, {len(ids):,} tokens{more}:"
            yield _indented(self.tokenizer.decode(ids, skip_special_tokens=False))
        reward = row.get("reward_model") or {}
        if isinstance(reward, Mapping):
            yield f"ground truth: {shown_value(reward.get('ground_truth'))}"
        yield from self._others(row, {key, "reward_model"})

    def _supervised(self, row: Row) -> Iterator[str]:
        """What stands before an answer, and each answer, which is what is learnt."""
        key = self.settings.prompt_key
        is_talk = key == SFTDataConfig().multiturn.messages_key
        response = self.findings.response_key
        if self.tokenizer is None or (not is_talk and response is None):
            yield from _messages(as_messages(row[key]))
            yield from self._others(row, {key})
            return
        config = replace(SFTDataConfig(), prompt_key=key, max_length=1 << 20)
        if response is not None:
            config = replace(config, response_key=response)
        kind = MultiTurnSFTDataset if is_talk else SFTDataset
        encoded = kind(None, self.tokenizer, config, rows=[row])[0]
        ids, mask = encoded["input_ids"], encoded["loss_mask"]
        yield f"{len(ids):,} tokens, of which {sum(mask):,} are learnt:"
        start = 0
        while start < len(ids):
            end = next((i for i in range(start, len(ids)) if mask[i] != mask[start]), len(ids))
            text = self.tokenizer.decode(ids[start:end], skip_special_tokens=False)
            yield _indented(text, "learnt | " if mask[start] else "       | ")
            start = end
        yield from self._others(row, {key, response})

    def _others(self, row: Row, done: set[str | None]) -> Iterator[str]:
        for name, value in row.items():
            if name not in done and value is not None:
                yield f"{name}: {shown_value(value)}"


def _messages(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        content = message["content"]
        text = content if isinstance(content, str) else shown_value(content)
        yield f"{message['role']}:"
        yield _indented(text)


def _indented(text: str, margin: str = "  | ") -> str:
    return "\n".join(f"{margin}{line}" for line in text.split("\n"))


def shown_value(value: JsonValue) -> str:
    """A value in one line: text as it is, anything else as JSON, shortened."""
    if isinstance(value, str):
        text = value.replace("\n", "\\n")
    else:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            text = shown(value)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}… ({len(text):,} characters)"
