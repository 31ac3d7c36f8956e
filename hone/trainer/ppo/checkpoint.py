"""Checkpoints of a run: written under a temporary name, sealed with a manifest, renamed.

A folder without a matching manifest is not a checkpoint: it is skipped with a warning and the one
before it is used.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hone.tracking import RunFolder, atomic_write_text
from hone.tracking.console import screen
from hone.tracking.manifest import MANIFEST, damage, seal

log = logging.getLogger(__name__)

STATE = "trainer_state.json"
_UNFINISHED = ".tmp"


class CheckpointError(RuntimeError):
    """No usable checkpoint where one was asked for, or one that could not be written."""


@contextmanager
def writing(run: RunFolder, step: int) -> Iterator[Path]:
    """A folder to fill; on success it becomes `global_step_N` and the latest."""
    final, temporary = run.checkpoint(step), unfinished(run, step)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        seal(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
    except BaseException as error:  # torch's own checkpoint errors are no Exception
        shutil.rmtree(temporary, ignore_errors=True)
        if not _is_disk_full(error):
            raise
        raise CheckpointError(_disk_full(run, step)) from error
    atomic_write_text(run.latest_file, str(step))


def unfinished(run: RunFolder, step: int) -> Path:
    """The folder that `writing` hands out, for ranks that help to fill it."""
    final = run.checkpoint(step)
    return final.with_name(f".{final.name}{_UNFINISHED}")


def begin(run: RunFolder, mode: str, path: str | None) -> tuple[int, Path] | None:
    """Where a run goes on (`chosen`); what its folder holds of another past is put out of its way.

    What was logged after that step is forgotten: no step stands there twice.
    """
    remove_unfinished(run)
    found = chosen(run, mode, path)
    set_aside_after(run, 0 if found is None else found[0])
    run.cut_back(-1 if found is None else found[0])
    return found


def chosen(run: RunFolder, mode: str, path: str | None) -> tuple[int, Path] | None:
    """Step and folder that `trainer.resume_mode` and `resume_from_path` lead to; None starts anew."""
    if mode == "disable":
        return None
    return newest_sound(run) if mode == "auto" else at_path(path)


def tell_resumed(folder: Path, step: int, total_steps: int | None) -> None:
    """Say on the console where a run goes on, or that no step is left; None: it asks for no steps."""
    if total_steps is not None and step >= total_steps:
        screen().line(
            f"already at step {step} of {total_steps}: nothing to do ({folder}); a larger "
            "trainer.total_training_steps (or total_epochs) goes on from there, "
            "trainer.resume_mode=disable starts anew; a run with other settings needs another "
            "trainer.default_local_dir"
        )
    else:
        screen().line(f"resumed from {folder}")


def tell_result(run: RunFolder, step: int) -> None:
    """The closing line of a run: where what it made lies."""
    folder = run.checkpoint(step)
    saved = f"the model is in {folder}" if folder.is_dir() else "no checkpoint of it was saved"
    screen().line(f"done at step {step}: {saved}; the run's metrics and config are in {run.path}")


def remove_unfinished(run: RunFolder) -> None:
    """Delete what a killed process left half written."""
    for folder in run.path.glob(f".global_step_*{_UNFINISHED}"):
        shutil.rmtree(folder, ignore_errors=True)


def set_aside_after(run: RunFolder, step: int) -> None:
    """Checkpoints beyond the step a run continues from are another past: none may be resumed next.

    They are kept as `global_step_N.earlier`; of an older one by that name the newer stays.
    """
    for number, folder in run.checkpoints():
        if number > step:
            aside = folder.with_name(f"{folder.name}.earlier")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            log.warning("%s is not what this run continues from; kept as %s", folder, aside.name)


def newest_sound(run: RunFolder) -> tuple[int, Path] | None:
    """The latest checkpoint whose files are all there and whole."""
    for step, folder in reversed(run.checkpoints()):
        problem = damage(folder)
        if problem is None:
            return step, folder
        log.warning("checkpoint %s is damaged (%s); trying the one before it", folder, problem)
    return None


def at_path(path: str | None) -> tuple[int, Path]:
    """The checkpoint the user named; it must be sound."""
    folder = Path(path or "").expanduser()
    if not path or not folder.name.startswith("global_step_"):
        raise CheckpointError(
            f"trainer.resume_from_path={path} must name a folder global_step_N (resume_mode=resume_path)"
        )
    if (problem := damage(folder)) is not None:
        raise CheckpointError(f"{folder} cannot be resumed: {problem}")
    return int(folder.name.removeprefix("global_step_")), folder


def prune(run: RunFolder, keep: int | None) -> None:
    """Delete the oldest checkpoints beyond `keep`, also those of earlier processes."""
    if keep is None or keep < 1:
        return
    for _, folder in run.checkpoints()[:-keep]:
        # Without its manifest it is no checkpoint: a kill midway leaves nothing that looks whole.
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    (folder / STATE).write_text(json.dumps(state, default=_plain))


def read_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / STATE).read_text())


def _plain(value: Any) -> Any:
    """Rows that a data set grew may hold numpy values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"a checkpoint cannot hold a {type(value).__name__}; rows, samplers and data generators must "
        "give plain values (numbers, text, lists, dicts) in their state"
    )


def _is_disk_full(error: BaseException | None) -> bool:
    """Also where torch or safetensors wrapped it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        ranks = getattr(error, "failures", None)  # torch.distributed.checkpoint: one a rank
        if isinstance(ranks, dict) and any(_is_disk_full(found[0]) for found in ranks.values()):
            return True
        if "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _disk_full(run: RunFolder, step: int) -> str:
    kept = run.checkpoints()
    left = f"{kept[-1][1].name} is untouched" if kept else "there is no earlier checkpoint"
    return (
        f"the disk is full: step {step} could not be saved in {run.path}; {left}. Free space, set "
        "trainer.max_actor_ckpt_to_keep (or leave hf_model out of "
        "actor_rollout_ref.actor.checkpoint.save_contents), and start the same command again: it resumes"
    )
