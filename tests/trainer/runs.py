"""Runs of the trainer in this process or in one of their own, and what they leave behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from hone.tracking import read_metrics
from hone.verl.dialect import load_config

ALPHABET = "abcdefghijklmnopqrstuvwx0123456789+=: \n"
REWARDS = Path(__file__).with_name("rewards.py")
TIMINGS = ("timing_s/", "timing_per_token_ms/", "perf/time_per_step", "perf/throughput", "traffic/")
"""Metrics of a clock, and those of the layout: how many bytes which rank got."""


def task_row(index: int, number: int, **changes: Any) -> dict[str, Any]:
    return {
        "data_source": "lexical",
        "prompt": f"{number}+{index}=",
        "ability": "letters",
        "reward_model": {"style": "rule", "ground_truth": str(number + index)},
        "extra_info": {"index": index},
        **changes,
    }


def scored_text(row: Mapping[str, Any]) -> str:
    """The response of a rollout row as a score function sees it: without special tokens."""
    return re.sub("<pad>|<s>|</s>", "", row["response_text"])


@dataclass(frozen=True)
class Task:
    """Where the policy, the rows and the score functions lie."""

    model: Path
    train: Path
    test: Path
    rewards: Path

    def overrides(self, run: Path, *more: str) -> list[str]:
        """Two GRPO steps of 4 prompts × 2 responses; later overrides win."""
        return [
            "algorithm.adv_estimator=grpo",
            f"data.train_files={self.train}",
            "data.val_files=[]",
            "data.prompt_format=raw",
            "data.train_batch_size=4",
            "data.max_prompt_length=16",
            "data.max_response_length=6",
            f"actor_rollout_ref.model.path={self.model}",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "critic.optim.lr=1e-2",
            "actor_rollout_ref.rollout.n=2",
            f"custom_reward_function.path={self.rewards}",
            "trainer.total_training_steps=2",
            "trainer.save_freq=0",
            "trainer.logger=[jsonl]",
            "trainer.device=cpu",
            f"trainer.default_local_dir={run}",
            f"trainer.rollout_data_dir={run}/rollouts",
            *more,
        ]

    def validated(self) -> str:
        return f"data.val_files={self.test}"


def make_task(folder: Path) -> Task:
    """A random policy of two layers, 24 rows to train on and 6 held out."""
    from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm

    tokenizer = character_tokenizer(ALPHABET)
    lm = tiny_lm(len(tokenizer), hidden=32, layers=2, mlp=48, tie_embeddings=False, seed=3)
    model = save_pretrained(lm, tokenizer, folder / "model")
    files = {}
    for name, numbers in (("train", range(24)), ("test", range(100, 106))):
        files[name] = folder / f"{name}.jsonl"
        lines = [json.dumps(task_row(i, n)) for i, n in enumerate(numbers)]
        files[name].write_text("\n".join(lines) + "\n")
    return Task(model, files["train"], files["test"], REWARDS)


def make_mixture(folder: Path) -> Path:
    """A random mixture of experts of two layers with the tokenizer of the task."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.families.tiny import randomise, tiny_config
    from hone.models.tiny import character_tokenizer, save_pretrained

    tokenizer = character_tokenizer(ALPHABET)
    config = tiny_config("qwen3_moe")
    config.vocab_size = len(tokenizer)
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config)
    randomise(lm)
    return save_pretrained(lm, tokenizer, folder)


@dataclass(frozen=True)
class Run:
    """A run folder."""

    folder: Path

    def train(self, overrides: Sequence[str], **kwargs: Any) -> Run:
        from hone.trainer.main_ppo import run

        run(load_config(list(overrides)), **kwargs)
        return self

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of training steps."""
        return [line for line in self.metrics if "training/global_step" in line]

    @property
    def numbers(self) -> list[dict[str, Any]]:
        """The lines without what a clock measured, NaN written so that it equals itself."""
        return [untimed(line) for line in self.metrics]

    def series(self, name: str) -> list[float]:
        return [line[name] for line in self.steps]

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        return pq.read_table(self.folder / "rollouts" / f"step_{step}.parquet").to_pylist()

    def checkpoints(self) -> list[str]:
        return sorted(p.name for p in self.folder.glob("global_step_*"))

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"global_step_{step}"


def untimed(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: "nan" if value != value else value
        for name, value in line.items()
        if not name.startswith(TIMINGS)
    }


def start(overrides: Sequence[str], **environment: str) -> subprocess.Popen[str]:
    """The same program in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "hone.trainer.main_ppo", *overrides],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def opened(overrides: Sequence[str]) -> Iterator[Any]:
    """A trainer with its workers, before the first step: `trainer.step()` gives the batch."""
    from hone.models.load import load_tokenizer
    from hone.trainer.ppo.trainer import PPOTrainer

    config = load_config(list(overrides))
    trainer = PPOTrainer(config, load_tokenizer(config.actor_rollout_ref.model.path))
    trainer.init_workers()
    try:
        yield trainer
    finally:
        trainer.shutdown()
