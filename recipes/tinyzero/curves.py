"""The runs of a reproduction as one small JSON file and one picture.

Usage: python recipes/tinyzero/curves.py RUNS OUT (writes OUT.json and, with matplotlib, OUT.png)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from hone.tracking import atomic_path, atomic_write_text, read_metrics

ACCURACY = "val-core/countdown/acc/mean@1"
KEPT = {
    "accuracy": "accuracy",
    "response_length": "response_length/mean",
    "score": "critic/score/mean",
    "entropy": "actor/entropy",
    "tokens": "perf/total_num_tokens",
    "seconds": "timing_s/step",
}
COLORS = {"ppo": "#c2553a", "grpo": "#2f6f9f"}
NAMES = {"ppo": "PPO", "grpo": "GRPO"}


def run_of(folder: Path) -> dict[str, Any]:
    """The held-out accuracy by step, what training saw by step, and the sums."""
    lines = read_metrics(folder / "metrics.jsonl")
    algorithm, _, seed = folder.name.rpartition("-")
    held_out = [[line["step"], round(line[ACCURACY], 4)] for line in lines if ACCURACY in line]
    steps = [line for line in lines if line["step"] > 0]
    first, last = held_out[0][1], held_out[-1][1]
    return {
        "algorithm": algorithm,
        "seed": int(seed),
        "held_out_accuracy": held_out,
        "points_gained": round(100 * (last - first), 1),
        "steps": len(steps),
        "seconds": round(sum(line["timing_s/step"] for line in steps), 1),
        "tokens": int(sum(line["perf/total_num_tokens"] for line in steps)),
        "by_step": {
            name: [round(float(line.get(key, 0.0)), 4) for line in steps]
            for name, key in KEPT.items()
        },
    }


def sft_of(folder: Path) -> dict[str, Any]:
    lines = read_metrics(folder / "metrics.jsonl")
    return {
        "steps": len(lines),
        "seconds": round(sum(line["timing_s/step"] for line in lines), 1),
        "tokens": int(sum(line["train/global_tokens"] for line in lines)),
        "last_loss": round(lines[-1]["train/loss"], 4),
    }


def collect(folder: Path) -> dict[str, Any]:
    found = sorted(p.parent for p in folder.glob("*-[0-9]*/metrics.jsonl"))
    return {"sft": sft_of(folder / "sft"), "runs": [run_of(run) for run in found]}


def table(measured: dict[str, Any]) -> str:
    """A line a run, in Markdown."""
    lines = [
        "| run | before | after | points | response tokens, first → last | seconds | tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in measured["runs"]:
        accuracy, length = run["held_out_accuracy"], run["by_step"]["response_length"]
        lines.append(
            f"| {NAMES[run['algorithm']]}, seed {run['seed']} | {accuracy[0][1]:.1%} | "
            f"{accuracy[-1][1]:.1%} | +{run['points_gained']:.1f} | {length[0]:.0f} → "
            f"{statistics.mean(length[-5:]):.0f} | {run['seconds']:.0f} | {run['tokens'] / 1e6:.1f}M |"
        )
    return "\n".join(lines)


def draw(measured: dict[str, Any], out: Path) -> None:
    """Accuracy, held out and in training, and length over the steps; thick lines are means of seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.4, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    held, train, length = figure.subplots(1, 3)
    for algorithm, color in COLORS.items():
        runs = [run for run in measured["runs"] if run["algorithm"] == algorithm]
        if not runs:
            continue
        name, steps = NAMES[algorithm], [step for step, _ in runs[0]["held_out_accuracy"]]
        held_out = [[100 * y for _, y in run["held_out_accuracy"]] for run in runs]
        _curves(held, steps, held_out, color, name, marker="o")
        every = list(range(1, runs[0]["steps"] + 1))
        sampled = [[100 * y for y in run["by_step"]["accuracy"]] for run in runs]
        _curves(train, every, sampled, color, name)
        _curves(length, every, [run["by_step"]["response_length"] for run in runs], color, name)
    held.set_title("right on held-out problems, greedy (%)", fontsize=10, loc="left")
    train.set_title("right in training, sampled (%)", fontsize=10, loc="left")
    length.set_title("tokens a response, in training", fontsize=10, loc="left")
    for panel in (held, train):
        panel.set_ylim(0, 70)
    length.set_ylim(bottom=0)
    held.legend(frameon=False, loc="lower right")
    for panel in (held, train, length):
        panel.set_xlabel("step")
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    with atomic_path(out) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def _curves(
    panel: Any, steps: list[int], seeds: list[list[float]], color: str, label: str, marker: str = ""
) -> None:
    mean = [statistics.mean(values) for values in zip(*seeds, strict=True)]
    for values in seeds:
        panel.plot(steps, values, color=color, alpha=0.35, linewidth=0.9)
    panel.plot(steps, mean, color=color, linewidth=2.0, label=label, marker=marker, markersize=3.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    chosen = parser.parse_args()
    measured = collect(chosen.runs)
    atomic_write_text(chosen.out.with_suffix(".json"), json.dumps(measured) + "\n")
    sys.stdout.write(table(measured) + "\n")
    try:
        draw(measured, chosen.out.with_suffix(".png"))
    except ModuleNotFoundError as missing:
        sys.stdout.write(f"no picture: {missing}; pip install matplotlib\n")


if __name__ == "__main__":
    main()
