"""A tiny model, a few rows and the command to train on them, as a user would write it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(map(ord, solution_str)) % 7 / 7
"""


@pytest.fixture
def examples() -> Path:
    return EXAMPLES


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., list[str]]:
    """Overrides of a two-step run in `tmp_path`; more can be added."""
    tokenizer = character_tokenizer()
    lm = tiny_lm(len(tokenizer), hidden=32, mlp=64, max_positions=128)
    model = save_pretrained(lm, tokenizer, tmp_path / "model")
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": f"{i}+{i}=",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"index": i},
        }
        for i in range(8)
    ]
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    scorer = tmp_path / "score.py"
    scorer.write_text(SCORER)

    def overrides(*more: str) -> list[str]:
        return [
            f"data.train_files={data}",
            f"data.val_files={data}",
            "data.train_batch_size=4",
            "data.max_prompt_length=16",
            "data.max_response_length=40",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.rollout.n=4",
            f"custom_reward_function.path={scorer}",
            "trainer.total_training_steps=2",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            "trainer.save_freq=-1",
            "trainer.logger=[jsonl]",
            f"trainer.default_local_dir={tmp_path / 'run'}",
            f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
            *more,
        ]

    return overrides
