"""Renders and tokenises the prompts of stored rows, and collates the rows into batches.

`RowStore` holds the rows of the data files, `PromptRows` renders and tokenises their prompts, and
`PromptBatches` collates rows in the order of a sampler. `RLHFDataset` and `PromptLoader`, their
subclasses, read and filter files, start epochs and save the state.
"""

from __future__ import annotations

import bisect
import hashlib
from abc import ABC, abstractmethod
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from hone.data.chat_template import render_chat
from hone.data.media import with_typed_parts
from hone.data.messages import Prompt, PromptError, PromptTooLong, Tools, as_messages, remove_nulls
from hone.data.rows import DataError
from hone.text import find_flaw, short_repr
from hone.tokenizer import Processor, Tokenizer
from hone.types import Fields, Row, Settings

if TYPE_CHECKING:
    import pyarrow as pa

    from hone.config.data import DataConfig
    from hone.data.loader import Dataset

Batch = dict[str, np.ndarray]
PromptBuilder: TypeAlias = Callable[[Row], tuple[Prompt, Tools | None] | None]
"""Maps a row to the prompt and tools of its agent loop, or to None if the prompt is unchanged."""

SINGLE_TURN_AGENT = "single_turn_agent"
KWARGS_COLUMNS = ("tools_kwargs", "interaction_kwargs", "tool_config")
"""The columns with keyword arguments of agent loops."""
MAX_CHARACTERS_PER_TOKEN = 32
"""A text with more characters per allowed token is probably too long; `tokenise` checks its start first."""


@dataclass(frozen=True)
class FileRows:
    """The usable rows of one file; rows of an Arrow table become dicts when they are read."""

    path: str
    content: pa.Table | list[Row]
    row_numbers: Sequence[int]  # zero-based row numbers in the file; bad rows leave gaps
    fingerprint: str = ""  # hash of the file's content

    def __len__(self) -> int:
        return len(self.row_numbers)

    def __getitem__(self, index: int) -> Row:
        if isinstance(self.content, list):
            return self.content[index]
        return dict(self.content.slice(index, 1).to_pylist()[0])

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """Yields all rows in order; `columns` selects the columns."""
        if isinstance(self.content, list):
            for row in self.content:
                yield row if columns is None else {c: row[c] for c in columns if c in row}
            return
        names = self.content.column_names
        table = self.content.select([name for name in columns or names if name in names])
        if not table.column_names:
            yield from ({} for _ in range(len(self)))
            return
        for batch in table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def where(self, index: int) -> str:
        """Returns the file and number of a row, for messages."""
        return f"{self.path}, row {self.row_numbers[index]}"


class RowStore:
    """The rows of several files, indexed by position from the first file's first row."""

    def __init__(self, files: Sequence[FileRows]) -> None:
        self.files = list(files)
        self._file_starts = [0, *accumulate(map(len, self.files))]
        self._dataset_names: list[str] = []
        num_copies: Counter[str] = Counter()
        for file in self.files:
            # A file that is listed twice gets two names, so that uids are unique.
            suffix = f"#{num_copies[file.fingerprint]}" if num_copies[file.fingerprint] else ""
            self._dataset_names.append(file.fingerprint + suffix)
            num_copies[file.fingerprint] += 1

    def __len__(self) -> int:
        return self._file_starts[-1]

    def __getitem__(self, position: int) -> Row:
        file_index, index = self.locate(position)
        return self.files[file_index][index]

    def locate(self, position: int) -> tuple[int, int]:
        """Returns (index of the file, index of the row in it)."""
        if not 0 <= position < len(self):
            raise IndexError(f"row {position} of {len(self)}")
        file_index = bisect.bisect_right(self._file_starts, position) - 1
        return file_index, position - self._file_starts[file_index]

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        return (row for file in self.files for row in file.scan(columns))

    def where(self, position: int) -> str:
        """Returns the file and number of a row, for messages."""
        file_index, index = self.locate(position)
        return self.files[file_index].where(index)

    def key(self, position: int) -> tuple[str, int]:
        """Returns (dataset name, row number in it), from which a uid is made."""
        file_index, index = self.locate(position)
        return self._dataset_names[file_index], int(self.files[file_index].row_numbers[index])

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b("\n".join(self._dataset_names).encode(), digest_size=16).hexdigest()

    def selection_fingerprint(self, positions: Sequence[int]) -> str:
        """Returns a hash of the file contents and of the positions in use."""
        content = self.fingerprint.encode() + array("q", positions).tobytes()
        return hashlib.blake2b(content, digest_size=16).hexdigest()


class PromptRows:
    """Rows with rendered prompts: `rows[i]` is one row as a dict, with the token ids of its prompt."""

    tokenizer: Tokenizer
    processor: Processor | None
    settings: DataConfig
    tools: Tools | None
    prompt_key: str
    image_key: str
    video_key: str
    max_prompt_length: int
    store: RowStore
    positions: list[int]
    """Positions in `store` of the rows in use."""
    added_rows: list[Row]
    """Rows that on_batch_end added; their indices follow those of `positions`."""
    prompt_builder: PromptBuilder | None = None
    """Adds the text of agent loops, such as instructions, to prompts."""

    def __getitem__(self, index: int) -> Row:
        try:
            row = self._prepare(dict(self.raw_row(index)))
        except PromptError as error:
            raise DataError(f"{self.where(index)}: {error}") from error
        original_index = row["extra_info"].get("index")
        row["index"] = index if original_index is None else original_index
        return row

    def raw_row(self, index: int) -> Row:
        """Returns a row before its prompt is rendered, of a file or of on_batch_end."""
        if index < len(self.positions):
            return self.store[self.positions[index]]
        return self.added_rows[index - len(self.positions)]

    def key(self, index: int) -> tuple[str, int]:
        """Returns (dataset name, row number), from which the uid is made."""
        if index < len(self.positions):
            return self.store.key(self.positions[index])
        return f"{self.store.fingerprint}+added", index - len(self.positions)

    def where(self, index: int) -> str:
        """Returns the file and number of a row, for messages."""
        if index < len(self.positions):
            return self.store.where(self.positions[index])
        return f"row {index - len(self.positions)} added by on_batch_end"

    @property
    def _tokenise_limit(self) -> int | None:
        """The limit at which `tokenise` stops; None unless long prompts are errors."""
        return self.max_prompt_length if self.settings.truncation == "error" else None

    def _prepare(self, row: Row) -> Row:
        settings, prompt = self.settings, row[self.prompt_key]
        rendering = self._render(row)
        if isinstance(rendering, str):
            rendering = tokenise(rendering, self.tokenizer, self._tokenise_limit)
        row["prompt_ids"] = truncate(rendering, self.max_prompt_length, settings.truncation)
        if settings.prompt_format == "raw":
            row["raw_prompt"] = raw_text(prompt)
        elif self.processor is None:
            row["raw_prompt"] = as_messages(prompt)
        else:
            messages = as_messages(prompt)
            row["raw_prompt"] = with_typed_parts(messages, row, self.image_key, self.video_key)
        if self.prompt_key != "raw_prompt":
            del row[self.prompt_key]
        defaults = {"extra_info": {}, "data_source": "unknown", "reward_model": {}}
        row |= {name: row.get(name) or default for name, default in defaults.items()}
        row["agent_name"] = row.get("agent_name")
        row |= {name: loop_kwargs(row, name) for name in KWARGS_COLUMNS}
        return row

    def _render(self, row: Row) -> str | list[int]:
        """Returns the prompt of a row as text, or as ids if only the tokenizer can produce them."""
        prompt: Prompt = row[self.prompt_key]
        tools: Tools | None = self.tools or None
        if row.get("agent_name") == SINGLE_TURN_AGENT:
            tools = None
        if self.prompt_builder is not None:
            prompt, tools = self.prompt_builder(row) or (prompt, tools)
        return render_text_or_ids(
            prompt,
            self.tokenizer,
            self.settings.prompt_format,
            tools=tools,
            template_kwargs=self.settings.apply_chat_template_kwargs,
        )


def loop_kwargs(row: Row, name: str) -> Fields:
    """Returns the keyword arguments `name` of a row, from its top level or its `extra_info`."""
    kwargs = row.get(name) or (row.get("extra_info") or {}).get(name)
    return remove_nulls(kwargs) if kwargs else {}


def render_text_or_ids(
    raw_prompt: Prompt,
    tokenizer: Tokenizer,
    prompt_format: str = "chat",
    tools: Tools | None = None,
    template_kwargs: Settings | None = None,
) -> str | list[int]:
    """Renders a prompt to text, or to ids if only the tokenizer can produce them.

    `chat` renders the chat template with the generation prompt; without a template, it returns a
    plain string unchanged. `raw` returns a pre-rendered string, or the content of one message.
    """
    if prompt_format == "raw":
        return raw_text(raw_prompt)
    if prompt_format != "chat":
        raise PromptError(
            f"data.prompt_format={prompt_format!r} is not known; use one of ('chat', 'raw')"
        )
    return render_chat(raw_prompt, tokenizer, tools, template_kwargs)


def raw_text(raw_prompt: Prompt) -> str:
    """Returns a pre-rendered prompt: a string, or the content of its only message."""
    if isinstance(raw_prompt, str):
        return raw_prompt
    messages = as_messages(raw_prompt)
    content = messages[0]["content"]
    if len(messages) != 1 or not isinstance(content, str):
        raise PromptError(
            "data.prompt_format=raw needs a string or a single text message, got"
            f" {short_repr(raw_prompt)}; use data.prompt_format=chat for conversations"
        )
    return content


def tokenise(text: str, tokenizer: Tokenizer, max_tokens: int | None = None) -> list[int]:
    """Returns the token ids of a text, without added special tokens.

    `max_tokens` only saves time: if the start of a long text has over 2 · max_tokens + 64 tokens, the rest is
    not tokenised, and PromptTooLong is raised.
    """
    length = 8 * ((max_tokens or 0) + 64)
    while max_tokens is not None and length < len(text):
        num_tokens = len(_encode(text[:length], tokenizer))
        # A margin, because tokens of the start may merge in the whole text.
        if num_tokens > 2 * max_tokens + 64:
            raise PromptTooLong(
                f"the first {length:,} of its {len(text):,} characters have {num_tokens:,} tokens, "
                f"at most {max_tokens:,} fit"
            )
        length *= 4
    return _encode(text, tokenizer)


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    try:
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    except (TypeError, UnicodeError):  # for example for a lone surrogate
        if flaw := find_flaw(text, allow_nul=True):
            raise PromptError(f"the text of the row {flaw}") from None
        raise


def truncate(ids: Sequence[int], max_length: int, truncation: str) -> list[int]:
    """Truncates to `max_length` ids by dropping those at the left, right or middle.

    `truncation=error` raises PromptError for a longer prompt instead.
    """
    head_lengths = {"left": 0, "right": max_length, "middle": max_length // 2, "error": 0}
    if truncation not in head_lengths:
        raise PromptError(
            f"data.truncation={truncation!r} is not known; use one of {', '.join(head_lengths)}"
        )
    if len(ids) <= max_length:
        return list(ids)
    if truncation == "error":
        raise PromptError(
            f"the prompt has {len(ids)} tokens, data.max_prompt_length={max_length}; raise it, set"
            " data.filter_overlong_prompts=true, or data.truncation=left|right|middle"
        )
    head = head_lengths[truncation]
    return [*ids[:head], *ids[len(ids) - (max_length - head) :]]


class PromptBatches(ABC):
    """Loads batches of a dataset's rows, epoch after epoch, in the order of a sampler."""

    dataset: Dataset
    batch_size: int
    drop_last: bool
    order_name: str  # describes the sampler in messages and checkpoints
    epoch: int
    _epoch_size: int  # rows of this epoch
    _num_drawn: int  # rows of this epoch that were drawn
    _draw_counts: Counter[int]  # draws of each row in this epoch
    _indices: Iterator[int] | None
    """Yields the remaining row indices of this epoch; None between two epochs."""

    @abstractmethod
    def start_epoch(self, epoch: int) -> None:
        """Sets the state to the start of an epoch; raises DataError if the epoch has no batch."""

    @abstractmethod
    def iterate_epoch(self, epoch: int) -> Iterator[int]:
        """Yields the row indices of an epoch, from the sampler."""

    def next_batch(self) -> Batch:
        """Returns the next batch; starts a new epoch if the current one is exhausted."""
        if self._is_epoch_over():
            self.start_epoch(self.epoch + 1)
        if self._indices is None:
            self._indices = self.iterate_epoch(self.epoch)
        size = min(self.batch_size, self._epoch_size - self._num_drawn)
        indices = [int(index) for index in islice(self._indices, size)]
        if len(indices) < size:
            raise DataError(
                f"the sampler {self.order_name} ended after {self._num_drawn + len(indices)} rows,"
                f" but its length is {self._epoch_size}"
            )
        batch = self._collate(indices, self.epoch, self._draw_counts)
        self._num_drawn += size
        if self._is_epoch_over():
            self._exhaust_sampler()
        return batch

    def load_batch(self, index_uids: Sequence[tuple[int, str]]) -> Batch:
        """Returns the batch of these (row index, uid) pairs."""
        return collate_fn(
            [{**self.dataset[i], "uid": uid, "dataset_index": i} for i, uid in index_uids]
        )

    def _collate(self, indices: Sequence[int], epoch: int, counts: Counter[int]) -> Batch:
        """Loads the batch of these rows; adds their draws to `counts`, from which uids are made."""
        index_uids = []
        for index in indices:
            name, number = type(self.dataset).__qualname__, index
            if hasattr(self.dataset, "key"):
                name, number = self.dataset.key(index)
            index_uids.append((index, row_uid(str(name), int(number), epoch, counts[index])))
            counts[index] += 1
        return self.load_batch(index_uids)

    def _is_epoch_over(self) -> bool:
        num_remaining = self._epoch_size - self._num_drawn
        return num_remaining <= 0 or (self.drop_last and num_remaining < self.batch_size)

    def _exhaust_sampler(self) -> None:
        """Draws the rest of the sampler's iterator, because some samplers update their state at its end."""
        if self._indices is not None:
            exhaust(self._indices, self._epoch_size - self._num_drawn)
        self._indices = None


def row_uid(dataset: str, row: int, epoch: int, occurrence: int) -> str:
    """Returns 16 hex characters that identify one draw of a row, and are equal in a resumed run."""
    text = f"{dataset}\x1f{row}\x1f{epoch}\x1f{occurrence}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def collate_fn(rows: Sequence[Row]) -> Batch:
    """Collates rows into object arrays; missing values are None."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: np.empty(len(rows), dtype=object) for name in names}
    for name, column in columns.items():
        for index, row in enumerate(rows):  # `column[:] = …` would convert lists to an array
            column[index] = row.get(name)
    return columns


def exhaust(indices: Iterator[int], num_remaining: int) -> None:
    """Draws the remaining indices, and one more, because a generator ends after its last yield."""
    deque(islice(indices, num_remaining + 1), maxlen=0)
