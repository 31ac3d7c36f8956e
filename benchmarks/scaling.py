"""A model of the time of a GRPO step on 8 to 512 GPUs, computed from parts that were measured.

    python -m benchmarks.scaling measure    bytes and driver's CPU time per row, on this machine
    python -m benchmarks.scaling            the table of docs/scaling.md, and results/scaling.json

Nothing here ran on more than one GPU. Speeds of one H200 are read from results/h200.json and
results/wall_h200.json; what was not measured is a line of `ASSUMED`.
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PARTS, TABLE = RESULTS / "scaling_parts.json", RESULTS / "scaling.json"
GPUS = (8, 16, 32, 64, 128, 256, 512)
ASSUMED = {
    "network_bytes_per_s": 50e9,  # one 400 Gb/s adapter per GPU
    "driver_network_bytes_per_s": 12.5e9,  # 100 Gb/s for the machine of the trainer's process
    "object_store_bytes_per_s": 4e9,  # copy into shared memory by one process
}
PROMPT, RESPONSE, LONGEST = 512, 1024, 4096
"""Tokens: of every prompt, of a response on average, of the longest."""
FIXED_ROWS, ROWS_PER_GPU = 8192, 128
MINI_BATCHES = 4


@dataclass(frozen=True)
class Step:
    """Seconds of one step's parts on a number of GPUs."""

    gpus: int
    rows: int
    generation: float
    stragglers: float
    """What the longest response takes beyond the others' end."""
    log_probs: float
    update: float
    exposed_communication: float
    publish: float
    scoring: float
    driver: float
    transfer: float

    @property
    def total(self) -> float:
        return sum(v for k, v in asdict(self).items() if k not in ("gpus", "rows"))

    @property
    def bottleneck(self) -> str:
        """The largest part that more GPUs do not shorten."""
        fixed = ("stragglers", "exposed_communication", "publish", "scoring", "driver", "transfer")
        parts = asdict(self)
        return max(fixed, key=lambda name: parts[name]).replace("_", " ")


def step(gpus: int, rows: int, h200: dict[str, Any], parts: dict[str, Any]) -> Step:
    """The 1.5B shape with rollout in the trainer's processes and no reference model."""
    one = h200["second_shape"]
    weights = 2.0 * one["parameters"]
    tokens = rows * (PROMPT + RESPONSE) / gpus
    generated = rows * RESPONSE / gpus / one["generate_512x256"]["hone_tokens_per_s"]
    longest = LONGEST * one["decode"]["step_ms"] / 1e3
    training = tokens / one["update"]["tokens_per_s"]
    # FSDP gathers parameters twice and scatters gradients once per optimizer step, behind the compute.
    gathers = MINI_BATCHES * 3 * weights * (gpus - 1) / gpus / ASSUMED["network_bytes_per_s"]
    grpo = one["grpo_step"]["parts_s"]
    carried = rows * (parts["bytes_per_row"] + parts["bytes_per_token"] * (PROMPT + LONGEST))
    by_network = carried / ASSUMED["driver_network_bytes_per_s"]
    return Step(
        gpus=gpus,
        rows=rows,
        generation=generated,
        stragglers=max(0.0, longest - generated),
        log_probs=training / 3,
        update=training,
        exposed_communication=max(0.0, gathers - training),
        publish=weights * (gpus - 1) / gpus / ASSUMED["network_bytes_per_s"],
        scoring=rows * grpo["reward"] / 512,
        driver=rows * parts["driver_cpu_s_per_row"],
        transfer=by_network + carried / ASSUMED["object_store_bytes_per_s"],
    )


def table(steps: list[Step]) -> str:
    """The rows of a page's table."""
    lines = [
        "| GPUs | rows | generation | waits for the longest | log-probs | update | communication | publish "
        "| scoring | driver | transfer | step | efficiency | largest fixed part |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    first = steps[0]
    for s in steps:
        speed = (s.rows / s.total / s.gpus) / (first.rows / first.total / first.gpus)
        numbers = [s.generation, s.stragglers, s.log_probs, s.update, s.exposed_communication]
        numbers += [s.publish, s.scoring, s.driver, s.transfer, s.total]
        cells = " | ".join(f"{number:.2f}" for number in numbers)
        lines.append(f"| {s.gpus} | {s.rows:,} | {cells} | {speed:.0%} | {s.bottleneck} |")
    return "\n".join(lines)


def steps_of(fixed: bool) -> list[Step]:
    h200, parts = json.loads((RESULTS / "h200.json").read_text()), json.loads(PARTS.read_text())
    return [step(n, FIXED_ROWS if fixed else ROWS_PER_GPU * n, h200, parts) for n in GPUS]


def measure() -> dict[str, float]:
    """Bytes of a real step per row and token; CPU seconds of the trainer's process per row."""
    from tests.trainer.runs import Run, make_task

    carried = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = make_task(folder)
        for length in (64, 512):
            run = Run(folder / str(length)).train(
                task.overrides(
                    folder / str(length),
                    f"data.max_response_length={length}",
                    "actor_rollout_ref.rollout.ignore_eos=true",
                )
            )
            line = run.steps[-1]
            rows = 8
            carried[length] = (line["traffic/step_bytes"] - line["traffic/weights_bytes"]) / rows
    per_token = (carried[512] - carried[64]) / (512 - 64)
    return {
        "bytes_per_token": round(per_token, 2),
        "bytes_per_row": round(carried[64] - 64 * per_token, 1),
        "driver_cpu_s_per_row": round(_driver_cpu(), 7),
        "rows": 2048,
        "tokens_per_row": PROMPT + RESPONSE,
        "ranks": 64,
    }


def _driver_cpu(rows: int = 2048, ranks: int = 64) -> float:
    """CPU seconds per row to split a batch over 64 ranks, pickle, unpickle and join it, twice."""
    import numpy as np
    import torch

    from hone.controller.dispatch import payload_bytes
    from hone.protocol import DataProto
    from hone.protocol.padding import split_padded

    whole, response = (rows, PROMPT + RESPONSE), (rows, RESPONSE)
    columns = {name: torch.zeros(whole, dtype=torch.long) for name in ("ids", "mask", "places")}
    columns |= {name: torch.zeros(response) for name in ("old", "scores", "advantages")}
    facts = [{"index": i, "answer": str(i), "text": "x" * 200} for i in range(rows)]
    batch = DataProto.from_dict(columns, {"extra_info": np.array(facts, dtype=object)})
    began = time.process_time()
    for _ in range(2):
        sent = []
        for part in split_padded(batch, ranks):
            payload_bytes(part)
            buffers: list[pickle.PickleBuffer] = []
            sent.append((pickle.dumps(part, protocol=5, buffer_callback=buffers.append), buffers))
        DataProto.concat([pickle.loads(text, buffers=list(views)) for text, views in sent])
    return (time.process_time() - began) / rows


def main() -> None:
    if sys.argv[1:] == ["measure"]:
        PARTS.write_text(json.dumps(measure(), indent=1) + "\n")
        return
    content: dict[str, Any] = {
        "computed": "from results/h200.json and results/scaling_parts.json; not measured on several GPUs",
        "assumed": ASSUMED,
    }
    for name, fixed in (("fixed_rows", True), ("rows_per_gpu", False)):
        steps = steps_of(fixed)
        content[name] = [
            {key: round(value, 4) for key, value in asdict(s).items()}
            | {"step": round(s.total, 4), "largest_fixed_part": s.bottleneck}
            for s in steps
        ]
        print(f"\n{name}\n\n{table(steps)}")
    TABLE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
