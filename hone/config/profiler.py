"""Profiling keys: the global tool and each role's switch.

torch's profiler and memory snapshots are ours to run; vendor tools are named so that they can be refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.block import Block
from hone.config.keys import follows


@dataclass(frozen=True)
class NsysToolConfig(Block):
    """NVIDIA Nsight Systems, per role."""

    discrete: bool = False
    """One profile a phase in place of one for the whole step."""


@dataclass(frozen=True)
class NpuToolConfig(Block):
    """Ascend profiler, per role."""

    contents: tuple[str, ...] = ()
    """What to record."""
    level: str = "level0"
    """Detail of the recording."""
    analysis: bool = True
    """Analyse at once."""
    discrete: bool = False
    """One profile a phase."""


@dataclass(frozen=True)
class TorchToolConfig(Block):
    """torch.profiler, per role."""

    contents: tuple[str, ...] = ()
    """What to record: cpu, cuda, memory, shapes, stack; empty is cpu and cuda."""
    discrete: bool = False
    """One profile a phase in place of one for the whole step."""


@dataclass(frozen=True)
class TorchMemoryToolConfig(Block):
    """CUDA memory snapshots, per role."""

    trace_alloc_max_entries: int = 100_000
    """Allocation events kept."""
    stack_depth: int = 32
    """Stack frames kept for each event."""


@dataclass(frozen=True)
class ProfilerToolConfig(Block):
    """Settings of each tool."""

    nsys: NsysToolConfig = field(default_factory=NsysToolConfig)
    """NVIDIA Nsight Systems."""
    npu: NpuToolConfig = field(default_factory=NpuToolConfig)
    """Ascend profiler."""
    torch: TorchToolConfig = field(default_factory=TorchToolConfig)
    """torch.profiler."""
    torch_memory: TorchMemoryToolConfig = field(default_factory=TorchMemoryToolConfig)
    """CUDA memory snapshots."""


@dataclass(frozen=True)
class ProfilerConfig(Block):
    """Profiling of one role."""

    tool: str | None = field(default=follows("global_profiler.tool"))
    """The tool; follows the global one."""
    enable: bool = False
    """Profile this role in the steps of `global_profiler.steps`."""
    all_ranks: bool = False
    """Profile every rank."""
    ranks: tuple[int, ...] = ()
    """Ranks to profile; empty is rank 0."""
    save_path: str | None = field(default=follows("global_profiler.save_path"))
    """Folder of the profiles; follows the global one."""
    tool_config: ProfilerToolConfig = field(default_factory=ProfilerToolConfig)
    """Settings of each tool."""


@dataclass(frozen=True)
class GlobalNsysConfig(Block):
    """Nsight Systems for the whole run."""

    discrete: bool = False
    """One profile a phase."""
    controller_nsight_options: dict[str, Any] = field(default_factory=dict)
    """Command-line options of nsys on the controller."""
    worker_nsight_options: dict[str, Any] = field(default_factory=dict)
    """Command-line options of nsys on the workers."""


@dataclass(frozen=True)
class GlobalTorchMemoryConfig(Block):
    """CUDA memory snapshots for the whole run."""

    trace_alloc_max_entries: int = 100_000
    """Allocation events kept."""
    stack_depth: int = 32
    """Stack frames kept for each event."""
    context: str = "all"
    """Which events carry a stack."""
    stacks: str = "all"
    """Which stacks to keep: all, python."""
    kw_args: dict[str, Any] = field(default_factory=dict)
    """More arguments of the recorder."""


@dataclass(frozen=True)
class GlobalToolConfig(Block):
    """Settings of each tool for the whole run."""

    nsys: GlobalNsysConfig = field(default_factory=GlobalNsysConfig)
    """NVIDIA Nsight Systems."""
    torch_memory: GlobalTorchMemoryConfig = field(default_factory=GlobalTorchMemoryConfig)
    """CUDA memory snapshots."""


@dataclass(frozen=True)
class GlobalProfilerConfig(Block):
    """Which steps are profiled, with what, and where the profiles go."""

    tool: str | None = None
    """torch or torch_memory; null profiles nothing."""
    steps: tuple[int, ...] | None = None
    """Steps to profile; null is none."""
    profile_continuous_steps: bool = False
    """Neighbouring steps share one profile."""
    save_path: str = "outputs/profile"
    """Folder of the profiles."""
    global_tool_config: GlobalToolConfig = field(default_factory=GlobalToolConfig)
    """Settings of each tool."""
