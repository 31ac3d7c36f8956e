"""Resolves the number of CPU threads of a run; the run's config.yaml keeps the number for a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from yaml import YAMLError

from hone.config import replace
from hone.config.block import Block
from hone.controller.threads import load_average, slowdown, thread_count
from hone.cores import usable_cores
from hone.tracking import RunFolder
from hone.tracking.console import screen

NUM_THREADS_KEY = "trainer.num_threads"
MIN_SLOWDOWN = 1.5
"""A warning is printed if several threads take at least this many times as long as one."""

Config = TypeVar("Config", bound=Block)


def resolve_threads(
    config: Config, local_world_size: int, *, warn: bool = True
) -> tuple[Config, int]:
    """Returns the config with `trainer.num_threads` set, and the number of threads.

    The number is that of the config, or else that of the resumed run, or else depends on the cores. With
    `warn`, a warning is printed if a resumed run changes its number, or if other programs use the cores.
    """
    trainer = config["trainer"]  # the configs with this block have no common type
    resumed_threads = _threads_of_resumed_run(trainer)
    threads = trainer.num_threads or resumed_threads or thread_count(local_world_size)
    if warn and resumed_threads is not None and threads != resumed_threads:
        screen().line(
            f"{NUM_THREADS_KEY}={threads}, but the run used {resumed_threads} so far: metrics may differ "
            f"in the last bits from those of an uninterrupted run; "
            f"{NUM_THREADS_KEY}={resumed_threads} avoids that"
        )
    if warn and trainer.num_threads is None and (warning := busy_warning(threads, trainer.device)):
        screen().line(warning)
    return replace(config, NUM_THREADS_KEY, threads), threads


def busy_warning(threads: int, device: str) -> str | None:
    """Returns a warning if several threads are slower than one because other programs use the cores."""
    if threads == 1 or uses_gpu(device):
        return None
    ratio = slowdown(threads)
    if ratio < MIN_SLOWDOWN:
        return None
    cores, load = usable_cores(), load_average()
    suggested_threads = 1 if load is None else max(1, min(threads - 1, cores - round(load)))
    load_note = "" if load is None else f" (load average {load:.1f} on {cores} cores)"
    return (
        f"{threads} threads are {ratio:.1f} times slower than one here: other programs use the "
        f"cores{load_note}; set {NUM_THREADS_KEY}={suggested_threads}"
    )


def _threads_of_resumed_run(trainer: Block) -> int | None:
    """Returns the number of threads in the config of the resumed run, if there is one."""
    mode = trainer.get("resume_mode", "disable")
    if mode == "disable":
        return None
    folder = trainer["default_local_dir"]
    path = trainer.get("resume_from_path", "") or folder
    run = RunFolder(folder if mode == "auto" else Path(path).parent)
    if mode == "auto" and not run.checkpoints():
        return None
    try:
        threads = run.read_config()["trainer"]["num_threads"]
    except (OSError, ValueError, YAMLError, KeyError, TypeError, RecursionError):
        return None  # loading the checkpoint reports an invalid config
    return threads if isinstance(threads, int) and threads > 0 else None


def uses_gpu(device: str) -> bool:
    """Returns whether `device` (`trainer.device`) selects a GPU; `auto` selects an available GPU."""
    if device != "auto":
        return device == "cuda"
    import torch

    return torch.cuda.is_available()
