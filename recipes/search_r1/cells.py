"""The cells of a closed world as one small JSON file: held-out exact match and searches by step.

Usage: python recipes/search_r1/cells.py OUT RUNS… (writes OUT.json and, with matplotlib, OUT.png); each of
RUNS is a folder of runs or a file that this program wrote, so that seeds of several folders come together.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from hone.tracking import read_metrics

SEEN = {
    "score": "critic/score/mean",
    "searches": "env/number_of_valid_search",
    "finish_ratio": "env/finish_ratio",
    "valid_ratio": "env/ratio_of_valid_action",
    "retrieval_failures": "env/retrieval_failures",
    "entropy": "actor/entropy",
    "response_length": "response_length/mean",
    "seconds": "timing_s/step",
}
COLORS = {"real": "#2f6f9f", "oracle": "#3a8f5c", "random": "#c2553a", "ppo": "#7a5ea8"}
CORE = re.compile(r"val-core/(\w+)/acc/mean@1")


def cell_of(folder: Path, sizes: Counter[str]) -> dict[str, Any]:
    """Held-out numbers by step, over all questions and per set, and what training saw."""
    lines = read_metrics(folder)
    held_out = []
    for line in lines:
        sets = {match[1]: line[name] for name in line if (match := CORE.fullmatch(name))}
        if sets:
            rows = sum(sizes[name] for name in sets)
            searches = {n: line[f"val-aux/{n}/env/number_of_valid_search/mean@1"] for n in sets}
            held_out.append(
                {
                    "step": line["step"],
                    "em": round(sum(sizes[n] * v for n, v in sets.items()) / rows, 4),
                    "searches": round(sum(sizes[n] * v for n, v in searches.items()) / rows, 3),
                    "per_set": {name: round(value, 4) for name, value in sets.items()},
                }
            )
    steps = [line for line in lines if SEEN["score"] in line]
    first, last = held_out[0], held_out[-1]
    return {
        "cell": folder.name,
        "held_out": held_out,
        "points_gained": round(100 * (last["em"] - first["em"]), 1),
        "seconds": round(sum(line["timing_s/step"] for line in steps), 1),
        "training": {
            name: [round(line[key], 4) for line in steps if key in line]
            for name, key in SEEN.items()
        },
    }


def collect(place: Path) -> dict[str, Any]:
    """The cells of a folder of runs, or of a file that an earlier call wrote."""
    if place.is_file():
        measured: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
        return measured
    rows = (place / "world" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    sizes = Counter(json.loads(row)["data_source"] for row in rows)
    files = sorted(place.glob("*/metrics.jsonl"))
    folders = [file.parent for file in files if file.parent.name != "sft"]
    return {"held_out": sizes, "cells": [cell_of(folder, sizes) for folder in folders]}


def draw(cells: list[dict[str, Any]], out: Path) -> None:
    """Held-out exact match and searches in training by step; one line per cell."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    exact, searches = figure.subplots(1, 2)
    for cell in cells:
        kind, _, seed = cell["cell"].rpartition("-")
        line = {"color": COLORS.get(kind, "#888888"), "label": kind if seed == "1" else None}
        steps = [point["step"] for point in cell["held_out"]]
        exact.plot(
            steps, [100 * point["em"] for point in cell["held_out"]], marker="o", ms=3, **line
        )
        searches.plot(cell["training"]["searches"], **line)
    exact.set_title("exact match on held-out questions, greedy (%)", fontsize=10, loc="left")
    searches.set_title("searches per question in training", fontsize=10, loc="left")
    exact.legend(frameon=False, ncols=4, loc="lower center", columnspacing=1.0)
    for panel in (exact, searches):
        panel.set_xlabel("step")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=130)


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("usage: cells.py OUT RUNS…")
    out, *places = map(Path, sys.argv[1:])
    several = [collect(place) for place in places]
    cells = [cell for measured in several for cell in measured["cells"]]
    whole = {"held_out": several[0]["held_out"], "cells": cells}
    out.with_suffix(".json").write_text(json.dumps(whole) + "\n", encoding="utf-8")
    for cell in cells:
        first, last = cell["held_out"][0], cell["held_out"][-1]
        sys.stdout.write(
            f"{cell['cell']}: EM {100 * first['em']:.1f} -> {100 * last['em']:.1f} %, searches "
            f"{first['searches']} -> {last['searches']}, {cell['seconds']} s\n"
        )
    try:
        draw(cells, out.with_suffix(".png"))
    except ModuleNotFoundError as missing:
        sys.stdout.write(f"no picture: {missing}; pip install matplotlib\n")


if __name__ == "__main__":
    main()
