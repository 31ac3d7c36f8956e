"""Profiles a process during one step: a trace of torch.profiler, or a capture range for nsys.

Roles in one process share a profile. The first role that stops writes the profile to a file whose
name has all roles.
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
    profiler: profile | None
    """The profiler of torch, or None if nsys is used."""
    roles: list[str] = field(default_factory=list)


_current_profile: StepProfile | None = None


def start(tool: str, step: int, role: str) -> None:
    """Starts profiling this process for a role, unless another role has already started it."""
    global _current_profile
    if _current_profile is None:
        _current_profile = StepProfile(step, _start_torch_profiler() if tool == "torch" else None)
        if tool == "nsys":
            _set_nsys_capture(begin=True)
    _current_profile.roles.append(role)


def stop(folder: str, rank: int) -> None:
    """Stops profiling and writes the trace to `step_N-ROLES-rank_R.json.gz`."""
    step_profile = _end_profile()
    if step_profile is None or step_profile.profiler is None:  # nsys writes its own file
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    name = f"step_{step_profile.step}-{'+'.join(step_profile.roles)}-rank_{rank}.json.gz"
    temporary = Path(folder) / f".{name}"
    step_profile.profiler.export_chrome_trace(str(temporary))
    temporary.rename(Path(folder) / name)


def discard() -> None:
    """Stops profiling without writing a file, as after a failed step."""
    _end_profile()


def _end_profile() -> StepProfile | None:
    """Stops profiling and returns the profile; None if this process is not profiled."""
    global _current_profile
    step_profile, _current_profile = _current_profile, None
    if step_profile is not None and step_profile.profiler is not None:
        step_profile.profiler.stop()
    elif step_profile is not None:
        _set_nsys_capture(begin=False)
    return step_profile


def _start_torch_profiler() -> profile:
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    config = _ExperimentalConfig(profile_all_threads=True)  # decoding runs in another thread
    profiler = profile(activities=activities, experimental_config=config)
    profiler.start()
    return profiler


def _set_nsys_capture(*, begin: bool) -> None:
    import torch

    if torch.cuda.is_available():
        runtime = torch.cuda.cudart()
        if begin:
            runtime.cudaProfilerStart()
        else:
            runtime.cudaProfilerStop()
