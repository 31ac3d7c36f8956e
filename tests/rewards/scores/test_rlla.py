"""RLLA: form and calls, from the worst to the exact."""

from __future__ import annotations

import pytest

from hone.rewards.scores import rlla

ONE = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
TRUTH = f"<think>t</think>\n<tool_call>\n{ONE}\n</tool_call>"


def scored(response: str, truth: str = TRUTH) -> tuple[float, float]:
    found = rlla.compute_score("rlla", response, truth, {"experiment_name": "qwen"})
    assert found["score"] == found["format_reward"] + found["accuracy_reward"]
    return found["format_reward"], found["accuracy_reward"]


def test_the_reference_itself_earns_everything() -> None:
    assert scored(TRUTH) == (1.0, 3.0)
    assert scored(f"<|im_start|>user\nx<|im_end|><|im_start|>assistant\n{TRUTH}<|im_end|>") == (
        1.0,
        3.0,
    )


def test_no_call_and_broken_calls_earn_the_least() -> None:
    for text in ("hello", "<tool_call>\nnot json\n</tool_call>", "<tool_call>\n[1]\n</tool_call>"):
        assert scored(text) == (0.0, -3.0)


def test_a_call_with_one_right_value_of_two_lies_between() -> None:
    # Of 1 (names) + 1 + 2 (parameters): names 1, parameter names 1, one value.
    near = TRUTH.replace('"b": 2', '"b": 3')
    assert scored(near) == (1.0, pytest.approx(6 * 3 / 4 - 3))
    # Another tool: no name is shared, nothing is compared.
    assert scored(TRUTH.replace("add", "sub")) == (1.0, -3.0)


def test_an_answer_without_calls_is_scored_by_its_form_alone() -> None:
    truth = "<think>t</think>\n<response>yes</response>"
    assert scored("<think>a</think>\n<response>no</response>", truth) == (1.0, 0.0)
    assert scored("<think>a</think>\n<response>no</response><response>", truth) == (0.0, 0.0)
    both = f"{TRUTH}\n<response>done</response>"
    assert scored(both, both) == (1.0, 3.0)


def test_a_reference_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="ground truth cannot be read"):
        scored("x", "<tool_call>\nno\n</tool_call>")
