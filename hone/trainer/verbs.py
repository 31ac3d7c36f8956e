"""How the verbs of `hone` are declared, and where they write."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeAlias

Parser: TypeAlias = argparse.ArgumentParser
Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"
Options: TypeAlias = argparse.Namespace


def add_verb(
    verbs: Verbs, name: str, run: Callable[[Options, list[str]], int | None], text: str
) -> Parser:
    """Add a verb; `run` gets its options and the words that no option took."""
    added = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
    added.set_defaults(run=run)
    return added


def say(text: str) -> None:
    """Print a line of a verb's answer."""
    from hone.tracking.console import screen

    screen().line(text.rstrip("\n"))
