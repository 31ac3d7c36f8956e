"""Runs assertions about an untrusted program in a second box, out of the program's reach."""

from __future__ import annotations

from hone.sandbox.judging.judge import Judgement, judge

__all__ = ["Judgement", "judge"]
