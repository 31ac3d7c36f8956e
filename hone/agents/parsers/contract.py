"""The parser contract: a turn's text to the calls in it. Model text is hostile: it is read, never run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hone.plugins import Table


@dataclass(frozen=True)
class ToolCall:
    """One call the model asked for; `error` says why it cannot be made."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None


class ToolParser(ABC):
    """Finds the calls of one turn, in order."""

    @abstractmethod
    def calls(self, text: str) -> list[ToolCall]:
        """Every call in the text; a malformed one comes back with its `error`."""


PARSERS = Table("tool-call parser", {"hermes": "hone.agents.parsers.hermes:HermesParser"})
