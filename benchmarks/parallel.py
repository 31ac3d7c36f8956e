"""`python -m benchmarks.parallel`: every layout of ranks against one rank, and the table of docs/parallel.md.

Rows are `tests.engine.layouts.LAYOUTS`. Parts, which can be run one by one: `updates` (one SGD step of every
case), `checkpoints` (one more update from the checkpoint of every layout, under another one), `grpo` (5
steps under Ray over recorded trajectories), `sampled` (5 steps under Ray with the native engine, compared up
to the first token that differs), `families` (rows split over 2 ranks, per family) and `table`. Results:
benchmarks/results/parallel.json.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hone.models.families import FAMILIES
from tests.engine.layouts import (
    BOUND,
    CASES,
    LAYOUTS,
    ONE,
    SAVED,
    Layout,
    build,
    cases_of,
    exported_weights,
    largest_difference,
    resume,
    run_cases,
    run_families,
    save,
    update,
    weight_differences,
    write_families,
    write_models,
)
from tests.engine.ranks import spawn
from tests.trainer.runs import Run, Task, make_task

RESULTS = Path(__file__).parent / "results" / "parallel.json"
PAGE = Path(__file__).parent.parent / "docs" / "parallel.md"
BEGIN, END = "<!-- table of benchmarks/parallel.py -->", "<!-- end of the table -->"
STEPS = 5
FSDP2 = sum(layout.strategy == "fsdp2" for layout in LAYOUTS)
DIFFERENCES = ("metrics", "grad_norm", "weights")
OF_THE_LAYOUT = ("timing_", "perf/", "traffic/", "global_seqlen/", "system/")
"""Metrics that may differ between layouts: clocks, memory, bytes, and rows per rank."""


Rows = Iterator[tuple[str, dict[str, Any]]]
"""A layout or a family, and its numbers; each is written when it is measured."""


def updates(layouts: list[Layout]) -> Rows:
    """The largest relative differences of one update, over the cases of a layout."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        expected = {n: update(build(ONE, c, folder, 0), c.objective()) for n, c in CASES.items()}
        for layout in layouts:
            cases = cases_of(layout, every=True)
            run = partial(run_cases, [layout], every=True)
            apart = [
                largest_difference(result["cases"][f"{layout} {case}"], expected[case])
                for result in spawn({"cases": run}, layout.ranks, folder)
                for case in cases
            ]
            yield str(layout), {"cases": len(cases), **_worst(apart)}


def checkpoints(layouts: list[Layout]) -> Rows:
    """One more update from the checkpoint of a layout, on one rank and under another one, and its export."""
    after = dict(zip(LAYOUTS, [*LAYOUTS[FSDP2:], *LAYOUTS[:FSDP2]], strict=True))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        case = CASES[SAVED]
        engine = build(ONE, case, folder, 0)
        exported = update(engine, case.objective()).weights
        expected = update(engine, case.objective())
        for world in (2, 4):
            spawn({str(x): partial(save, x) for x in layouts if x.ranks == world}, world, folder)
        found = resume([(x, ONE) for x in layouts], 0, 1, folder)
        for world in (2, 4):
            pairs = [(x, after[x]) for x in layouts if after[x].ranks == world]
            found |= spawn({"on": partial(resume, pairs)}, world, folder)[0]["on"]
        for layout in layouts:
            updates = [found[f"{layout} -> {x}"] for x in (ONE, after[layout])]
            worst = _worst([largest_difference(x, expected) for x in updates])
            export = max(weight_differences(exported_weights(folder, layout), exported))
            yield str(layout), {"resumed under": str(after[layout]), **worst, "export": export}


def _worst(differences: list[dict[str, float]]) -> dict[str, float]:
    return {key: max(x[key] for x in differences) for key in differences[0]}


def families(_: list[Layout]) -> Rows:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_families(sorted(FAMILIES), folder)
        found = spawn({"families": run_families}, 2, folder)[0]["families"]
    yield from ((name.removeprefix("family "), numbers) for name, numbers in found.items())


def runs(rollout: str, layouts: list[Layout]) -> Rows:
    """5 GRPO steps of every layout under Ray, against one process."""
    from hone.controller.ray_start import start_ray

    start_ray({"num_cpus": 4, "log_to_driver": False, "object_store_memory": 200_000_000})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = make_task(folder)
        one = _train(task, ONE, folder / "one", rollout)
        for number, layout in enumerate(layouts):
            run = _train(task, layout, folder / str(number), rollout)
            yield str(layout), _compared(run, one)


def _train(task: Task, layout: Layout, folder: Path, rollout: str) -> Run:
    actor = "actor_rollout_ref.actor"
    overrides = [
        f"actor_rollout_ref.rollout.name={rollout}",
        f"{actor}.use_kl_loss=true",
        f"{actor}.optim.optimizer=SGD",
        f"{actor}.optim.lr=0.1",
        f"{actor}.ppo_mini_batch_size=2",
        *_sizes(layout),
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.free_cache_engine=false",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.n_gpus_per_node={layout.ranks}",
        f"trainer.controller={'ray' if layout.ranks > 1 else 'local'}",
    ]
    return Run(folder).train(task.overrides(folder, *overrides))


def _sizes(layout: Layout) -> list[str]:
    """The keys of a layout; the reference follows."""
    actor = "actor_rollout_ref.actor"
    if layout.strategy == "megatron":
        return [
            f"{actor}.strategy=megatron",
            f"{actor}.megatron.tensor_model_parallel_size={layout.tensor}",
            f"{actor}.megatron.pipeline_model_parallel_size={layout.pipeline}",
            "actor_rollout_ref.model.external_lib=tests.engine.megatron_on_cpu",
        ]
    return [
        f"{actor}.ulysses_sequence_parallel_size={layout.sequence}",
        f"{actor}.fsdp_config.tensor_parallel_size={layout.tensor}",
    ]


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
        "| engine, data × sequence × tensor × pipeline | cases | one update: metrics | gradient norm "
        f"| weights | {STEPS} GRPO steps, recorded | {STEPS} GRPO steps, sampled "
        "| an update from its checkpoint, on one rank and under another layout | its export |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for layout in LAYOUTS:
        update, saved = (
            results.get(p, {}).get(str(layout), {}) for p in ("updates", "checkpoints")
        )
        cells = [str(update.get("cases", 0)), *(_number(update.get(key)) for key in DIFFERENCES)]
        cells += [_cell(results.get(part, {}).get(str(layout))) for part in ("grpo", "sampled")]
        worst = _number(max(saved[key] for key in DIFFERENCES) if saved else None)
        cells.append(f"{worst}, {saved['resumed under']}" if saved else worst)
        cells.append(_number(saved.get("export")))
        lines.append(" | ".join(["| " + str(layout), *cells]) + " |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "not run" if value is None else f"{value:.0e}"


def _cell(run: dict[str, Any] | None) -> str:
    if run is None:
        return "not run"
    if (place := run.get("first other token")) is None:
        return _number(run["metrics"])
    step, row, token = place
    return f"{run['metrics']:.0e} up to step {step}, where token {token} of row {row} differs"


PARTS: dict[str, Callable[[list[Layout]], Rows]] = {
    "updates": updates,
    "checkpoints": checkpoints,
    "families": families,
    "grpo": partial(runs, "tests.trainer.recorded:Recorded"),
    "sampled": partial(runs, "native"),
}


def read_results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"bound": BOUND}


def record(part: str, row: str, numbers: dict[str, Any]) -> None:
    """Adds a row to the results, so that an interruption loses none."""
    results = read_results()
    results.setdefault(part, {})[row] = numbers
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    print(part, row, numbers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "table", []], default=[])
    parser.add_argument("--only", default="", help="layouts whose name has this text")
    parser.add_argument("--missing", action="store_true", help="layouts without results")
    options = parser.parse_args()
    for part in options.parts or list(PARTS):
        known = read_results().get(part, {}) if options.missing else {}
        layouts = [x for x in LAYOUTS if options.only in str(x) and str(x) not in known]
        for row, numbers in PARTS[part](layouts) if part in PARTS and layouts else ():
            record(part, row, numbers)
    write_table(read_results())


if __name__ == "__main__":
    main()
