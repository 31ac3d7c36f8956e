"""Runs assertions about an untrusted program where the program cannot tamper with them.

Two boxes: the program's box answers calls in plain data, the judge's box runs the tests on a proxy.
"""

from __future__ import annotations

from hone.sandbox.judging.judge import Judgement, judge

__all__ = ["Judgement", "judge"]
