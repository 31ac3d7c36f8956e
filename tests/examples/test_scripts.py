"""The shell scripts of examples/: their commands compose as written, and each starts with tiny paths."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hone.data.rows import write_parquet
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.trainer.command_line import check_plan, compose_arguments

from .conftest import EXAMPLES

SCRIPTS = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.sh"))
NAMED_BY_USERS = {
    "grpo_trainer/run_qwen2-7b.sh",
    "grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh",
    "sglang_multiturn/run_qwen2.5-3b_gsm8k_tool_agent_mlflow.sh",
}
TINY = [
    "data.train_batch_size=4",
    "data.max_prompt_length=900",
    "data.max_response_length=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.logger=console",
]


def started(script: str, folder: Path, *more: str, path: str) -> subprocess.CompletedProcess[str]:
    places = {"DATA": str(folder), "MODEL": str(folder / "model"), "HOME": str(folder)}
    return subprocess.run(
        ["bash", str(EXAMPLES / script), *more],
        env={**os.environ, **places, "PATH": f"{path}:{os.environ['PATH']}"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_scripts_that_users_know_by_name_are_here() -> None:
    assert set(SCRIPTS) >= NAMED_BY_USERS


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_composes_without_a_note(script: str, tmp_path: Path) -> None:
    stub = tmp_path / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    said = started(script, tmp_path, "data.seed=7", path=str(stub.parent))
    minus_m, program, *arguments = said.stdout.splitlines()
    assert (minus_m, program) == ("-m", "hone.trainer.main_ppo")
    composed = compose_arguments(
        arguments, schema="ppo_trainer", program=program, extra_checks=check_plan
    )
    assert composed.config.data.seed == 7
    assert not composed.notes


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_a_step_with_tiny_paths(script: str, tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    save_pretrained(tiny_lm(len(tokenizer), hidden=32, mlp=48), tokenizer, tmp_path / "model")
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{i} + 1 = ?"}],
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i},
        }
        for i in range(4)
    ]
    for split in ("train", "test"):
        write_parquet(rows, tmp_path / f"{split}.parquet")
    run = tmp_path / "run"
    said = started(
        script,
        tmp_path,
        *TINY,
        f"trainer.default_local_dir={run}",
        path=str(Path(sys.executable).parent),
    )
    assert said.returncode == 0, said.stderr
    assert (run / "global_step_1").is_dir()
