"""`main_ppo --config-name=ppo_megatron_trainer` under Ray: the rollout's log-probs are the trainer's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hone.models.tiny import character_tokenizer, tiny_lm

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 10
"""


def test_five_grpo_steps_on_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_lm(len(tokenizer), hidden=32, mlp=48, family="qwen3", seed=1).save_pretrained(
        tmp_path / "model"
    )
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i} + {i}"}],
            "reward_model": {"ground_truth": str(2 * i)},
            "extra_info": {"index": i},
        }
        for i in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "score.py").write_text(SCORE)
    settings = {
        "data.train_files": tmp_path / "train.parquet",
        "data.val_files": "[]",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 32,
        "data.max_response_length": 8,
        "actor_rollout_ref.model.path": tmp_path / "model",
        "actor_rollout_ref.model.external_lib": "tests.engine.megatron_on_cpu",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.rollout.n": 2,
        "algorithm.adv_estimator": "grpo",
        "custom_reward_function.path": tmp_path / "score.py",
        "trainer.controller": "ray",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 2,
        "trainer.total_training_steps": 5,
        "trainer.default_local_dir": tmp_path / "run",
        "trainer.save_freq": 5,
    }
    command = [sys.executable, "-m", "hone.trainer.main_ppo", "--config-name=ppo_megatron_trainer"]
    command += [f"{key}={value}" for key, value in settings.items()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [m for m in map(json.loads, lines) if "actor/grad_norm" in m]
    assert len(steps) == 5
    for metrics in steps:
        assert metrics["rollout_corr/log_prob_abs_diff_max"] < 1e-5
        assert metrics["actor/grad_norm"] > 0
    assert (tmp_path / "run" / "global_step_5" / "actor" / "huggingface" / "config.json").exists()
