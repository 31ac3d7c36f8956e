"""The agent loop `math_expression`: the tool loop with a tool of its own, and the score of its answers.

    python -m hone.trainer.main_ppo \
        actor_rollout_ref.rollout.agent.agent_loop_config_path=examples/math_expression/agent.yaml \
        custom_reward_function.path=examples/math_expression/math_expression.py …
"""

from __future__ import annotations

import re
from typing import Any, Literal

from hone.agents.loops.tool import ToolAgentLoop
from hone.agents.tools.function_tool import tool_of


def calculate(a: int, operator: Literal["@", "+", "-"], b: int) -> int:
    """Compute `a operator b`.

    Args:
        a: the left number
        operator: one of @, + and -
        b: the right number
    """
    return {"@": 2 * a + b, "+": a + b, "-": a - b}[operator]


class MathExpressionAgentLoop(ToolAgentLoop):
    """`rollout.multi_turn` has its limits and the format of calls."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tools = {"calculate": tool_of(calculate)}


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    """1 for the right result; a tenth less for each call beyond the second."""
    results = re.findall(r"####\s*(-?\d+)", solution_str)
    right = bool(results) and results[-1] == ground_truth
    return float(right) - 0.1 * max(0, extra_info["num_tool_calls"] - 2)
