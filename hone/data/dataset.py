"""The prompt dataset: rows in verl's schema are checked, filtered, tokenised and truncated."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from hone.config.data import DataConfig
from hone.data.files import is_non_local
from hone.data.hub import as_hf_dataset
from hone.data.messages import Message, PromptError, PromptTooLong, Tools, as_messages
from hone.data.prompts import PromptBuilder, PromptRows
from hone.data.reading import as_data_config, load_tool_schemas, read_rows, rows_of, to_verl_schema
from hone.data.row_facts import RowFacts
from hone.data.rows import BadRowPolicy, DataError, Files, expand_files, sample_positions
from hone.data.schema import COLUMNS, SchemaCheck
from hone.data.token_counts import token_counts
from hone.tokenizer import Processor, Tokenizer
from hone.types import Fields, Row, Settings

if TYPE_CHECKING:
    from hone.data.loader import Dataset
    from hone.protocol import DataProto

logger = logging.getLogger(__name__)


class RLHFDataset(PromptRows):
    """Prompt rows from files or dicts; `dataset[i]` is one row as a dict.

    A row contains raw_prompt, prompt_ids (truncated to data.max_prompt_length), data_source,
    reward_model, extra_info, agent_name (None by default), tools_kwargs, interaction_kwargs, index,
    and all other columns of the file. A subclass may override verl's methods _download,
    _read_files_and_tokenize, maybe_filter_out_long_prompts and _build_messages.
    """

    _hf_dataset: Dataset | None = None
    facts: RowFacts
    """What the checks of a run need to know of the rows."""

    def __init__(
        self,
        data_files: Files,
        tokenizer: Tokenizer,
        config: DataConfig | Settings,
        processor: Processor | None = None,
        max_samples: int = -1,
        *,
        tools: Tools | None = None,
    ) -> None:
        settings = as_data_config(config)
        schemas = list(tools) if tools is not None else load_tool_schemas(settings)
        self.tokenizer, self.processor, self.tools = tokenizer, processor, schemas
        self.settings = settings
        self.config = config  # as passed, for subclasses written for verl
        self.prompt_key, self.max_prompt_length = settings.prompt_key, settings.max_prompt_length
        self.image_key, self.video_key = settings.image_key, settings.video_key
        self.added_rows = []
        self.bad_rows = BadRowPolicy(settings.on_bad_row)
        if isinstance(data_files, str | os.PathLike):
            data_files = [data_files]
        self.data_files: Sequence[str | os.PathLike[str] | Row] = data_files
        self._read_all()
        self.num_overlong_rows = 0
        self._prompt_lengths: list[int] | None = None
        self.positions = sample_positions(
            self._valid_positions(), max_samples, shuffle=settings.shuffle, seed=settings.seed
        )
        if settings.filter_overlong_prompts:
            self._filter_overlong()
        if len(self.positions) != len(self.store):
            self._hf_dataset = None  # rebuilt from the remaining rows
        if self.bad_rows.total:
            counts = sorted(self.bad_rows.counts.items())
            logger.warning(
                "skipped %d bad rows or files (%s), such as: %s",
                self.bad_rows.total,
                ", ".join(f"{reason}: {count}" for reason, count in counts),
                self.bad_rows.examples[0],
            )

    def __len__(self) -> int:
        return len(self.positions) + len(self.added_rows)

    def set_prompt_builder(self, prompt_builder: PromptBuilder) -> None:
        """Sets `prompt_builder`, and filters overlong prompts again with the added text."""
        self.prompt_builder, self._prompt_lengths = prompt_builder, None
        if self.settings.filter_overlong_prompts:
            self._filter_overlong()
            self._hf_dataset = None
            self.__dict__.pop("fingerprint", None)

    def prompt_lengths(self) -> Iterator[int | PromptError]:
        """Yields the number of tokens of each prompt before truncation, or its rendering error."""
        if self._prompt_lengths is not None and not self.added_rows:
            return iter(self._prompt_lengths)
        return self._count_tokens(chain(self._prompt_rows(), self.added_rows), self._tokenise_limit)

    def indices_by_file(self) -> list[list[int]]:
        """Returns row indices by data file, in the order of data.train_files."""
        indices: list[list[int]] = [[] for _ in self.store.files]
        for index, position in enumerate(self.positions):
            file_index, _ = self.store.locate(position)
            indices[file_index].append(index)
        return indices

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the file contents and of the rows in use."""
        return self.store.selection_fingerprint(self.positions)

    def on_batch_end(self, batch: DataProto) -> Sequence[Row] | None:
        """Returns rows to add from the next epoch on; called with the batch after each step."""
        return None

    def append(self, rows: Sequence[Row]) -> None:
        """Adds rows in verl's schema; bad rows and overlong prompts are treated as in files."""
        check = SchemaCheck(self.prompt_key, self.settings.prompt_format)
        where, good_rows = "a row added by on_batch_end", []
        for row in rows:
            if problem := check.problem(row):
                self.bad_rows.report(problem.reason, f"{where}: {problem}")
            else:
                good_rows.append(dict(row))
        if self.settings.filter_overlong_prompts:
            fitting = self._fitting_prompts(good_rows, lambda _: where)
            good_rows = [good_rows[index] for index, _ in fitting]
        self.added_rows += good_rows

    def state_dict(self) -> Fields:
        return {
            "fingerprint": self.fingerprint,
            "rows": len(self.positions),
            "added": list(self.added_rows),
        }

    def load_state_dict(self, state: Settings) -> None:
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"the data differ from the checkpoint's data: the checkpoint has {state['rows']}"
                f" rows ({state['fingerprint'][:8]}), this run has {len(self.positions)}"
                f" ({self.fingerprint[:8]}); restore the files and the data.* settings, or start a"
                " new run from the checkpoint's model (trainer.resume_mode=disable)"
            )
        self.added_rows = [dict(row) for row in state["added"]]

    def _read_all(self) -> None:
        """Fills `self.store`."""
        self._download()
        self._read_files_and_tokenize()
        if not hasattr(self, "store"):
            raise DataError(
                f"{type(self).__name__}._read_files_and_tokenize must set self.dataframe"
            )
        if self._is_overridden("_build_messages"):
            accepts_key = "key" in inspect.signature(self._build_messages).parameters
            key: Any = {"key": self.prompt_key} if accepts_key else {}
            self.dataframe = [
                {**row, self.prompt_key: self._build_messages(dict(row), **key)}
                for row in self.store.scan()
            ]

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Copies remote files and sets `self.data_files` to the copies."""
        if any(isinstance(file, str) and is_non_local(file) for file in self.data_files):
            self.data_files = expand_files(self.data_files)

    def _read_files_and_tokenize(self) -> None:
        """Reads `self.data_files`; an override must set `self.dataframe`."""
        store = read_rows(self.data_files, self.bad_rows)
        self.store = to_verl_schema(store, self.prompt_key)
        if self._is_overridden("maybe_filter_out_long_prompts"):
            self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    def maybe_filter_out_long_prompts(self, dataframe: Dataset) -> Dataset:
        """Returns the rows unchanged: `data.filter_overlong_prompts` is applied after reading."""
        return dataframe

    def _build_messages(self, example: Row, key: str | None = None) -> list[Message]:
        """Removes the messages from a row and returns them."""
        return as_messages(example.pop(key or self.prompt_key))

    @property
    def dataframe(self) -> Dataset:
        """The rows as a Hugging Face dataset, or a list if `datasets` is not installed; can be assigned."""
        if self._hf_dataset is None:
            is_initialized = hasattr(self, "positions")
            rows = (
                [self.raw_row(i) for i in range(len(self))] if is_initialized else self.store.scan()
            )
            self._hf_dataset = as_hf_dataset(list(rows))
        return self._hf_dataset

    @dataframe.setter
    def dataframe(self, data: Dataset) -> None:
        rows = rows_of(data)
        if not rows:
            raise DataError(f"self.dataframe of {type(self).__name__} has no rows: {type(data)}")
        self._hf_dataset = data
        self.store = read_rows(rows, self.bad_rows)

    def _is_overridden(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(RLHFDataset, name)

    def _valid_positions(self) -> list[int]:
        """Returns the positions of rows with a good schema; the same scan collects `self.facts`."""
        self.facts = self._new_facts(self.settings.reward_fn_key)
        columns = (self.prompt_key, *COLUMNS)
        positions, position = [], 0
        for file in self.store.files:
            check = SchemaCheck(self.prompt_key, self.settings.prompt_format)
            for row in self.facts.scan(file, columns):
                if problem := check.problem({name: row[name] for name in columns if name in row}):
                    # The row with all columns may have an earlier problem.
                    problem = check.problem(self.store[position]) or problem
                    self.bad_rows.report(problem.reason, f"{self.store.where(position)}: {problem}")
                else:
                    self.facts.add(position, row)
                    positions.append(position)
                position += 1
        if not positions:
            raise DataError(f"no good row is left: {'; '.join(self.bad_rows.examples)}")
        return positions

    def _new_facts(self, source_key: str) -> RowFacts:
        settings = self.settings
        media_keys = (settings.image_key, settings.video_key, settings.audio_key)
        return RowFacts(len(self.store), source_key, media_keys)

    def facts_by_source(self, source_key: str) -> RowFacts:
        """Returns the facts of the rows in use, with this column as the data source."""
        if source_key == self.facts.source_key:
            return self.facts
        facts = self._new_facts(source_key)  # of a reward manager with a column of its own
        for position, row in self._scan_used((*COLUMNS, *facts.columns)):
            facts.add(position, row)
        return facts

    def _scan_used(self, columns: Sequence[str]) -> Iterator[tuple[int, Row]]:
        """Yields position and columns of each row in use, in the order of the files."""
        positions = set(self.positions)
        rows = enumerate(self.store.scan(tuple(dict.fromkeys(columns))))
        return ((position, row) for position, row in rows if position in positions)

    def _prompt_rows(self) -> Iterator[Row]:
        """Yields the columns from which the prompt of each row in use is rendered."""
        loop_columns = ("tool_config", "extra_info") if self.prompt_builder else ()
        return (row for _, row in self._scan_used((self.prompt_key, "agent_name", *loop_columns)))

    def _filter_overlong(self) -> None:
        """Removes the positions of overlong prompts; counts and logs these prompts."""
        positions, limit = self.positions, self.max_prompt_length
        fitting = [
            *self._fitting_prompts(self._prompt_rows(), lambda i: self.store.where(positions[i]))
        ]
        if not fitting:
            raise DataError(
                f"all {len(positions)} prompts have more than data.max_prompt_length="
                f"{limit} tokens; raise it"
            )
        if self.num_overlong_rows:
            message = "%d of %d prompts have more than %d tokens and were left out"
            logger.info(message, len(positions) - len(fitting), len(positions), limit)
        self.positions = [positions[index] for index, _ in fitting]
        self._prompt_lengths = [length for _, length in fitting]

    def _fitting_prompts(
        self, rows: Iterable[Row], where: Callable[[int], str]
    ) -> Iterator[tuple[int, int]]:
        """Yields (index, number of tokens) of the prompts within the limit, and counts the others."""
        limit = self.max_prompt_length
        for index, length in enumerate(self._count_tokens(rows, limit)):
            if isinstance(length, PromptTooLong) or (isinstance(length, int) and length > limit):
                self.num_overlong_rows += 1
            elif isinstance(length, PromptError):
                self.bad_rows.report("cannot be rendered", f"{where(index)}: {length}")
            else:
                yield index, length

    def _count_tokens(
        self, rows: Iterable[Row], max_tokens: int | None
    ) -> Iterator[int | PromptError]:
        renderings = (partial(self._render, row) for row in rows)
        return token_counts(renderings, self.tokenizer, max_tokens)
