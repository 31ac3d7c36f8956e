"""One update of the 0.5B shape under strategy=megatron, on one rank, beside strategy=fsdp2: seconds and MFU.

`python -m benchmarks.megatron OUT.json`; without a GPU a tiny shape shows that the script runs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_models import SMALL, TINY, Shape, save
from benchmarks.gpu_timing import ceilings, median_s
from benchmarks.gpu_train import _rows
from hone.engine.build import build_strategy
from hone.engine.contract import EngineSpec
from hone.ops.rows import MicroBatchRule
from hone.verl.dialect import load_config
from hone.workers.actor import PolicyObjective


def measure(
    strategy: str, folder: Path, shape: Shape, device: torch.device, peak: float
) -> tuple[dict[str, float], torch.Tensor]:
    """Returns the times of one strategy, and the log-probs before its first update."""
    rows, prompt, response = (4, 20, 30) if shape is TINY else (256, 131, 256)
    config = load_config(["actor_rollout_ref.model.path=none", "data.train_files=none"])
    actor = config.actor_rollout_ref.actor
    rule = MicroBatchRule(None, 128 if shape is TINY else 16384)
    engine = build_strategy(
        strategy,
        EngineSpec(
            head="policy",
            model_path=str(folder),
            device=device,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            fsdp=actor.fsdp_config,
            train_micro_batch_rule=lambda slots: rule,
            infer_micro_batch_rule=lambda slots: rule,
            response_width=response,
            optim=actor.optim,
            grad_clip=1.0,
        ),
    )
    batch = _rows(rows, prompt, response, shape.vocabulary)
    log_probs = engine.infer(batch, temperature=1.0)["log_probs"]
    batch.batch["old_log_probs"] = log_probs
    objective = PolicyObjective(actor, temperature=1.0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    print(f"{strategy}: update of {rows} rows of {prompt + response} tokens", flush=True)
    first = engine.train_minibatch(batch, objective)
    seconds = median_s(lambda: engine.train_minibatch(batch, objective), device)
    infer_s = median_s(lambda: engine.infer(batch, temperature=1.0), device)
    tokens = rows * (prompt + response)
    flops = 6 * engine.model_facts.parameters * tokens
    flops += shape.attention_flops([prompt + response] * rows)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {
        "update_s": seconds,
        "infer_s": infer_s,
        "mfu": flops / seconds / peak,
        "tokens_per_s": tokens / seconds,
        "peak_gib": memory,
        "grad_norm_of_first_update": first["grad_norm"],
    }, log_probs


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = SMALL if device.type == "cuda" else TINY
    if device.type == "cpu":
        import tests.engine.megatron_on_cpu  # noqa: F401
    peak = ceilings(device)["flops"]
    results: dict[str, Any] = {"shape": shape.name, "measured_peak_flops": peak}
    log_probs = {}
    with tempfile.TemporaryDirectory() as name:
        folder = save(shape, Path(name) / "model", device)
        for strategy in ("fsdp2", "megatron"):
            results[strategy], log_probs[strategy] = measure(strategy, folder, shape, device, peak)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    difference = (log_probs["fsdp2"] - log_probs["megatron"]).abs()
    results["log_prob_difference"] = {
        "largest": difference.max().item(),
        "mean": difference.mean().item(),
    }
    results["megatron_over_fsdp2"] = results["megatron"]["update_s"] / results["fsdp2"]["update_s"]
    text = json.dumps(results, indent=1)
    print(text, flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
