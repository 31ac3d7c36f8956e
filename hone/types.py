"""Aliases for values whose type the package cannot know: user data, user settings, parsed JSON.

Use one of these instead of `Any`; if the type is known, write that type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
"""Any JSON value."""

JsonObject: TypeAlias = dict[str, JsonValue]
"""One JSON object."""

Row: TypeAlias = dict[str, Any]
"""One row of a dataset or batch, by column; the user defines the columns."""

Settings: TypeAlias = Mapping[str, Any]
"""Keyword arguments and configuration of a plug-in, passed through as written."""

Columns: TypeAlias = Mapping[str, Any]
"""Columns of a batch by name: tensors, arrays or lists with one value per row."""

Fields: TypeAlias = dict[str, Any]
"""Values by name, such as sampling parameters; another library or the user defines the names."""

Function: TypeAlias = Callable[..., Any]
"""A user function; its kind of plug-in defines the arguments."""
