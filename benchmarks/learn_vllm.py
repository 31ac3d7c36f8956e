"""`python -m benchmarks.learn_vllm`: does the quickstart's task learn through vLLM as through native?

Both runs start from the same base policy and seed; their draws differ. The criterion: both end above `LEAST`
on the held-out sums, and vLLM's log-probs agree with the trainer's in every step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "learn_vllm.json"
LEAST = 0.80
AGREEMENT = 1e-4
ROLLOUT = "actor_rollout_ref.rollout"


def main(python: str, seed: int, steps: int) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        engines = {
            "native": [],
            "vllm": [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.vllm.python={python}"],
        }
        runs = {
            name: _run(Path(scratch), name, keys, seed, steps) for name, keys in engines.items()
        }
    lines = [f' "{name}": {json.dumps(run)}' for name, run in {"seed": seed, **runs}.items()]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for name, run in runs.items():
        print(name, run)
    agrees = runs["vllm"]["log_prob_abs_diff_max"] <= AGREEMENT
    return agrees and all(run["accuracy"][-1] > LEAST for run in runs.values())


def _run(scratch: Path, name: str, keys: list[str], seed: int, steps: int) -> dict[str, Any]:
    from hone.tracking import read_metrics
    from hone.trainer.quickstart import ACCURACY

    command = [sys.executable, "-m", "hone.cli", "quickstart", "--seed", str(seed)]
    command += ["--out", str(scratch / name), f"trainer.total_training_steps={steps}", *keys]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    lines = list(read_metrics(scratch / name / f"seed-{seed}" / "run" / "metrics.jsonl"))
    validated = [line for line in lines if ACCURACY in line]
    trained = [line for line in lines if "reward/mean" in line]
    differences = [line.get("rollout_corr/log_prob_abs_diff_max", 0.0) for line in trained]
    return {
        "step": [line["step"] for line in validated],
        "accuracy": [round(line[ACCURACY], 3) for line in validated],
        "reward_mean": [round(line["reward/mean"], 3) for line in trained],
        "log_prob_abs_diff_max": max(differences),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="has vLLM")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    sys.exit(0 if main(options.python, options.seed, options.steps) else 1)
