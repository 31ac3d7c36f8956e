"""Checks rows against the schema, when a dataset is loaded and in `hone data check`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from hone.data.messages import PromptError, as_messages, check_message_roles
from hone.data.prompts import KWARGS_COLUMNS, raw_text
from hone.text import clean_text, find_flaw
from hone.types import JsonValue, Row

NAME_COLUMNS = ("data_source", "agent_name")
OBJECT_COLUMNS = ("reward_model", "extra_info", *KWARGS_COLUMNS)
COLUMNS = (*NAME_COLUMNS, *OBJECT_COLUMNS)  # the columns that are checked besides the prompt


@dataclass(frozen=True)
class Problem:
    """A problem of a row; similar problems have the same `reason` and are counted together."""

    reason: str
    message: str

    def __str__(self) -> str:
        return self.message


def json_type(value: JsonValue) -> str:
    """Returns the JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "text"
    return "object" if isinstance(value, Mapping) else "list"


class SchemaCheck:
    """Checks the rows of one file in order; the first value of a column sets its type."""

    def __init__(self, prompt_key: str, prompt_format: str) -> None:
        self.prompt_key = prompt_key
        self.prompt_format = prompt_format
        self._types: dict[str, str] = {}

    def problem(self, row: Row) -> Problem | None:
        """Returns the first problem of the row, or None."""
        return (
            text_problem(row, (self.prompt_key, *NAME_COLUMNS))
            or self._prompt_problem(row)
            or next(_type_problems(row), None)
            or self._mixed_type_problem(row)
        )

    def _prompt_problem(self, row: Row) -> Problem | None:
        prompt = row.get(self.prompt_key)
        if prompt is None or (isinstance(prompt, (str, list)) and not prompt):
            message = f"column {self.prompt_key!r} (data.prompt_key) is missing or empty"
            columns = ", ".join(map(str, row)) or "no columns"
            return Problem("missing prompt", f"{message}; the row has {columns}")
        reason = "wrong type"
        try:
            if self.prompt_format == "raw":
                raw_text(prompt)
            messages = as_messages(prompt)
            reason = "unknown role"
            check_message_roles(messages)
        except PromptError as error:
            return Problem(reason, str(error))
        return None

    def _mixed_type_problem(self, row: Row) -> Problem | None:
        values = {
            f"column {self.prompt_key!r}": row[self.prompt_key],
            "reward_model.ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
        }
        types = {name: json_type(value) for name, value in values.items() if value is not None}
        for name, json_type_name in types.items():
            first_type = self._types.get(name, json_type_name)
            if first_type != json_type_name:
                message = f"{name} is {json_type_name}, earlier rows have {first_type}"
                return Problem("mixed schema", message)
        self._types.update(types)
        return None


def text_problem(row: Row, columns_without_nul: Collection[str]) -> Problem | None:
    """Returns a problem for invalid Unicode, deep nesting, or NUL in `columns_without_nul`."""
    for name, value in row.items():
        if flaw := find_flaw(value, allow_nul=name not in columns_without_nul):
            return Problem("invalid text", f"column {clean_text(str(name))!r} {flaw}")
    return None


def _type_problems(row: Row) -> Iterator[Problem]:
    """Yields a problem for each value that must be text, or must be an object, and has another type."""
    for name in NAME_COLUMNS:
        actual_type = json_type(row.get(name))
        if actual_type not in ("text", "null"):
            yield Problem("wrong type", f"column {name!r} must be text, got {actual_type}")
    values = {f"column {name!r}": row.get(name) for name in OBJECT_COLUMNS}
    extra_info = row.get("extra_info")
    nested_columns = extra_info if isinstance(extra_info, Mapping) else {}
    values |= {f"extra_info.{name}": nested_columns.get(name) for name in KWARGS_COLUMNS}
    for prefix, fields in (("", row), ("extra_info.", nested_columns)):
        tools_kwargs = fields.get("tools_kwargs")
        if isinstance(tools_kwargs, Mapping):
            for tool, kwargs in tools_kwargs.items():
                if not isinstance(kwargs, str):  # a tool loop of the user's may read a text
                    values[f"{prefix}tools_kwargs.{tool}"] = kwargs
    for path, value in values.items():
        actual_type = json_type(value)
        if actual_type not in ("object", "null"):
            yield Problem("wrong type", f"{path} must be an object, got {actual_type}")
