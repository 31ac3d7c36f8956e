"""Profiles a process during one step: a trace of torch.profiler, or a capture range for nsys.

Roles in one process share a profile; the first role that stops writes it, named after all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.profiler import profile


@dataclass
class StepProfile:
    """The profile of one step in this process."""

    step: int
    trace: profile | None
    """None if nsys is the profiler."""
    roles: list[str] = field(default_factory=list)


_current: StepProfile | None = None


def start(tool: str, step: int, role: str) -> None:
    """Starts profiling this process, unless another role has started."""
    global _current
    if _current is None:
        _current = StepProfile(step, _torch_trace() if tool == "torch" else None)
        if tool == "nsys":
            _mark_range(begin=True)
    _current.roles.append(role)


def stop(folder: str, rank: int) -> None:
    """Stops profiling and writes the trace to `step_N-ROLES-rank_R.json.gz`."""
    global _current
    profile, _current = _current, None
    if profile is None:
        return
    if profile.trace is None:
        _mark_range(begin=False)
        return
    profile.trace.stop()
    Path(folder).mkdir(parents=True, exist_ok=True)
    name = f"step_{profile.step}-{'+'.join(profile.roles)}-rank_{rank}.json.gz"
    temporary = Path(folder) / f".{name}"
    profile.trace.export_chrome_trace(str(temporary))
    temporary.rename(Path(folder) / name)


def discard() -> None:
    """Stops profiling without writing a file, after a failed step."""
    global _current
    profile, _current = _current, None
    if profile is not None and profile.trace is not None:
        profile.trace.stop()


def _torch_trace() -> profile:
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    all_threads = _ExperimentalConfig(profile_all_threads=True)  # decoding runs in another thread
    trace = profile(activities=activities, experimental_config=all_threads)
    trace.start()
    return trace


def _mark_range(*, begin: bool) -> None:
    import torch

    if torch.cuda.is_available():
        runtime = torch.cuda.cudart()
        runtime.cudaProfilerStart() if begin else runtime.cudaProfilerStop()
