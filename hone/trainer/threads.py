"""Resolves the number of CPU threads of a run, which the config stores for a resumed run."""

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
"""Warn if several threads take this many times as long as one."""

Config = TypeVar("Config", bound=Block)


def resolve_threads(
    config: Config, local_world_size: int, *, warn: bool = True
) -> tuple[Config, int]:
    """Returns the config with `trainer.num_threads` set, and the number.

    It is the configured number, else that of the resumed run, else it depends on the number of cores.
    """
    trainer = config["trainer"]  # the configs with this block share no type
    resumed = _threads_of_resumed_run(trainer)
    count = trainer.num_threads or resumed or thread_count(local_world_size)
    if warn and resumed is not None and count != resumed:
        screen().line(
            f"{NUM_THREADS_KEY}={count}, but the run used {resumed} so far: metrics may differ in the "
            f"last bits from those of an uninterrupted run; {NUM_THREADS_KEY}={resumed} avoids that"
        )
    if warn and trainer.num_threads is None and (warning := busy_warning(count, trainer.device)):
        screen().line(warning)
    return replace(config, NUM_THREADS_KEY, count), count


def busy_warning(count: int, device: str) -> str | None:
    """Returns a warning if `count` threads are slower than one because other programs use the cores."""
    if count == 1 or uses_gpu(device) or (ratio := slowdown(count)) < MIN_SLOWDOWN:
        return None
    cores, load = usable_cores(), load_average()
    free = 1 if load is None else max(1, min(count - 1, cores - round(load)))
    load_note = "" if load is None else f" (load average {load:.1f} on {cores} cores)"
    return (
        f"{count} threads are {ratio:.1f} times slower than one here: other programs use the "
        f"cores{load_note}; set {NUM_THREADS_KEY}={free}"
    )


def _threads_of_resumed_run(trainer: Block) -> int | None:
    """Returns the number of threads in the config of the resumed run, if there is one."""
    mode, path = trainer.get("resume_mode", "disable"), trainer.get("resume_from_path", "")
    if mode == "disable":
        return None
    folder = Path(trainer["default_local_dir"])
    run = RunFolder(folder if mode == "auto" else Path(path or folder).expanduser().parent)
    if mode == "auto" and not run.checkpoints():
        return None
    try:
        count = run.read_config()["trainer"]["num_threads"]
    except (OSError, ValueError, YAMLError, KeyError, TypeError, RecursionError):
        return None  # loading the checkpoint reports an invalid config
    return count if isinstance(count, int) and count > 0 else None


def uses_gpu(device: str) -> bool:
    """Returns whether `trainer.device` is a GPU; `auto` uses one if available."""
    if device != "auto":
        return device == "cuda"
    import torch

    return torch.cuda.is_available()
