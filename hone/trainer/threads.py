"""The number of CPU threads of a run: resolved once, written to its config, used again on resume.

A busy machine can make several threads slower than one; the run warns, and the user decides.
"""

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

KEY = "trainer.num_threads"
SLOWER_FROM = 1.5
"""Warn where several threads take so many times as long as one."""

Config = TypeVar("Config", bound=Block)


def resolve_threads(
    config: Config, local_world_size: int, *, tells: bool = True
) -> tuple[Config, int]:
    """The config with `trainer.num_threads`, and the number: as given, the resumed run's, or by the cores.

    `tells` prints what the user should know about the number.
    """
    trainer = config["trainer"]  # the trees that have one share no type
    before = _of_resumed_run(trainer)
    count = trainer.num_threads or before or thread_count(local_world_size)
    if tells and before is not None and count != before:
        screen().line(
            f"{KEY}={count}, and the steps so far were made with {before}: the numbers that follow may "
            f"differ in the last bits; {KEY}={before} repeats them"
        )
    if tells and trainer.num_threads is None and (warning := busy_warning(count, trainer.device)):
        screen().line(warning)
    return replace(config, KEY, count), count


def busy_warning(count: int, device: str) -> str | None:
    """The warning where `count` threads are slower than one, because other programs use the cores."""
    if count == 1 or uses_gpu(device) or (ratio := slowdown(count)) < SLOWER_FROM:
        return None
    cores, load = usable_cores(), load_average()
    free = 1 if load is None else max(1, min(count - 1, cores - round(load)))
    now = "" if load is None else f" (load average {load:.1f} on {cores} cores)"
    return (
        f"{count} threads are {ratio:.1f} times slower than one here: other programs use the "
        f"cores{now}; {KEY}={free} helps"
    )


def _of_resumed_run(trainer: Block) -> int | None:
    """The number in the config of the run that is resumed, if there is one."""
    mode, path = trainer.get("resume_mode", "disable"), trainer.get("resume_from_path", "")
    if mode == "disable":
        return None
    own = Path(trainer["default_local_dir"])
    run = RunFolder(own if mode == "auto" else Path(path or own).expanduser().parent)
    if mode == "auto" and not run.checkpoints():
        return None
    try:
        count = run.read_config()["trainer"]["num_threads"]
    except (OSError, ValueError, YAMLError, KeyError, TypeError, RecursionError):
        return None  # not ours; reading the checkpoint shows whether it is sound
    return count if isinstance(count, int) and count > 0 else None


def uses_gpu(device: str) -> bool:
    """Whether `trainer.device` is a GPU; auto takes one where there is one."""
    if device != "auto":
        return device == "cuda"
    import torch

    return torch.cuda.is_available()
