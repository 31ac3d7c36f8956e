"""The base class of errors whose message is enough for the user."""

from __future__ import annotations


class UserError(Exception):
    """An error that the user can correct: programs print its message in one sentence, without a traceback."""
