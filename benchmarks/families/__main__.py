"""`make families`: compare every decoder family with plain `transformers`, and write the table.

On a GPU the sweep runs in bfloat16 there. One family that fails does not stop the others; after a CUDA
error, which spoils a process, the rest run in a fresh one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.families import table
from benchmarks.families.measure import examine

GOOD = ("equal", "refused")


def main() -> None:
    options = _options()
    device = torch.device(options.device)
    target = options.out / ("families_h200.json" if device.type == "cuda" else "families_cpu.json")
    results = _header(device) | {"families": {}}
    if target.exists() and (options.resume or options.families):
        results["families"] = json.loads(target.read_text())["families"]
    names = options.families or family_names()
    if options.resume:
        names = [name for name in names if name not in results["families"]]
    options.out.mkdir(parents=True, exist_ok=True)
    _be_quiet()
    for name in names:
        begin = time.perf_counter()
        result = _tried(name, device)
        results["families"][name] = result
        target.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(_line(name, result, time.perf_counter() - begin), flush=True)
        if "CUDA error" in result.get("error", ""):
            os.execv(
                sys.executable, [sys.executable, "-m", "benchmarks.families", *_again(options)]
            )
    _end(results, options)


def _again(options: argparse.Namespace) -> list[str]:
    common = ["--device", options.device, "--out", str(options.out), "--resume"]
    return [*common, *options.families]


def _end(results: dict[str, Any], options: argparse.Namespace) -> None:
    if options.out.resolve() == table.CPU.parent.resolve():
        table.write()
    outcomes = [r["outcome"] for r in results["families"].values()]
    counts = {kind: outcomes.count(kind) for kind in sorted(set(outcomes))}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if bad := [name for name, r in results["families"].items() if r["outcome"] not in GOOD]:
        sys.exit(f"neither equal nor refused: {', '.join(bad)}")


def family_names() -> list[str]:
    """Every decoder family of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _tried(name: str, device: torch.device) -> dict[str, Any]:
    try:
        return examine(name, device)
    except Exception as error:  # the sweep reports it and goes on
        return {"outcome": "failed", "error": f"{type(error).__name__}: {error}"[:500]}


def _line(name: str, result: dict[str, Any], seconds: float) -> str:
    numbers = "  ".join(f"{k} {v:.1e}" for k, v in result.items() if isinstance(v, float))
    return f"{name:24} {result['outcome']:8} {seconds:5.1f} s  {numbers or result.get('error', '')}"


def _header(device: torch.device) -> dict[str, Any]:
    import transformers

    versions = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    name = "CPU"
    if device.type == "cuda":
        import triton

        versions["triton"] = triton.__version__
        name = torch.cuda.get_device_name(device)
    date = time.strftime("%Y-%m-%d")
    return {"date": date, "device": name, "versions": versions}


def _be_quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__)
    parser.add_argument("families", nargs="*", help="some families only; others keep their results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=table.CPU.parent, help="folder of the results")
    parser.add_argument("--resume", action="store_true", help="only what has no result yet")
    return parser.parse_args()


if __name__ == "__main__":
    main()
