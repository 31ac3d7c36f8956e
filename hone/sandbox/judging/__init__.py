"""Runs assertions about an untrusted program, which cannot tamper with the assertions.

The judge's box runs the tests, which call the program through proxies. The program's box answers the
calls with plain data.
"""

from __future__ import annotations

from hone.sandbox.judging.judge import Judgement, judge

__all__ = ["Judgement", "judge"]
