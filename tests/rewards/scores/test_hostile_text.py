"""Every rule takes linear time for long hostile responses, which the test's timeout checks."""

from __future__ import annotations

from typing import Any

import pytest

from hone.rewards.programs import extract_code
from hone.rewards.scores import (
    arithmetic,
    countdown,
    geo3k,
    gsm8k,
    math_dapo,
    math_reward,
    prime_math,
    qa_em,
    qa_em_format,
)

LENGTH = 300_000
PIECES = [
    " ",
    "\n",
    "(",
    "{",
    "<answer>",
    "</answer>",
    "<answer></answer>",
    "<information>",
    "<think>",
    "<|",
    "|>",
    "\\boxed{",
    "\\boxed ",
    "\\text{ ",
    "\\frac",
    "```",
    "``` \t",
    "answer ",
    "answer is ",
    "#### ",
    "1,",
    "$",
    "=",
]
TRUTH: dict[str, Any] = {"target": 24, "numbers": [2, 3, 4]}


@pytest.mark.timeout(20)
def test_the_format_score_takes_linear_time() -> None:
    formats = {"structure_format_score": 0.1, "score_observations": True}
    for piece in ("<information>", "<|a|>"):
        qa_em_format.compute_score(piece * 400_000, {"target": ["a"]}, **formats)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", PIECES)
def test_no_rule_is_slow_on_repeated_pieces(piece: str) -> None:
    text = piece * (LENGTH // len(piece))
    for solution in (text, f"Assistant: {text}", f"{text}\\boxed{{{text}}}", f"<answer>{text}"):
        gsm8k.compute_score(solution, "1")
        gsm8k.compute_score(solution, "1", method="flexible")
        countdown.compute_score(solution, TRUTH)
        countdown.compute_score(solution, TRUTH, compat=True)
        arithmetic.compute_score(solution, 1)
        arithmetic.compute_score(solution, 1, compat=True)
        math_reward.compute_score(solution, "x", symbolic=False)
        math_dapo.compute_score(solution, "1")
        prime_math.extract_answer(solution)
        geo3k.format_reward(solution)
        qa_em.compute_score(solution, "x")
        qa_em.extract_solution(solution, compat=True)
        assert qa_em_format.score_details(solution, "x")["acc"] == 0.0
        extract_code(solution)
