"""What a row must look like before anything is made of it.

One check, used when a data set is loaded and by `hone data check`.
Leaves out whether a data source has a scorer: rewards know that, and are told to `check_file`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hone.data.prompts import PromptError, as_messages, raw_text, refuse_unknown_roles
from hone.text import clean_text, flaw_of
from hone.types import JsonValue, Row

NAMES = ("data_source", "agent_name")
OBJECTS = ("reward_model", "extra_info", "tools_kwargs", "interaction_kwargs")
COLUMNS = (*NAMES, *OBJECTS)
"""Columns, beside the prompt, that a check reads."""


@dataclass(frozen=True)
class Problem:
    """Why a row cannot be used: a countable reason and the sentence for this row."""

    reason: str
    message: str

    def __str__(self) -> str:
        return self.message


def kind_of(value: JsonValue) -> str:
    """The JSON kind of a value: schemas may differ in numbers' types, not in kind."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "object"
    return "list"


class SchemaCheck:
    """Checks the rows of one file in order; the first row that has a column sets its kind."""

    def __init__(self, prompt_key: str, prompt_format: str) -> None:
        self.prompt_key = prompt_key
        self.prompt_format = prompt_format
        self._kinds: dict[str, str] = {}

    def problem(self, row: Row) -> Problem | None:
        """What is wrong with the row, or None."""
        return (
            text_problem(row, (self.prompt_key, *NAMES))
            or self._prompt_problem(row)
            or self._type_problem(row)
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
        try:
            if self.prompt_format == "raw":
                raw_text(prompt)
            messages = as_messages(prompt)
        except PromptError as error:
            return Problem("wrong type", str(error))
        try:
            refuse_unknown_roles(messages)
        except PromptError as error:
            return Problem("unknown role", str(error))
        return None

    def _type_problem(self, row: Row) -> Problem | None:
        for name in OBJECTS:
            kind = kind_of(row.get(name))
            if kind not in ("object", "null"):
                return Problem("wrong type", f"column {name!r} is an object of fields, got {kind}")
        for name in NAMES:
            kind = kind_of(row.get(name))
            if kind not in ("text", "null"):
                return Problem("wrong type", f"column {name!r} is text, got {kind}")
        return _arguments_problem(row)

    def _kind_problem(self, row: Row) -> Problem | None:
        ground_truth = (row.get("reward_model") or {}).get("ground_truth")
        values = {
            f"column {self.prompt_key!r}": row[self.prompt_key],
            "reward_model.ground_truth": ground_truth,
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
    """Text that is no Unicode or is nested too deeply; in the `plain` columns NUL is refused too."""
    for name, value in row.items():
        if flaw := flaw_of(value, allow_nul=name not in plain):
            return Problem("hostile text", f"column {clean_text(str(name))!r} {flaw}")
    return None


def _arguments_problem(row: Row) -> Problem | None:
    """Arguments of tools and interactions, at the top of the row or in extra_info."""
    extra_info = row.get("extra_info") or {}
    for place, fields in (("", row), ("extra_info.", extra_info)):
        for name in ("tools_kwargs", "interaction_kwargs"):
            given = fields.get(name)
            values = {f"{place}{name}": given}
            if name == "tools_kwargs" and isinstance(given, Mapping):
                values |= {f"{place}{name}.{tool}": inner for tool, inner in given.items()}
            for where, value in values.items():
                if kind_of(value) not in ("object", "null"):
                    got = kind_of(value)
                    return Problem("wrong type", f"{where} is an object of arguments, got {got}")
    return None
