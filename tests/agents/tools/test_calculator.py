"""The calculator evaluates arithmetic only."""

from __future__ import annotations

import asyncio

import pytest

from hone.agents.tools.calculator import CalculatorTool


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("23 * 45 + 67", "1102"),
        ("1 / 8", "0.125"),
        ("2 ** 10", "1024"),
        ("123456789 * 987654321", "121932631112635269"),
        ("__import__('os')", "this is not arithmetic"),
        ("9 ** 9 ** 9", "this is not arithmetic"),
        ("1 / 0", "this is not arithmetic"),
        ("", "this is not arithmetic"),
    ],
)
def test_an_expression_is_answered_with_its_value(text: str, answer: str) -> None:
    response, reward, _ = asyncio.run(CalculatorTool({}).execute("one", {"expression": text}))
    assert str(response.text).startswith(answer)
    assert reward == 0.0
