"""`python -m benchmarks.long_context`: one update on rows of 32,768 tokens, and the memory that it takes.

On CPUs: a small model with 1 rank and with 2 that share each sequence; the peak resident memory of a rank
above that before the update. On a GPU (`--device cuda`): the 0.5B shape on one rank, with and without
recomputed activations; peak memory, seconds and MFU. Results: benchmarks/results/long_context_*.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_models import SMALL, TINY, Shape, build, parameters
from benchmarks.gpu_timing import ceilings, median_s
from benchmarks.gpu_train import _rows
from hone.engine.build import build_engine
from hone.engine.engine import Engine
from hone.engine.mesh import mesh_for_rank
from hone.models.policy import PolicyModel
from hone.ops.rows import MicroBatchRule
from hone.verl.dialect import load_config
from hone.workers.actor import PolicyObjective

RESULTS = Path(__file__).parent / "results"
PROMPT = 64
CPU_SHAPE = replace(TINY, name="2 layers, width 64, MLP 512", mlp=512)
H200_FLOPS = 989e12
"""Dense bfloat16 operations per second in the data sheet."""


def engine_of(
    shape: Shape,
    device: torch.device,
    tokens: int,
    *,
    recompute: bool,
    rank: int = 0,
    ranks: int = 1,
) -> tuple[Engine, Any]:
    lm = build(shape, device)
    lm.config.max_position_embeddings = tokens
    if recompute:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    actor = load_config(["actor_rollout_ref.model.path=none", "data.train_files=none"])
    config = actor.actor_rollout_ref.actor
    rule = MicroBatchRule(1, tokens)
    engine = build_engine(
        PolicyModel(lm),
        optim=config.optim,
        grad_clip=1.0,
        fsdp=config.fsdp_config,
        train_micro_batch_rule=rule,
        infer_micro_batch_rule=rule,
        response_width=tokens - PROMPT,
        mesh=mesh_for_rank(rank, ranks, sequence=ranks),
    )
    return engine, PolicyObjective(config, temperature=1.0)


class PeakMemory:
    """The largest resident memory of this process inside the block, in bytes above that before it."""

    def __enter__(self) -> PeakMemory:
        self.before = self.peak = _resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, _resident())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def added(self) -> int:
        return self.peak - self.before


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure_rank(tokens: int, rank: int, world: int, folder: Path) -> dict[str, float]:
    """One update of one row on this rank, whose sequence all ranks share."""
    device = torch.device("cpu")
    engine, objective = engine_of(
        CPU_SHAPE, device, tokens, recompute=False, rank=rank, ranks=world
    )
    short, row = (_rows(1, PROMPT, n - PROMPT, CPU_SHAPE.vocabulary) for n in (128, tokens))
    engine.train_minibatch(short, objective)  # what every process allocates once
    with PeakMemory() as memory:
        metrics = engine.train_minibatch(row, objective)
    return {
        "update_mib": memory.added / 2**20,
        "process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "grad_norm": metrics["grad_norm"],
    }


def on_cpu(tokens: int, sizes: tuple[int, ...] = (1, 2)) -> dict[str, Any]:
    """The numbers of the rank with the largest memory, per number of ranks that share a sequence."""
    from tests.engine.ranks import spawn

    found: dict[str, Any] = {"shape": CPU_SHAPE.name, "tokens": tokens}
    for ranks in sizes:
        with tempfile.TemporaryDirectory() as name:
            scenario = {"rank": partial(measure_rank, tokens)}
            results = [r["rank"] for r in spawn(scenario, ranks, Path(name))]
        found[f"sp={ranks}"] = max(results, key=lambda r: r["update_mib"])
        print(ranks, found[f"sp={ranks}"], flush=True)
    return found


def on_gpu(shape: Shape, tokens: int, rows: int, device: torch.device) -> dict[str, Any]:
    """Updates of `rows` rows, one per forward."""
    limit = ceilings(device)["flops"]
    title = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    found: dict[str, Any] = {"device": title, "shape": shape.name, "tokens": tokens, "rows": rows}
    for recompute in (True, False):
        name = "recomputed activations" if recompute else "kept activations"
        engine, objective = engine_of(shape, device, tokens, recompute=recompute)
        batch = _rows(rows, PROMPT, tokens - PROMPT, shape.vocabulary)
        flops = 6 * parameters(engine.module) * rows * tokens
        flops += shape.attention_flops([tokens] * rows)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            seconds = median_s(partial(engine.train_minibatch, batch, objective), device, runs=3)
        except torch.OutOfMemoryError as error:
            found[name] = str(error)[:200]
            continue
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        found[name] = {
            "seconds": seconds,
            "tokens_per_s": rows * tokens / seconds,
            "peak_gib": peak / 2**30,
            "tflops": flops / seconds / 1e12,
            "mfu": flops / seconds / H200_FLOPS,
            "of_measured_product": flops / seconds / limit,
        }
        print(json.dumps(found), flush=True)
        del engine, objective
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--rows", type=int, default=4, help="rows per update on a GPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--one-rank", action="store_true", help="the GPU's measurement on any device"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script")
    options = parser.parse_args()
    device = torch.device(options.device)
    one_rank = options.one_rank or device.type == "cuda"
    if one_rank:
        shape = TINY if options.tiny else SMALL
        found = on_gpu(shape, options.tokens, options.rows, device)
    else:
        found = on_cpu(options.tokens)
    file = options.out / f"long_context_{'h200' if one_rank else 'cpu'}.json"
    file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
