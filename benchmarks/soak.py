"""`make soak`: memory over 2,000 tiny steps of real runs, with and without checkpoints.

Each run is `python -m hone.trainer.main_ppo` in a process of its own (GRPO, local, CPU). Its resident
memory is sampled twice a second and placed at the step that metrics.jsonl had reached. The criterion: a
straight line through the last three quarters of the steps rises by no more than `MOST_MB_PER_1000_STEPS`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "soak.json"
STEPS = 2000
WARM_UP_SHARE = 0.25
"""Steps at the beginning that do not count: caches and the allocator's arenas fill."""
MOST_MB_PER_1000_STEPS = 10.0
SAMPLE_S = 0.5
KEPT_SAMPLES = 40
RUNS = {
    "without_saves": ["trainer.save_freq=0"],
    "with_saves": ["trainer.save_freq=100", "trainer.max_actor_ckpt_to_keep=2"],
}
ALPHABET = "0123456789+=: \n"


def main(steps: int = STEPS) -> dict[str, Any]:
    """Both runs, one after the other; ends where one of them fails."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base = _task(folder, steps)
        for name, more in RUNS.items():
            samples = _sampled(folder / name, [*base, *more])
            results[name] = _summary(samples, steps)
            RESULTS.write_text(json.dumps(results) + "\n")
            shown = {key: value for key, value in results[name].items() if key != "samples"}
            print(f"{name}: {json.dumps(shown)}", flush=True)
    return results


def _task(folder: Path, steps: int) -> list[str]:
    from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm

    tokenizer = character_tokenizer(ALPHABET)
    model = save_pretrained(tiny_lm(len(tokenizer), hidden=32), tokenizer, folder / "model")
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": f"{n}+1=",
            "reward_model": {"style": "rule", "ground_truth": n + 1},
        }
        for n in range(64)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder / 'rows.jsonl'}",
        "data.val_files=[]",
        "data.prompt_format=raw",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=6",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.n=2",
        f"trainer.total_training_steps={steps}",
        "trainer.logger=[jsonl]",
        "trainer.device=cpu",
    ]


def _sampled(run: Path, overrides: list[str]) -> list[tuple[int, float]]:
    """(step, resident MB) while the run lasts."""
    command = [sys.executable, "-m", "hone.trainer.main_ppo", *overrides]
    command += [f"trainer.default_local_dir={run}", f"trainer.rollout_data_dir={run}/rollouts"]
    samples: list[tuple[int, float]] = []
    log = run.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        while process.poll() is None:
            step, resident_mb = _step(run / "metrics.jsonl"), _resident_mb(process.pid)
            if step and resident_mb:
                samples.append((step, resident_mb))
            time.sleep(SAMPLE_S)
    if process.returncode != 0:
        sys.exit(f"{run.name} ended with code {process.returncode}:\n{log.read_text()[-2000:]}")
    return samples


def _step(metrics: Path) -> int:
    """The step of the last whole line."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
        lines = file.read().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if len(lines) > 1 else 0


def _resident_mb(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _summary(samples: list[tuple[int, float]], steps: int) -> dict[str, Any]:
    counted = np.array([s for s in samples if s[0] >= WARM_UP_SHARE * steps])
    slope = float(np.polyfit(counted[:, 0], counted[:, 1], 1)[0]) * 1000
    stride = max(1, len(samples) // KEPT_SAMPLES)
    return {
        "steps": steps,
        "mb_per_1000_steps": round(slope, 2),
        "most_mb_per_1000_steps": MOST_MB_PER_1000_STEPS,
        "flat": slope <= MOST_MB_PER_1000_STEPS,
        "first_mb": round(samples[0][1], 1),
        "last_mb": round(samples[-1][1], 1),
        "samples": [[step, round(mb, 1)] for step, mb in samples[::stride]],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    found = main(parser.parse_args().steps)
    sys.exit(0 if all(run["flat"] for run in found.values()) else 1)
