"""Training on one GPU: updates on packed rows, and whole GRPO steps through `main_ppo`."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_models import Shape, parameters, save
from benchmarks.gpu_timing import median_s
from hone.engine.build import build_engine
from hone.models.policy import PolicyModel
from hone.ops.rows import MicroBatchRule
from hone.protocol import DataProto
from hone.rollout.native.exact_decoder import ExactDecoder
from hone.verl.dialect import load_config
from hone.workers.actor import PolicyObjective

TOKENS_PER_FORWARD = {"qwen2.5-0.5b": 16384, "qwen2.5-1.5b": 8192}


def update(
    lm: Any, shape: Shape, device: torch.device, peak: float, small: bool, *, exact: bool = False
) -> dict[str, float]:
    """One optimizer step over rows of 131 + 256 tokens, in micro-batches by token budget."""
    rows, prompt, response = (4, 20, 30) if small else (256, 131, 256)
    config = load_config(["actor_rollout_ref.model.path=none", "data.train_files=none"])
    actor = config.actor_rollout_ref.actor
    budget = TOKENS_PER_FORWARD.get(shape.name, 128)
    rule = MicroBatchRule(None, budget)
    policy = PolicyModel(lm)
    engine = build_engine(
        policy,
        optim=actor.optim,
        grad_clip=1.0,
        fsdp=actor.fsdp_config,
        train_micro_batch_rule=rule,
        infer_micro_batch_rule=rule,
        response_width=response,
    )
    policy.exact = ExactDecoder(policy) if exact else None
    batch = _rows(rows, prompt, response, shape.vocabulary)
    objective = PolicyObjective(actor, temperature=1.0)
    print(f"  update {rows} rows x {prompt + response}, {budget} tokens a forward", flush=True)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = median_s(lambda: engine.train_minibatch(batch, objective), device)
    tokens = rows * (prompt + response)
    flops = 6 * parameters(lm) * tokens + shape.attention_flops([prompt + response] * rows)
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {
        "hone_s": seconds,
        "tokens_per_s": tokens / seconds,
        "mfu": flops / seconds / peak,
        "tflops": flops / seconds / 1e12,
        "peak_gib": peak_gib,
    }


def _rows(rows: int, prompt: int, response: int, vocabulary: int) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, vocabulary, (rows, prompt), generator=generator)
    responses = torch.randint(3, vocabulary, (rows, response), generator=generator)
    mask = torch.ones(rows, response, dtype=torch.int64)
    return DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "response_mask": mask,
            "attention_mask": torch.ones(rows, prompt + response, dtype=torch.int64),
            "input_ids": torch.cat([prompts, responses], 1),
            "advantages": torch.randn(rows, response, generator=generator),
            "rollout_log_probs": torch.full((rows, response), -11.9),
        }
    )


def grpo_step(
    shape: Shape, device: torch.device, steps: int, small: bool, *more: str
) -> dict[str, Any]:
    """Steps of `python -m hone.trainer.main_ppo`: 64 prompts × 8, prompt 131, 256 new tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save(shape, folder / "model", device)
        write_prompts(folder / "train.parquet", 12 if small else 64 * (steps + 1), small)
        (folder / "score.py").write_text(REWARD)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        command = [sys.executable, "-m", "hone.trainer.main_ppo"]
        command += [*_overrides(folder, model, shape, steps, small), *more]
        print("  " + " ".join(["python", *command[1:3], *more]), flush=True)
        done = subprocess.run(
            command, env=os.environ | {"PYTHONUNBUFFERED": "1"}, capture_output=True, text=True
        )
        print(done.stdout[-3000:], done.stderr[-3000:], flush=True)
        done.check_returncode()
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        logged = [json.loads(line) for line in lines]
    return _summary(logged)


def _summary(logged: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps after the first two (kernels compile, graphs are recorded), maxima over all."""
    flat = [entry.get("data", entry.get("metrics", entry)) for entry in logged]
    kept = [m for m in flat if "timing_s/step" in m][2:]

    def median(key: str) -> float:
        values = [float(m[key]) for m in kept if key in m]
        return statistics.median(values) if values else float("nan")

    parts = sorted({k for m in kept for k in m if k.startswith("timing_s/") and k.count("/") == 1})
    return {
        "hone_s": median("timing_s/step"),
        "mfu": median("perf/mfu"),
        "mbu": median("perf/mbu"),
        "peak_gib": max((m.get("perf/max_memory_allocated_gb", 0.0) for m in flat), default=0.0),
        "parts_s": {part.removeprefix("timing_s/"): median(part) for part in parts},
        "log_prob_abs_diff_mean": median("rollout_corr/log_prob_abs_diff_mean"),
        "log_prob_abs_diff_max": max(
            (m.get("rollout_corr/log_prob_abs_diff_max", 0.0) for m in flat), default=float("nan")
        ),
        "steps": len(kept),
    }


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 7)
"""


def write_prompts(path: Path, count: int, small: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    width = 15 if small else 126  # five more tokens come from the chat template
    rows = [
        {
            "data_source": "bench",
            "prompt": [{"role": "user", "content": f"{i:06d}".ljust(width, "x")}],
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": i},
        }
        for i in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def _overrides(folder: Path, model: Path, shape: Shape, steps: int, small: bool) -> list[str]:
    batch, samples, new = (3, 4, 20) if small else (64, 8, 256)
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.train_batch_size={batch}",
        "data.max_prompt_length=136",
        f"data.max_response_length={new}",
        "algorithm.adv_estimator=grpo",
        f"{rollout}.n={samples}",
        f"{rollout}.ignore_eos=true",
        f"{rollout}.max_num_seqs={batch * samples}",
        f"{rollout}.max_num_batched_tokens=16384",
        f"{actor}.ppo_mini_batch_size={batch}",
        f"{actor}.ppo_max_token_len_per_gpu={TOKENS_PER_FORWARD.get(shape.name, 4096)}",
        f"custom_reward_function.path={folder / 'score.py'}",
        f"trainer.total_training_steps={steps}",
        "data.val_files=[]",
        "trainer.val_before_train=false",
        "trainer.save_freq=0",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder / 'run'}",
    ]
