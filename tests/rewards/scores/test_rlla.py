"""RLLA: rewards for the format and for the tool calls."""

from __future__ import annotations

import pytest

from hone.rewards.scores import rlla

ONE = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
TRUTH = f"<think>t</think>\n<tool_call>\n{ONE}\n</tool_call>"


def rewards(response: str, truth: str = TRUTH) -> tuple[float, float]:
    result = rlla.compute_score("rlla", response, truth, {"experiment_name": "qwen"})
    assert result["score"] == result["format_reward"] + result["accuracy_reward"]
    return result["format_reward"], result["accuracy_reward"]


def test_the_reference_gets_the_highest_rewards() -> None:
    assert rewards(TRUTH) == (1.0, 3.0)
    assert rewards(f"{TRUTH}<|im_end|>\n") == (1.0, 3.0)


def test_text_around_the_blocks_costs_the_format() -> None:
    for text in (
        f"<|im_start|>user\nx<|im_end|><|im_start|>assistant\n{TRUTH}<|im_end|>",
        f"anything<|start_header_id|>assistant<|end_header_id|>{TRUTH}",
        f"{TRUTH}<|im_end|>anything",
    ):
        assert rewards(text) == (0.0, 3.0)


def test_guessed_calls_earn_less_than_one_wrong_call() -> None:
    guesses = "\n".join(ONE.replace('"b": 2', f'"b": {b}') for b in range(20))
    wrong = ONE.replace('"a": 1', '"a": 7').replace('"b": 2', '"b": 7')
    assert rewards(TRUTH.replace(ONE, wrong)) == (1.0, 0.0)
    assert rewards(TRUTH.replace(ONE, guesses))[1] < -2
    assert rewards(TRUTH.replace(ONE, f"{ONE}\n{wrong}"))[1] < 3


def test_true_is_not_1() -> None:
    assert rewards(TRUTH.replace('"a": 1', '"a": true'))[1] == pytest.approx(6 * 3 / 4 - 3)
    listed = TRUTH.replace('"a": 1', '"a": [1, {"x": 0}]')
    assert rewards(listed.replace('"x": 0', '"x": false'), listed)[1] < 3
    assert rewards(TRUTH.replace('"a": 1', '"a": 1.0')) == (1.0, 3.0)


def test_no_call_and_invalid_calls_get_the_lowest_reward() -> None:
    for text in ("hello", "<tool_call>\nnot json\n</tool_call>", "<tool_call>\n[1]\n</tool_call>"):
        assert rewards(text) == (0.0, -3.0)


def test_a_partly_right_call_gets_a_part_of_the_reward() -> None:
    # Of 1 (names) + 1 + 2 (parameters): names 1, parameter names 1, one value.
    near = TRUTH.replace('"b": 2', '"b": 3')
    assert rewards(near) == (1.0, pytest.approx(6 * 3 / 4 - 3))
    # Another tool: no name is shared, nothing is compared.
    assert rewards(TRUTH.replace("add", "sub")) == (1.0, -3.0)


def test_without_calls_only_the_format_is_rewarded() -> None:
    truth = "<think>t</think>\n<response>yes</response>"
    assert rewards("<think>a</think>\n<response>no</response>", truth) == (1.0, 0.0)
    assert rewards("<think>a</think>\n<response>no</response><response>", truth) == (0.0, 0.0)
    both = f"{TRUTH}\n<response>done</response>"
    assert rewards(both, both) == (1.0, 3.0)


def test_an_invalid_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match="ground truth cannot be read"):
        rewards("x", "<tool_call>\nno\n</tool_call>")
