"""Assertions about an untrusted program, decided where the program cannot reach.

Two boxes: the program's answers calls in plain data, the judge's runs the tests against a proxy.
"""

from __future__ import annotations

from hone.sandbox.judging.judge import Judgement, judge

__all__ = ["Judgement", "judge"]
