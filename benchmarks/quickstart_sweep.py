"""`python -m benchmarks.quickstart_sweep`: does `hone quickstart` learn on any CPU, with any seed?

The instructions that torch and its libraries may use are limited by environment variables: the last bits of
every product differ then, as they do between CPUs, and training amplifies them. Twelve runs by default.
Results are kept per CPU model. The criterion: every run ends above `LEAST` on the held-out sums.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "quickstart.json"
LEAST = 0.80
COLUMNS = ("seed", "torch", "libraries", "before", "after", "warm_up_s", "train_s")
SEEDS = (1, 2, 3)
TORCH = ("default", "avx2")
"""Values of ATEN_CPU_CAPABILITY: the kernels of torch itself."""
LIBRARIES = {"SSE41": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, "AVX2": {}}
"""Values of ONEDNN_MAX_CPU_ISA; the first with a limit for MKL, which computes the matrix products."""


def main(seeds: list[int], threads: int, together: int) -> float:
    """Every combination, `together` runs at a time, each kept as it ends; the worst accuracy."""
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(together) as pool:
        cases = product(TORCH, LIBRARIES, seeds)
        jobs = [pool.submit(_run, Path(scratch), threads, *case) for case in cases]
        for job in as_completed(jobs):
            runs.append(job.result())
            runs.sort(key=lambda run: (run["seed"], run["torch"], run["libraries"]))
            _keep({"machine": _machine(threads, together), "worst": _worst(runs), "runs": runs})
    print("| seed | torch | libraries | before | after | warm-up s | training s |")
    print("|---|---|---|---|---|---|---|")
    for run in runs:
        print("| " + " | ".join(str(run[name]) for name in COLUMNS) + " |")
    print(f"worst: {_worst(runs)} (must be above {LEAST})")
    return _worst(runs)


def _worst(runs: list[dict[str, Any]]) -> float:
    return min(run["after"] for run in runs)


def _run(scratch: Path, threads: int, torch: str, libraries: str, seed: int) -> dict[str, Any]:
    from hone.tracking import read_metrics
    from hone.trainer.quickstart import ACCURACY

    out = scratch / f"{seed}-{torch}-{libraries}"
    limits = {"ATEN_CPU_CAPABILITY": torch, "ONEDNN_MAX_CPU_ISA": libraries}
    limits |= LIBRARIES[libraries]
    command = [
        sys.executable,
        "-m",
        "hone.cli",
        "quickstart",
        "--seed",
        str(seed),
        "--out",
        str(out),
    ]
    command += ["trainer.device=cpu", f"trainer.num_threads={threads}"]
    environment = {**os.environ, **limits, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(
            f"{limits}, seed {seed}, ended with code {done.returncode}:\n{done.stderr[-2000:]}"
        )
    metrics = list(read_metrics(out / f"seed-{seed}" / "run" / "metrics.jsonl"))
    curve = [round(line[ACCURACY], 3) for line in metrics if ACCURACY in line]
    warm_up_s, train_s = _seconds(done.stdout)
    return {
        "seed": seed,
        "torch": torch,
        "libraries": libraries,
        "before": curve[0],
        "after": curve[-1],
        "warm_up_s": warm_up_s,
        "train_s": train_s,
        "curve": curve,
    }


def _seconds(output: str) -> tuple[int, int]:
    """The line of the quickstart's table: seconds of warm-up and of training."""
    line = next(line for line in output.splitlines() if "(warm-up)" in line)
    warm_up, train = (int(word) for word in line.split() if word.isdigit())
    return warm_up, train


def _machine(threads: int, together: int) -> dict[str, Any]:
    import torch
    import transformers

    return {
        "cpu": _cpu_model(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": threads,
        "runs_at_a_time": together,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next(
        (line.partition(":")[2].strip() for line in lines if "model name" in line), "unknown"
    )


def _keep(result: dict[str, Any]) -> None:
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept[result["machine"]["cpu"]] = result
    RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--threads", type=int, default=2, help="of each run")
    parser.add_argument("--together", type=int, default=1, help="runs at a time")
    chosen = parser.parse_args()
    sys.exit(0 if main(chosen.seeds, chosen.threads, chosen.together) > LEAST else 1)
