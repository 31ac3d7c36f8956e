"""How the verbs of `hone` are declared, and where they write."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeAlias

Parser: TypeAlias = argparse.ArgumentParser
Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"
Chosen: TypeAlias = argparse.Namespace


def add_verb(
    verbs: Verbs, name: str, run: Callable[[Chosen, list[str]], int | None], text: str
) -> Parser:
    """A verb that `run` does, with the options chosen and the words that no option took."""
    added = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
    added.set_defaults(run=run)
    return added


def say(text: str) -> None:
    """A line of a verb's answer."""
    from hone.tracking.console import screen

    screen().line(text.rstrip("\n"))
