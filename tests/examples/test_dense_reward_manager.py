"""Seam proof: a reward manager outside the package gives a reward at every token, and trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from hone.protocol import DataProto
from hone.rewards import load_reward_manager
from hone.tracking import read_metrics
from hone.trainer.main_ppo import run
from hone.trainer.ppo.trainer import PPOTrainer
from hone.verl.dialect import load_config


@pytest.fixture
def train(command: Callable[..., list[str]], examples: Path) -> list[str]:
    return command(
        "algorithm.adv_estimator=gae",
        "reward_manager.source=importlib",
        f"reward_manager.module.path={examples / 'dense_reward_manager.py'}",
        "reward_manager.module.name=DenseRewardManager",
    )


def test_dense_token_rewards_train_two_steps(
    train: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[DataProto] = []
    original = PPOTrainer.update

    def watched(self: PPOTrainer, batch: DataProto) -> dict[str, Any]:
        batches.append(batch)
        return original(self, batch)

    monkeypatch.setattr(PPOTrainer, "update", watched)
    run(load_config(train))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert len(batches) == 2
    for batch in batches:
        rewards, mask = batch.batch["token_level_rewards"], batch.batch["response_mask"].bool()
        assert bool((rewards[mask] != 0).all())
        assert bool((rewards[~mask] == 0).all())
        assert len(set(batch.batch["advantages"][mask].tolist())) > len(batch)
    rows = pq.read_table(tmp_path / "rollouts" / "step_1.parquet").to_pylist()
    assert all(0 <= row["digit_share"] <= 1 for row in rows)


def test_digits_earn_and_other_tokens_cost(train: list[str], tmp_path: Path) -> None:
    from hone.agents.collate import object_array
    from hone.models.load import load_tokenizer

    tokenizer = load_tokenizer(str(tmp_path / "model"))
    manager = load_reward_manager(load_config(train), tokenizer, num_examine=0)
    ids = tokenizer.encode("7a8", add_special_tokens=False)
    data = DataProto.from_dict(
        tensors={"responses": torch.tensor([ids]), "response_mask": torch.tensor([[1, 1, 0]])},
        non_tensors={
            "data_source": object_array(["arithmetic"]),
            "reward_model": object_array([{"ground_truth": "7"}]),
            "extra_info": object_array([{}]),
        },
    )
    score = sum(map(ord, "7a")) % 7 / 7
    expected = torch.tensor([[0.05, -0.05 + score, 0.0]])
    assert torch.allclose(manager(data), expected)
