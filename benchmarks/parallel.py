"""`python -m benchmarks.parallel`: every layout of ranks against one rank, and the table of docs/parallel.md.

Rows are `tests.engine.layouts.LAYOUTS`. Parts, which can be run one by one: `updates` (one SGD step of every
case), `grpo` (5 steps under Ray over recorded trajectories), `sampled` (5 steps under Ray with the native
engine, compared up to the first token that differs), `families` (rows split over 2 ranks, per family) and
`table`. Results: benchmarks/results/parallel.json.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hone.models.families import FAMILIES
from tests.engine.layouts import (
    BOUND,
    CASES,
    LAYOUTS,
    ONE,
    Layout,
    build,
    cases_of,
    largest_difference,
    run_cases,
    run_families,
    update,
    write_families,
    write_models,
)
from tests.engine.ranks import spawn
from tests.trainer.runs import Run, Task, make_task

RESULTS = Path(__file__).parent / "results" / "parallel.json"
PAGE = Path(__file__).parent.parent / "docs" / "parallel.md"
BEGIN, END = "<!-- table of benchmarks/parallel.py -->", "<!-- end of the table -->"
STEPS = 5
OF_THE_LAYOUT = ("timing_", "perf/", "traffic/", "global_seqlen/", "system/")
"""Metrics that may differ between layouts: clocks, memory, bytes, and rows per rank."""


def updates() -> dict[str, Any]:
    """The largest relative differences of one update, per layout, over its cases."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        expected = {n: update(build(ONE, c, folder, 0), c.objective()) for n, c in CASES.items()}
        found = {}
        for world in sorted({layout.ranks for layout in LAYOUTS}):
            results = [r["cases"] for r in spawn({"cases": run_cases}, world, folder)]
            for layout in (x for x in LAYOUTS if x.ranks == world):
                apart = [
                    largest_difference(result[f"{layout} {case}"], expected[case])
                    for result in results
                    for case in cases_of(layout)
                ]
                worst = {key: max(a[key] for a in apart) for key in apart[0]}
                found[str(layout)] = {"cases": len(cases_of(layout)), **worst}
    return found


def families() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_families(sorted(FAMILIES), folder)
        found = spawn({"families": run_families}, 2, folder)[0]["families"]
    return {name.removeprefix("family "): numbers for name, numbers in found.items()}


def runs(rollout: str, found: dict[str, Any], only: str) -> Iterator[dict[str, Any]]:
    """5 GRPO steps of every layout under Ray, against one process; yields the results so far."""
    from hone.controller.ray_start import start_ray

    start_ray({"num_cpus": 4, "log_to_driver": False, "object_store_memory": 200_000_000})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = make_task(folder)
        one = _train(task, ONE, folder / "one", rollout)
        for number, layout in enumerate(x for x in LAYOUTS if only in str(x)):
            run = _train(task, layout, folder / str(number), rollout)
            found[str(layout)] = _compared(run, one)
            print(layout, found[str(layout)], flush=True)
            yield found


def _train(task: Task, layout: Layout, folder: Path, rollout: str) -> Run:
    actor = "actor_rollout_ref.actor"
    overrides = [
        f"actor_rollout_ref.rollout.name={rollout}",
        f"{actor}.use_kl_loss=true",
        f"{actor}.optim.optimizer=SGD",
        f"{actor}.optim.lr=0.1",
        f"{actor}.ppo_mini_batch_size=2",
        f"{actor}.strategy={layout.strategy}",
        f"{actor}.ulysses_sequence_parallel_size={layout.sequence}",
        f"{actor}.fsdp_config.tensor_parallel_size={layout.tensor}",
        f"actor_rollout_ref.ref.fsdp_config.tensor_parallel_size={layout.tensor}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.free_cache_engine=false",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.n_gpus_per_node={layout.ranks}",
        f"trainer.controller={'ray' if layout.ranks > 1 else 'local'}",
    ]
    return Run(folder).train(task.overrides(folder, *overrides))


def _compared(run: Run, one: Run) -> dict[str, Any]:
    """The largest relative difference of a metric over the steps whose tokens agree, and the first token
    that differs."""
    worst, name_of_worst = 0.0, ""
    for step, (there, here) in enumerate(zip(run.steps, one.steps, strict=True), start=1):
        if (token := _first_other_token(run.rollouts(step), one.rollouts(step))) is not None:
            return {"metrics": worst, "worst": name_of_worst, "first other token": (step, *token)}
        names = {n for n in here if not n.startswith(OF_THE_LAYOUT)}
        if missing := names ^ {n for n in there if not n.startswith(OF_THE_LAYOUT)}:
            raise SystemExit(f"step {step}: only one of the runs has {sorted(missing)}")
        for name in names:
            a, b = there[name], here[name]
            if math.isnan(a) and math.isnan(b):
                continue
            apart = abs(a - b) / max(abs(b), 1e-2)
            if apart > worst:
                worst, name_of_worst = apart, name
    return {"metrics": worst, "worst": name_of_worst, "steps": len(one.steps)}


def _first_other_token(there: list[Any], here: list[Any]) -> tuple[int, int] | None:
    """The row and the token at which the responses of a step differ first."""

    def tokens(rows: list[Any]) -> list[list[int]]:
        rows = sorted(rows, key=lambda r: (str(r["uid"]), r.get("sample_index") or 0))
        return [list(r["response_ids"]) for r in rows]

    for row, (a, b) in enumerate(zip(tokens(there), tokens(here), strict=True)):
        if a != b:
            pairs = zip(a, b, strict=False)
            return row, next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
    return None


def write_table(results: dict[str, Any]) -> None:
    """Replaces the generated part of docs/parallel.md."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{table(results)}\n{END}{tail}")


def table(results: dict[str, Any]) -> str:
    lines = [
        "| engine, data × sequence × tensor × pipeline | one update: metrics | gradient norm | weights "
        f"| {STEPS} GRPO steps, recorded | {STEPS} GRPO steps, sampled |",
        "|---|---|---|---|---|---|",
    ]
    for layout in LAYOUTS:
        cells = [f"{layout}"]
        one = results.get("updates", {}).get(str(layout))
        for key in ("metrics", "grad_norm", "weights"):
            cells.append(f"{one[key]:.0e}" if one else "not run")
        for part in ("grpo", "sampled"):
            cells.append(_cell(results.get(part, {}).get(str(layout))))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(run: dict[str, Any] | None) -> str:
    if run is None:
        return "not run"
    if (place := run.get("first other token")) is None:
        return f"{run['metrics']:.0e}"
    step, row, token = place
    return f"{run['metrics']:.0e} up to step {step}, where token {token} of row {row} differs"


PARTS: dict[str, Callable[[dict[str, Any], str], Iterable[dict[str, Any]]]] = {
    "updates": lambda *_: [updates()],
    "families": lambda *_: [families()],
    "grpo": partial(runs, "tests.trainer.recorded:Recorded"),
    "sampled": partial(runs, "native"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "table", []], default=[])
    parser.add_argument(
        "--only", default="", help="layouts whose name has this text, in GRPO steps"
    )
    options = parser.parse_args()
    parts = options.parts or list(PARTS)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"bound": BOUND}
    for part in parts:
        for found in PARTS[part](results.get(part, {}), options.only) if part in PARTS else ():
            results[part] = found
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    write_table(results)


if __name__ == "__main__":
    main()
