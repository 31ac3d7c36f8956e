"""The error of a batch that does not fit together."""

from __future__ import annotations


class ProtocolError(ValueError, AssertionError):
    """Columns, rows or facts that do not fit. Code written for verl catches it as AssertionError."""
