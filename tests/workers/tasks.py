"""A tiny policy on disk, rows to generate from, and the configuration of a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hone.agents.collate import object_array
from hone.config import PPOTrainerConfig
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.protocol import DataProto
from hone.verl.dialect import load_config

RESPONSE = 6


def write_model(folder: Path, **shape: int) -> Path:
    tokenizer = character_tokenizer("abcdefgh0123456789+=")
    lm = tiny_lm(len(tokenizer), **{"hidden": 32, "mlp": 48, "seed": 3} | shape)
    with torch.no_grad():
        lm.model.embed_tokens.weight.mul_(5)  # the logits of a fresh model are nearly uniform
    return save_pretrained(lm, tokenizer, folder)


def config_of(model: Path, *overrides: str) -> PPOTrainerConfig:
    return load_config(
        [
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "critic.optim.lr=1e-2",
            "actor_rollout_ref.rollout.n=2",
            f"data.max_response_length={RESPONSE}",
            "data.max_prompt_length=8",
            "data.train_batch_size=4",
            "trainer.device=cpu",
            "algorithm.adv_estimator=gae",
            *overrides,
        ]
    )


def prompts(count: int = 4, samples: int = 2) -> DataProto:
    """Returns rows of different prompts, `samples` of each."""
    columns: dict[str, list[Any]] = {
        n: [] for n in ("uid", "sample_index", "trajectory_id", "prompt_ids")
    }
    for i in range(count):
        for j in range(samples):
            columns["uid"].append(f"row{i}")
            columns["sample_index"].append(j)
            columns["trajectory_id"].append(f"row{i}-{j}")
            columns["prompt_ids"].append([3 + i, 4, 5 + i][: 1 + i % 3])
    data = DataProto.from_dict(
        tensors={"place": torch.arange(count * samples)},
        non_tensors={name: object_array(values) for name, values in columns.items()},
    )
    data.meta_info["sampling_params"] = {"temperature": 0.9}
    return data


def with_advantages(batch: DataProto, temperature: float = 0.9) -> DataProto:
    """Adds the columns that the driver computes before an update."""
    shape = batch.batch["responses"].shape
    random = torch.Generator().manual_seed(1)
    for name in ("advantages", "values", "returns"):
        batch.batch[name] = torch.randn(shape, generator=random)
    batch.meta_info["temperature"] = temperature
    return batch
