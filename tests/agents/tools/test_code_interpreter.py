"""The model's programs run in the sandbox, and only there."""

from __future__ import annotations

import asyncio

import pytest

from hone.agents.tools.code_interpreter import CodeInterpreterTool
from hone.sandbox import SandboxUnavailable


def run(code: str) -> str:
    tool = CodeInterpreterTool({"timeout_s": 60})
    return asyncio.run(tool.execute("i", {"code": code}))[0].text or ""


def test_it_prints_raises_and_reaches_nothing() -> None:
    try:
        assert run("print(6 * 7)").strip() == "42"
    except SandboxUnavailable as missing:
        pytest.skip(str(missing))
    assert "ZeroDivisionError" in run("1 / 0")
    assert run("x = 1") == "(ok, nothing printed)"
    assert "Error" in run("import socket; socket.create_connection(('127.0.0.1', 80), 1)")
