"""`make bench-gpu`: decoding, generation, updates and GRPO steps on one GPU, beside their limits.

Prints a table and writes benchmarks/results/<device>.json, with what it printed beside it as .log.
`--rehearse` runs everything tiny, on a CPU too.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import hashlib
import io
import json
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_decode, gpu_train
from benchmarks.gpu_models import LARGE, SMALL, TINY, Shape, build, parameters
from benchmarks.gpu_timing import ceilings

PARTS = ("decode", "peer", "generate", "longtail", "sync", "update", "grpo", "exact")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    arguments = _arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = arguments.rehearse
    out: Path = arguments.out or RESULTS / f"{_short_name(device)}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".log").open("w") as log, redirect_stdout(_Tee(sys.stdout, log)):
        _run(arguments, device, small, out)


def _run(arguments: argparse.Namespace, device: torch.device, small: bool, out: Path) -> None:
    limits = ceilings(device)
    result: dict[str, Any] = facts(device) | {"ceilings": limits}
    print(json.dumps(facts(device)), flush=True)
    shapes = [TINY] if small else [SMALL, LARGE]
    parts = arguments.parts.split(",") if arguments.parts else PARTS
    for index, shape in enumerate(shapes[: arguments.shapes]):
        for measured in measure(shape, device, limits, parts, small, arguments.steps):
            result |= measured if index == 0 else {"second_shape": measured}
            # What was measured survives a later failure.
            out.write_text(json.dumps(result, indent=2) + "\n")
    table(result)


def measure(
    shape: Shape,
    device: torch.device,
    limits: dict[str, float],
    parts: Any,
    small: bool,
    steps: int,
) -> Iterator[dict[str, Any]]:
    """All that was measured so far, after each of the stages."""
    out = _with_model(shape, device, limits, parts, small)
    yield out
    _clean(device)
    if "grpo" in parts:
        out["grpo_step"] = gpu_train.grpo_step(shape, device, steps, small)
        yield out
    if "exact" in parts and "grpo" in parts:
        out["exact"] |= {
            f"grpo_step.{name}": value
            for name, value in gpu_train.grpo_step(
                shape, device, steps, small, "actor_rollout_ref.rollout.exact=true"
            ).items()
        }
    yield out


def _with_model(
    shape: Shape, device: torch.device, limits: dict[str, float], parts: Any, small: bool
) -> dict[str, Any]:
    print(f"{shape.name}", flush=True)
    lm = build(shape, device)
    work: dict[str, Any] = {
        "decode": lambda: gpu_decode.decode(lm, shape, device, small),
        "peer": lambda: gpu_decode.peer(shape, device, small),
        "generate": lambda: gpu_decode.groups(lm, shape, device, small),
        "longtail": lambda: gpu_decode.longtail(lm, shape, device, small),
        "sync": lambda: gpu_decode.sync(lm, device),
        "update": lambda: gpu_train.update(lm, shape, device, limits["flops"], small),
        "exact": lambda: _exact(lm, shape, device, limits["flops"], small),
    }
    names = {"generate": "generate_512x256", "peer": "decode"}
    out: dict[str, Any] = {"shape": shape.name, "parameters": parameters(lm)}
    for part in [p for p in parts if p in work]:
        started = time.perf_counter()
        out[names.get(part, part)] = out.get(names.get(part, part), {}) | work[part]()
        print(f"  {part} took {time.perf_counter() - started:.1f} s in all", flush=True)
        _clean(device)
    if "decode" in parts:
        out["decode"]["limit_ms"] = out["decode"]["bytes_per_step"] / limits["bytes_per_s"] * 1000
    return out


def _exact(
    lm: Any, shape: Shape, device: torch.device, flops: float, small: bool
) -> dict[str, float]:
    """The same work with rollout.exact=true: what it costs."""
    decoded = gpu_decode.decode(lm, shape, device, small, exact=True)
    generated = gpu_decode.groups(lm, shape, device, small, exact=True)
    updated = gpu_train.update(lm, shape, device, flops, small, exact=True)
    return {
        "decode.hone_tokens_per_s": decoded["hone_tokens_per_s"],
        "decode.step_ms": decoded["step_ms"],
        "generate_512x256.hone_s": generated["hone_s"],
        "update.hone_s": updated["hone_s"],
        "update.mfu": updated["mfu"],
        "update.peak_gib": updated["peak_gib"],
    }


def _clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def facts(device: torch.device) -> dict[str, Any]:
    import transformers

    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "code": _fingerprint(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": "cpu",
    }
    if device.type == "cuda":
        import triton

        facts |= {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
    return facts


def _fingerprint() -> str:
    """A hash of the package's and the benchmarks' sources: the same code has the same one anywhere."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted([*root.glob("hone/**/*.py"), *root.glob("benchmarks/*.py")]):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def table(result: dict[str, Any]) -> None:
    """The table of docs/performance.md, for each shape."""
    for shape in (result, result.get("second_shape")):
        if shape is None:
            continue
        print(
            f"\n{shape['shape']}, {shape['parameters'] / 1e6:.0f}M parameters, {result['device']}"
        )
        for name in (
            "decode", "generate_512x256", "longtail", "update", "grpo_step", "sync", "exact",
        ):  # fmt: skip
            for key, value in shape.get(name, {}).items():
                shown = f"{value:,.4g}" if isinstance(value, float) else value
                print(f"  {name + '.' + key:40} {shown}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="everything tiny")
    parser.add_argument("--parts", help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--shapes", type=int, default=2, help="how many shapes")
    parser.add_argument(
        "--steps", type=int, default=7, help="GRPO steps; the first two do not count"
    )
    parser.add_argument("--out", type=Path, help="default benchmarks/results/<device>.json")
    return parser.parse_args()


def _short_name(device: torch.device) -> str:
    """`h200` for an NVIDIA H200."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "rehearsal"
    return name.split()[-1].lower()


class _Tee(io.TextIOBase):
    """Writes to several streams at once."""

    def __init__(self, *streams: Any) -> None:
        self._streams = streams

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            stream.flush()


if __name__ == "__main__":
    main()
