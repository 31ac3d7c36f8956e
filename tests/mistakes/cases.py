"""What a mistake of a new user is: files, a command line, and words that the answer must have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROLLOUT = "actor_rollout_ref.rollout"
MULTI_TURN = f"{ROLLOUT}.multi_turn"
MODEL = "actor_rollout_ref.model.path"
TOOL_LOOP = f"{ROLLOUT}.agent.default_agent_loop=tool_agent"


@dataclass(frozen=True)
class Mistake:
    """Run in a folder that holds `model`, `rows.jsonl` (8 rows) and `reward.py`."""

    title: str
    command: list[str]
    words: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    arrange: Callable[[Path], None] | None = None
    code: int = 2
    """0: the program goes on, and says what is odd in a line."""
    loads_model: bool = False
    """Only the model itself can tell."""


def train(*overrides: str) -> list[str]:
    """A sound `hone train`, and what is wrong with it; the dry run stops before models load."""
    return [
        *("train", "--dry-run", f"{MODEL}=model", "data.train_files=rows.jsonl"),
        *("data.val_files=[]", "custom_reward_function.path=reward.py", "trainer.device=cpu"),
        *("data.train_batch_size=8", "data.max_prompt_length=64", "data.max_response_length=8"),
        *("trainer.total_training_steps=1", "trainer.default_local_dir=run"),
        *overrides,
    ]


def row(number: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "data_source": "my/own",
        "prompt": [{"role": "user", "content": f"{number}+1="}],
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        **changes,
    }


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(one) + "\n" for one in rows)


def eight(**changes: Any) -> str:
    return jsonl(*(row(i, **changes) for i in range(8)))


SCORER = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    "
FILES: dict[str, str] = {
    "rows.jsonl": eight(),
    "reward.py": SCORER + "return float(solution_str.strip() == ground_truth)\n",
}
