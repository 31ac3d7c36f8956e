"""Checks rows against the schema, when a dataset is loaded and in `hone data check`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from hone.data.prompts import PromptError, as_messages, check_message_roles, raw_text
from hone.text import clean_text, flaw_of
from hone.types import JsonValue, Row

NAMES = ("data_source", "agent_name")
ARGUMENTS = ("tools_kwargs", "interaction_kwargs", "tool_config")
OBJECTS = ("reward_model", "extra_info", *ARGUMENTS)
COLUMNS = (*NAMES, *OBJECTS)
"""The columns that are checked besides the prompt."""


@dataclass(frozen=True)
class Problem:
    """A problem of a row; `reason` is the same for similar problems, to count them."""

    reason: str
    message: str

    def __str__(self) -> str:
        return self.message


def kind_of(value: JsonValue) -> str:
    """Returns the JSON type of a value."""
    kinds = ((bool, "boolean"), ((int, float), "number"), (str, "text"), (Mapping, "object"))
    if value is None:
        return "null"
    return next((kind for types, kind in kinds if isinstance(value, types)), "list")


class SchemaCheck:
    """Checks the rows of one file in order; the first value of a column sets its kind."""

    def __init__(self, prompt_key: str, prompt_format: str) -> None:
        self.prompt_key = prompt_key
        self.prompt_format = prompt_format
        self._kinds: dict[str, str] = {}

    def problem(self, row: Row) -> Problem | None:
        """Returns the first problem of the row, or None."""
        return (
            text_problem(row, (self.prompt_key, *NAMES))
            or self._prompt_problem(row)
            or next(_type_problems(row), None)
            or self._kind_problem(row)
        )

    def _prompt_problem(self, row: Row) -> Problem | None:
        prompt = row.get(self.prompt_key)
        if prompt is None or (isinstance(prompt, (str, list)) and not prompt):
            return Problem(
                "missing prompt",
                f"column {self.prompt_key!r} (data.prompt_key) is missing or empty;"
                f" the row has {', '.join(map(str, row)) or 'no columns'}",
            )
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

    def _kind_problem(self, row: Row) -> Problem | None:
        values = {
            f"column {self.prompt_key!r}": row[self.prompt_key],
            "reward_model.ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
        }
        kinds = {name: kind_of(value) for name, value in values.items() if value is not None}
        for name, kind in kinds.items():
            if self._kinds.get(name, kind) != kind:
                return Problem(
                    "mixed schema", f"{name} is {kind}, earlier rows have {self._kinds[name]}"
                )
        self._kinds.update(kinds)
        return None


def text_problem(row: Row, plain: Collection[str]) -> Problem | None:
    """Returns a problem for invalid Unicode, deep nesting, or NUL in the `plain` columns."""
    for name, value in row.items():
        if flaw := flaw_of(value, allow_nul=name not in plain):
            return Problem("hostile text", f"column {clean_text(str(name))!r} {flaw}")
    return None


def _type_problems(row: Row) -> Iterator[Problem]:
    for names, kind, expected in (
        (OBJECTS, "object", "an object of fields"),
        (NAMES, "text", "text"),
    ):
        for name in names:
            if (actual := kind_of(row.get(name))) not in (kind, "null"):
                yield Problem("wrong type", f"column {name!r} is {expected}, got {actual}")
    for prefix, fields in (("", row), ("extra_info.", row.get("extra_info") or {})):
        for name in ARGUMENTS:
            arguments = fields.get(name)
            values = {f"{prefix}{name}": arguments}
            if name == "tools_kwargs" and isinstance(arguments, Mapping):
                values |= {f"{prefix}{name}.{tool}": kwargs for tool, kwargs in arguments.items()}
            for where, value in values.items():
                if (actual := kind_of(value)) not in ("object", "null"):
                    yield Problem("wrong type", f"{where} is an object of arguments, got {actual}")
