"""The runs of run.sh as one JSON file, a picture and a table: accuracy on the test problems, with intervals.

Usage: python recipes/gsm8k/results.py RUNS OUT.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from hone.tracking import atomic_write_text, read_metrics

PROBLEMS = 1319
KEPT = {
    "score": "critic/score/mean",
    "response_length": "response_length/mean",
    "entropy": "actor/entropy",
    "turns": "num_turns/mean",
    "seconds": "timing_s/step",
}


def interval(share: float, count: int = PROBLEMS) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z = 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def accuracy_of(line: dict[str, Any]) -> float | None:
    names = [n for n in line if n.startswith("val-core/openai/gsm8k/") and n.endswith("/mean@1")]
    return None if not names else float(line[names[0]])


def run_of(folder: Path) -> dict[str, Any]:
    lines = read_metrics(folder / "metrics.jsonl")
    test = [[line["step"], accuracy_of(line)] for line in lines if accuracy_of(line) is not None]
    steps = [line for line in lines if "timing_s/step" in line]
    return {
        "test_accuracy": test,
        "steps": len(steps),
        "by_step": {
            name: [round(float(line[key]), 4) for line in steps if key in line]
            for name, key in KEPT.items()
        },
    }


def draw(runs: dict[str, Any], out: Path) -> None:
    """Draw the accuracy on the test problems by step, with its interval, and the score in training."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    test, training = figure.subplots(1, 2)
    for name, run in runs.items():
        if len(run["test_accuracy"]) > 1:
            steps, values = zip(*run["test_accuracy"], strict=True)
            low, high = zip(*map(interval, values), strict=True)
            (line,) = test.plot(steps, [100 * v for v in values], marker="o", ms=3, label=name)
            test.fill_between(
                steps, [100 * v for v in low], [100 * v for v in high], alpha=0.12, lw=0
            )
            training.plot([100 * v for v in run["by_step"]["score"]], color=line.get_color())
    test.set_title("test problems solved, greedy (%), 95 % intervals", fontsize=10, loc="left")
    training.set_title("responses right in training (%)", fontsize=10, loc="left")
    test.legend(frameon=False, loc="lower right")
    for panel in (test, training):
        panel.set_xlabel("step")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    folders = sorted(path.parent for path in arguments.runs.glob("*/metrics.jsonl"))
    runs = {folder.name: run_of(folder) for folder in folders}
    for name, run in runs.items():
        if run["test_accuracy"]:
            ends = [run["test_accuracy"][0], run["test_accuracy"][-1]]
            run["first_and_last"] = [
                {"step": step, "accuracy": value, "interval": interval(value)}
                for step, value in ends
            ]
            said = ", ".join(
                f"step {end['step']}: {100 * end['accuracy']:.1f} %"
                f" ({100 * end['interval'][0]:.1f} to {100 * end['interval'][1]:.1f})"
                for end in run["first_and_last"]
            )
            sys.stdout.write(f"{name:18} {said}\n")
    atomic_write_text(arguments.out, json.dumps(runs, indent=1) + "\n")
    draw(runs, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
