"""Names for values whose type the package cannot know: a user's data, a user's settings, parsed JSON.

Use one of these instead of `Any`. Where the package does know the type, write that type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
"""Anything JSON holds."""

JsonObject: TypeAlias = dict[str, JsonValue]
"""One JSON object."""

Row: TypeAlias = dict[str, Any]
"""One row of a data set or batch, by column; the user decides what a column holds."""

Settings: TypeAlias = Mapping[str, Any]
"""Keyword arguments and configuration of a plug-in, passed through as written."""

Function: TypeAlias = Callable[..., Any]
"""A function of the user's, called with arguments that its kind of plug-in defines."""
