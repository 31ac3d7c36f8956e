"""Runs assertions about an untrusted program, which cannot tamper with them.

The program's box answers calls with plain data. The judge's box runs the tests, which call proxies.
"""

from __future__ import annotations

from hone.sandbox.judging.judge import Judgement, judge

__all__ = ["Judgement", "judge"]
