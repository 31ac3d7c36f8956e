"""Time on a device: the median of several runs after a warm-up, and the device's two ceilings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

RUNS = 5


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(work: Callable[[], Any], device: torch.device, runs: int = RUNS) -> float:
    """Seconds of one run: the median of `runs`, after one that is not counted."""
    work()
    taken = []
    for _ in range(runs):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        taken.append(time.perf_counter() - start)
    print("    runs:", " ".join(f"{t:.4f}" for t in taken), flush=True)
    return statistics.median(taken)


def ceilings(device: torch.device) -> dict[str, float]:
    """Bytes a second of a large copy (read plus written), and operations a second of a bf16 product."""
    if device.type != "cuda":
        return {"bytes_per_s": 1e10, "flops": 1e11}
    source = torch.randn(2**30, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    a, b = torch.randn(2, 8192, 8192, device=device, dtype=torch.bfloat16)
    copy = _kernel_s(lambda: target.copy_(source))
    product = _kernel_s(lambda: a @ b)
    return {"bytes_per_s": 2 * source.nbytes / copy, "flops": 2 * 8192**3 / product}


def _kernel_s(work: Callable[[], Any]) -> float:
    for _ in range(3):
        work()
    taken = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            work()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) / 5000)
    return statistics.median(taken)
