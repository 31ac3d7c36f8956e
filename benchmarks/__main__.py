"""`make bench`: run every benchmark (or the named ones) and keep the numbers."""

from __future__ import annotations

import importlib
import json
import platform
import sys
import time
from pathlib import Path

ALL = (
    "algorithms",
    "rewards",
    "sandbox",
    "assertions",
    "logprobs",
    "rollout",
    "dynamic_sampling",
    "agents",
    "grpo_step",
    "sft",
    "retriever",
    "first_step",
)
RESULTS = Path(__file__).parent / "results" / "cpu.json"


def main(names: list[str]) -> None:
    unknown = sorted(set(names) - set(ALL))
    if unknown:
        sys.exit(f"no benchmark {', '.join(unknown)}; there are {', '.join(ALL)}")
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names or ALL:
        print(f"\n== {name}")
        try:
            module = importlib.import_module(f"benchmarks.{name}")
        except ModuleNotFoundError as error:
            print(f"left out: {error}")
            continue
        kept[name] = {"date": time.strftime("%Y-%m-%d"), **module.main()}
        kept["machine"] = {"python": platform.python_version(), "cores": len(_cores())}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    print(
        f"\nnumbers: {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}"
    )


def _cores() -> set[int]:
    import os

    return os.sched_getaffinity(0)


if __name__ == "__main__":
    main(sys.argv[1:])
