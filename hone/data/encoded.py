"""Base class of datasets whose rows are encoded to token ids before training and cached."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hone.config.sft import PackedDataConfig
from hone.data.messages import Prompt, PromptError
from hone.data.prompt_ids import render_prompt
from hone.data.prompts import RowStore, tokenise
from hone.data.reading import read_rows
from hone.data.rows import BadRowPolicy, DataError, Files, sample_positions
from hone.data.schema import text_problem
from hone.tokenizer import Tokenizer
from hone.types import Row

THREADS = 4  # tokenizers release the GIL, so threads run in parallel
CHUNK_ROWS = 256  # rows per call of the progress callback
MAX_CACHED_TOKENS = 100_000_000
"""Limit of the cache in memory; rows that do not fit are encoded again at each read."""
_ARRAY_TYPES = {"loss_mask": "b", "labels": "f", "margin": "d"}
"""Array types of the encoded columns; token ids and counts are integers."""

EncodedRow = dict[str, list[Any]]  # columns of one row, such as `input_ids` and `loss_mask`


class UntrainableRow(PromptError):
    """Raised for a valid row without use for training; such rows are counted by `reason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EncodedDataset:
    """Rows that a subclass checks and encodes; bad rows raise DataError or are skipped."""

    config: PackedDataConfig

    def __init__(
        self,
        parquet_files: Files | None,
        tokenizer: Tokenizer,
        config: PackedDataConfig,
        max_samples: int = -1,
        *,
        rows: Sequence[Row] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.bad_rows = BadRowPolicy(config.on_bad_row)
        self.store = self.read(parquet_files or () if rows is None else rows)
        self.template_kwargs = dict(config.apply_chat_template_kwargs)
        if config.chat_template is not None:
            self.template_kwargs["chat_template"] = config.chat_template
        self.max_length, self.truncation = config.max_length, config.truncation
        self.max_tokens = config.max_length if config.truncation == "error" else None
        """Limit of the tokens of a row; None if longer rows are truncated."""
        positions = []
        for position, row in enumerate(self.store.scan()):
            try:
                self.check(row)
                positions.append(position)
            except PromptError as error:
                self._report(position, error, "not in the schema")
        self._require_rows(positions)
        shuffle, seed = config.shuffle, config.seed
        self.positions = sample_positions(positions, max_samples, shuffle=shuffle, seed=seed)
        self._cache: dict[int, dict[str, array[Any]]] = {}

    def read(self, files: Files) -> RowStore:
        return read_rows(files, self.bad_rows)

    def check(self, row: Row) -> None:
        """Raises PromptError if the row does not match the schema."""
        raise NotImplementedError

    def encode_row(self, row: Row) -> EncodedRow:
        """Returns the encoded and truncated columns of a row; raises PromptError on a bad row."""
        raise NotImplementedError

    def render(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt, as in RL."""
        return render_prompt(
            prompt,
            self.tokenizer,
            self.config.prompt_format,
            template_kwargs=self.template_kwargs,
            max_tokens=self.max_tokens,
        )

    def tokenise(self, text: str) -> list[int]:
        return tokenise(text, self.tokenizer, self.max_tokens)

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> EncodedRow:
        position = self.positions[index]
        if position in self._cache:
            return {name: values.tolist() for name, values in self._cache[position].items()}
        result = self._encode_position(position)
        if isinstance(result, PromptError):
            raise DataError(f"{self.store.where(position)}: {result}") from result
        return result

    def encode_all(self, on_progress: Callable[[int], None] | None = None) -> None:
        """Encodes all rows before the first step; `on_progress` gets the number of rows of each chunk."""
        if all(position in self._cache for position in self.positions):
            return  # encode_all was called before
        encoded_positions: list[int] = []
        cached_tokens = 0
        # The first row is encoded alone, because a tokenizer may set its options on first use.
        self._encode_position(self.positions[0])
        with ThreadPoolExecutor(THREADS, thread_name_prefix="encode rows") as threads:
            for start in range(0, len(self.positions), CHUNK_ROWS):
                chunk = self.positions[start : start + CHUNK_ROWS]
                results = threads.map(self._encode_position, chunk)
                for position, result in zip(chunk, results, strict=True):
                    if isinstance(result, PromptError):
                        self._report(position, result, "cannot be rendered")
                        continue
                    encoded_positions.append(position)
                    cached_tokens += max(map(len, result.values()))
                    if cached_tokens <= MAX_CACHED_TOKENS:
                        self._cache[position] = {
                            name: array(_ARRAY_TYPES.get(name, "i"), values)
                            for name, values in result.items()
                        }
                if on_progress is not None:
                    on_progress(len(chunk))
        self._require_rows(encoded_positions)
        self.positions = encoded_positions

    def key(self, index: int) -> tuple[str, int]:
        """Returns (dataset name, row number), from which the loader derives the uid."""
        return self.store.key(self.positions[index])

    @property
    def fingerprint(self) -> str:
        """Hash of the file contents and of the rows in use."""
        return self.store.selection_fingerprint(self.positions)

    def check_length(self, num_tokens: int) -> None:
        if num_tokens > self.max_length and self.truncation == "error":
            message = f"the row has {num_tokens} tokens, data.max_length={self.max_length}"
            raise UntrainableRow(
                "too long", f"{message}; raise it, or set data.truncation=left|right"
            )

    def _encode_position(self, position: int) -> EncodedRow | PromptError:
        try:
            return self.encode_row(self.store[position])
        except PromptError as error:
            return error

    def _report(self, position: int, error: PromptError, default_reason: str) -> None:
        reason = getattr(error, "reason", default_reason)
        self.bad_rows.report(reason, f"{self.store.where(position)}: {error}")

    def _require_rows(self, positions: list[int]) -> None:
        if not positions:
            raise DataError(f"no good row is left: {'; '.join(self.bad_rows.examples)}")


def check_row_text(row: Row, *columns: str) -> None:
    """Raises PromptError for invalid Unicode in any column, or for NUL in the given columns."""
    if problem := text_problem(row, columns):
        raise PromptError(str(problem))
