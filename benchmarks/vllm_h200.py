"""`python -m benchmarks.vllm_h200`: GRPO steps with `rollout.name=vllm` beside `native`, on one GPU.

Trainer and vLLM share the GPU: vLLM sleeps at level 2 while the trainer computes, and its weights come by
CUDA IPC when it wakes. Stages run in the order of `STAGES`, each under a limit of its own; what was measured
is written after each. `--rehearse` runs all of them tiny, on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import facts
from benchmarks.gpu_models import SEVEN, SMALL, Shape, save
from benchmarks.gpu_train import REWARD, write_prompts

RESULTS = Path(__file__).parent / "results" / "vllm_h200.json"
SMOKE = Shape("tiny", 400, 256, 2, 4, 2, 512)
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{block}" for block in ("actor", "rollout", "model"))


@dataclass(frozen=True)
class Stage:
    """One run of `main_ppo`."""

    name: str
    shape: Shape
    engine: str
    prompts: int
    samples: int
    response: int
    steps: int
    """The first is not counted."""
    limit_s: float
    keys: tuple[str, ...] = ()


_SMALL: dict[str, Any] = {"prompts": 64, "samples": 8, "response": 512, "steps": 4}
_LARGE: dict[str, Any] = {
    "prompts": 32,
    "samples": 8,
    "response": 512,
    "steps": 3,
    "keys": (
        f"{MODEL}.lora_rank=16",
        f"{MODEL}.lora_alpha=32",
        f"{MODEL}.enable_gradient_checkpointing=true",
        f"{ACTOR}.optim.lr=1e-5",
    ),
}
STAGES = (
    Stage("smoke", SMOKE, "vllm", 4, 4, 20, 3, 120, (f"{ROLLOUT}.enforce_eager=true",)),
    Stage("0.5b vllm", SMALL, "vllm", limit_s=200, **_SMALL),
    Stage("7b lora vllm", SEVEN, "vllm", limit_s=240, **_LARGE),
    Stage("0.5b native", SMALL, "native", limit_s=100, **_SMALL),
    Stage("7b lora native", SEVEN, "native", limit_s=150, **_LARGE),
)


def main(arguments: argparse.Namespace) -> bool:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    end = time.monotonic() + arguments.limit
    stages = [s for s in STAGES if not arguments.stages or s.name in arguments.stages.split(",")]
    out: Path = arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = facts(device) | {"stages": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for stage in stages:
            limit = min(stage.limit_s, end - time.monotonic())
            shape = SMOKE if arguments.rehearse else stage.shape
            model = Path(scratch) / shape.name
            if not model.exists():
                _in_another_process(shape, model, device)
            measured = _run(stage, model, arguments, limit, out.parent)
            result["stages"][stage.name] = measured
            result["vllm"] = measured.get("vllm_version", result.get("vllm"))
            out.write_text(json.dumps(result, indent=1) + "\n")
            print(stage.name, json.dumps(measured), flush=True)
    return all("error" not in measured for measured in result["stages"].values())


def _in_another_process(shape: Shape, folder: Path, device: torch.device) -> None:
    """Writes the model; its memory on the GPU goes with the process."""
    work = multiprocessing.get_context("spawn").Process(target=save, args=(shape, folder, device))
    work.start()
    work.join()
    if work.exitcode != 0:
        raise RuntimeError(f"{shape.name} could not be written")


def _run(
    stage: Stage, model: Path, arguments: argparse.Namespace, limit_s: float, logs: Path
) -> dict[str, Any]:
    folder = model.parent / stage.name.replace(" ", "_")
    folder.mkdir()
    rows = stage.prompts * (stage.steps + 1)
    write_prompts(folder / "train.parquet", 16 if arguments.rehearse else rows, arguments.rehearse)
    (folder / "score.py").write_text(REWARD)
    command = [sys.executable, "-m", "hone.trainer.main_ppo"]
    command += _keys(stage, model, folder, arguments)
    log = logs / f"{folder.name}.log"
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "HONE_LOGGING_LEVEL": "INFO"}
    began = time.monotonic()
    with log.open("w") as file, _Watch(log.with_suffix(".vllm")) as watch:
        run = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status: int | str = run.wait(max(limit_s, 1))
        except subprocess.TimeoutExpired:
            status = f"ended after {limit_s:.0f} s"
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
    measured = _summary(folder / "run" / "metrics.jsonl", log.read_text())
    measured |= {"device_peak_gib": watch.peak_gib, "wall_s": round(time.monotonic() - began, 1)}
    if status != 0:
        measured["error"] = f"{status}: {log.read_text()[-1500:]}"
    return measured


class _Watch:
    """Samples the memory in use on the GPU, and copies vLLM's log, which goes with its process."""

    def __init__(self, copy: Path) -> None:
        self._copy, self._ended = copy, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peak_gib = 0.0

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        has_gpu = shutil.which("nvidia-smi") is not None
        while not self._ended.wait(0.25):
            if has_gpu:
                used = subprocess.run(query, capture_output=True, text=True).stdout.split()
                self.peak_gib = max([self.peak_gib, *(float(x) / 1024 for x in used[:1])])
            for log in Path("/dev/shm").glob("hone-vllm-*/log"):
                try:
                    shutil.copyfile(log, self._copy)
                except OSError:
                    continue


def _keys(stage: Stage, model: Path, folder: Path, arguments: argparse.Namespace) -> list[str]:
    prompts, samples, response = (stage.prompts, stage.samples, stage.response)
    if arguments.rehearse:
        prompts, samples, response = 3, 4, 20
    keys = [
        f"{MODEL}.path={model}",
        f"data.train_files={folder / 'train.parquet'}",
        "data.val_files=[]",
        f"data.train_batch_size={prompts}",
        "data.max_prompt_length=136",
        f"data.max_response_length={response}",
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.name={stage.engine}",
        f"{ROLLOUT}.n={samples}",
        f"{ROLLOUT}.ignore_eos=true",
        f"{ROLLOUT}.max_num_seqs={prompts * samples}",
        f"{ROLLOUT}.max_num_batched_tokens=16384",
        f"{ROLLOUT}.gpu_memory_utilization=0.4",
        f"{ACTOR}.ppo_mini_batch_size={prompts}",
        f"{ACTOR}.ppo_max_token_len_per_gpu=16384",
        f"{ACTOR}.use_dynamic_bsz=true",
        f"custom_reward_function.path={folder / 'score.py'}",
        f"trainer.total_training_steps={stage.steps}",
        "trainer.val_before_train=false",
        "trainer.save_freq=0",
        "trainer.resume_mode=disable",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={folder / 'run'}",
        *stage.keys,
    ]
    if stage.engine == "vllm":
        keys.append(f"{ROLLOUT}.vllm.python={arguments.python}")
        keys.append(f"{ROLLOUT}.cudagraph_capture_sizes=[1,8,64,128,256,384,512]")
        # Every weight is published at the start; what vLLM makes up would show in the agreement.
        keys.append(f"+{ROLLOUT}.engine_kwargs.vllm.load_format=dummy")
    return keys


def _summary(path: Path, log: str) -> dict[str, Any]:
    """Medians over the steps after the first; maxima over all."""
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [m for m in (line.get("data", line) for line in lines) if "timing_s/step" in m]

    def median(key: str) -> float | None:
        values = [float(m[key]) for m in steps[1:] if key in m]
        return round(statistics.median(values), 4) if values else None

    names = {"step": "step", "generation": "gen", "publish": "update_weights"}
    names |= {"update": "update_actor", "old_log_prob": "old_log_prob"}
    measured: dict[str, Any] = {
        "steps": [round(m["timing_s/step"], 3) for m in steps],
        **{f"{name}_s": median(f"timing_s/{key}") for name, key in names.items()},
        "log_prob_abs_diff_mean": median("rollout_corr/log_prob_abs_diff_mean"),
    }
    for name, key in (
        ("log_prob_abs_diff_max", "rollout_corr/log_prob_abs_diff_max"),
        ("trainer_peak_gib", "perf/max_memory_allocated_gb"),
    ):
        measured[name] = max((m[key] for m in steps if key in m), default=None)
    if ready := re.search(r"vLLM (\S+) is ready after (\d+) s", log):
        measured |= {"vllm_version": ready[1], "start_s": int(ready[2])}
    pattern = r"level (\d) after (\S+) s: the GPU has (\S+) of (\S+) GiB"
    if slept := re.findall(pattern, log):
        level, seconds, after, before = slept[-1]
        measured["sleep"] = {
            "level": int(level),
            "seconds": float(seconds),
            "gib_before": float(before),
            "gib_after": float(after),
        }
    return measured


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="has vLLM")
    parser.add_argument("--stages", help="some of: " + ", ".join(s.name for s in STAGES))
    parser.add_argument("--limit", type=float, default=900.0, help="seconds in all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rehearse", action="store_true")
    sys.exit(0 if main(parser.parse_args()) else 1)
