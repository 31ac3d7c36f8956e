"""What the checks of a run need to know of the rows, collected in the scan that checks their schema."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import NamedTuple

from hone.data.prompts import FileRows
from hone.data.values import is_missing
from hone.types import JsonObject, Row, Settings


class RowKind(NamedTuple):
    """The values of a row that decide how it is generated and scored; many rows are of one kind."""

    agent_name: str | None
    source: str
    """The data source; the text of its value if that is not text."""
    has_text_source: bool
    has_model_style: bool
    """Whether the reward model scores the row (`reward_model.style` is `model`)."""
    has_truth: bool
    media: str | None
    """The first media column that is not empty."""


@dataclass
class LoopArguments:
    """The arguments of agent loops in the columns of rows, or in their `extra_info`."""

    tool_configs: dict[str, JsonObject] = field(default_factory=dict)
    """Each different `tool_config`, by its JSON text."""
    tools: set[str] = field(default_factory=set)
    """The tools of `tools_kwargs`."""
    interactions: set[str] = field(default_factory=set)
    """The names in `interaction_kwargs`; "" for a row without a name."""

    def add(self, fields: Settings) -> None:
        """Adds the arguments of a row, or of its `extra_info`."""
        if isinstance(config := fields.get("tool_config"), dict):
            self.tool_configs.setdefault(json.dumps(config, default=str), config)
        if isinstance(kwargs := fields.get("tools_kwargs"), dict):
            self.tools.update(name for name, value in kwargs.items() if value is not None)
        if isinstance(kwargs := fields.get("interaction_kwargs"), dict):
            self.interactions.add(str(kwargs.get("name") or ""))


class RowFacts:
    """The facts of the good rows of a data set, by position, and the column names of its files."""

    def __init__(self, num_rows: int, source_key: str, media_keys: Sequence[str]) -> None:
        self.source_key, self.media_keys = source_key, tuple(media_keys)
        self.first_rows: list[dict[str, int]] = []
        """For each file, the index of the first row with a column, by column."""
        self.row_arguments, self.extra_arguments = LoopArguments(), LoopArguments()
        self._kind_numbers: dict[RowKind, int] = {}
        self._kinds: list[RowKind] = []
        self._number_of_row = array("L", [0]) * num_rows

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `add` reads besides those of the schema."""
        return (self.source_key, *self.media_keys)

    def scan(self, file: FileRows, columns: Sequence[str]) -> Iterator[Row]:
        """Yields the rows of a file with at least these columns; notes the names of all columns."""
        if not isinstance(file.content, list):
            self.first_rows.append(dict.fromkeys(file.content.column_names, 0))
            yield from file.scan(tuple(dict.fromkeys((*columns, *self.columns))))
            return
        first_rows: dict[str, int] = {}
        self.first_rows.append(first_rows)
        for index, row in enumerate(file.scan()):
            if not first_rows.keys() >= row.keys():
                for name in row:
                    first_rows.setdefault(name, index)
            yield row

    def add(self, position: int, row: Row) -> None:
        """Adds a row whose schema is good."""
        reward_model = row.get("reward_model") or {}
        source = row.get(self.source_key)
        kind = RowKind(
            row.get("agent_name"),
            str(source),
            isinstance(source, str),
            reward_model.get("style") == "model",
            not is_missing(reward_model.get("ground_truth")),
            next((key for key in self.media_keys if not _is_empty(row.get(key))), None),
        )
        number = self._kind_numbers.setdefault(kind, len(self._kinds))
        if number == len(self._kinds):
            self._kinds.append(kind)
        self._number_of_row[position] = number
        self.row_arguments.add(row)
        if isinstance(extra_info := row.get("extra_info"), Mapping):
            self.extra_arguments.add(extra_info)

    def agent_names(self) -> set[str | None]:
        """Returns the `agent_name` of all good rows."""
        return {kind.agent_name for kind in self._kinds}

    def of_rows(self, positions: Iterable[int]) -> Iterator[tuple[int, RowKind]]:
        """Yields the position and kind of each row."""
        return ((position, self._kinds[self._number_of_row[position]]) for position in positions)

    def first_of_each_kind(self, positions: Iterable[int]) -> Iterator[tuple[int, RowKind]]:
        """Yields the first position of each kind among `positions`, in their order."""
        seen: set[int] = set()
        for position in positions:
            number = self._number_of_row[position]
            if number not in seen:
                seen.add(number)
                yield position, self._kinds[number]


def _is_empty(value: object) -> bool:
    """Returns whether a media column has no entry; rows in memory may have arrays."""
    return value is None or (isinstance(value, Sized) and len(value) == 0)
