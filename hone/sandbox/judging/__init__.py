"""Runs assertions about an untrusted program, which cannot tamper with the assertions."""

from __future__ import annotations

from hone.sandbox.judging.judge import Judgement, judge

__all__ = ["Judgement", "judge"]
