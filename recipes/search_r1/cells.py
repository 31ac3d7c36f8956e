"""The cells of a closed world as one small JSON file: held-out exact match and searches by step.

Usage: python recipes/search_r1/cells.py RUNS (writes RUNS/curves.json)
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


def main() -> None:
    runs = Path(sys.argv[1])
    rows = (runs / "world" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    sizes = Counter(json.loads(row)["data_source"] for row in rows)
    folders = sorted(
        file.parent for file in runs.glob("*/metrics.jsonl") if file.parent.name != "sft"
    )
    cells = [cell_of(folder, sizes) for folder in folders]
    (runs / "curves.json").write_text(
        json.dumps({"held_out": sizes, "cells": cells}, indent=1) + "\n"
    )
    for cell in cells:
        first, last = cell["held_out"][0], cell["held_out"][-1]
        sys.stdout.write(
            f"{cell['cell']}: EM {100 * first['em']:.1f} -> {100 * last['em']:.1f} %, searches "
            f"{first['searches']} -> {last['searches']}, {cell['seconds']} s\n"
        )


if __name__ == "__main__":
    main()
