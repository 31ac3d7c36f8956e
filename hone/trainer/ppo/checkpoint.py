"""Writes checkpoints under a temporary name, adds a manifest, and renames them.

A folder without a matching manifest is skipped with a warning, and the previous checkpoint is used. If
none is valid, the run stops: only the user may decide to start over.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
import shlex
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hone.config.convert import show_value
from hone.data.files import copy_to_local
from hone.engine.saved_state import METADATA_FILE, read_metadata
from hone.tracking import RunFolder, atomic_write_text
from hone.tracking.atomic import make_folder, rename_folder, sync
from hone.tracking.console import screen
from hone.tracking.contract import flatten
from hone.tracking.lock import require_lock
from hone.tracking.manifest import MANIFEST, damage, require_files, seal
from hone.tracking.storage import reason, remedy, storage_failure
from hone.trainer.ppo import remote_checkpoints
from hone.types import JsonValue, Settings

T = TypeVar("T")

log = logging.getLogger(__name__)

STATE = "trainer_state.json"
_UNFINISHED = ".tmp"
MAX_LINES = 6
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PPO_KEYS = (
    *("algorithm", "custom_reward_function", "reward_model", "critic.optim", "trainer.seed"),
    *(f"{_ACTOR}.{name}" for name in ("optim", "policy_loss", "loss_agg_mode", "entropy_coeff")),
    *(f"{_ACTOR}.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")),
    *(f"{_ACTOR}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type")),
    *(f"{_ACTOR}.{name}" for name in ("ppo_epochs", "ppo_mini_batch_size", "grad_clip")),
    *(f"{_ROLLOUT}.{name}" for name in ("n", "temperature", "top_k", "top_p", "min_p")),
    *(f"{_ROLLOUT}.{name}" for name in ("multi_turn", "agent.default_agent_loop")),
    *(f"data.{name}" for name in ("train_batch_size", "max_prompt_length", "max_response_length")),
    *(f"data.{name}" for name in ("truncation", "prompt_format", "apply_chat_template_kwargs")),
)
SFT_KEYS = ("optim", "data.train_batch_size", "data.max_length", "data.truncation", "trainer.seed")
_DERIVED = ("total_training_steps", "input_tokenizer")
"""Keys derived from the length of the run, which a resumed run may change, and from the model."""


class CheckpointError(RuntimeError):
    """Raised when a requested checkpoint cannot be used, or one cannot be written."""


class NoSoundCheckpoint(CheckpointError):
    """Raised when checkpoints exist but none can be resumed; the user must decide."""

    changes_nothing = True


@contextmanager
def writing(run: RunFolder, step: int) -> Iterator[Path]:
    """Yield a folder to write to; on success it is renamed to `global_step_N` and becomes the latest.

    Its files and the metrics up to it are flushed to disk before the rename.
    """
    final, temporary = run.checkpoint(step), unfinished(run, step)
    require_lock(run.path)
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(run.path)
    try:
        temporary.mkdir()
        yield temporary
        require_files(temporary, _shards(temporary))
        seal(temporary)
        if run.metrics_file.exists():
            sync(run.metrics_file)
        require_lock(run.path)
        _remove(final)
        rename_folder(temporary, final)
    except BaseException as error:  # torch's checkpoint errors do not derive from Exception
        shutil.rmtree(temporary, ignore_errors=True)
        number = storage_failure(error)
        if number is None:
            raise
        raise CheckpointError(_not_saved(run, step, number)) from error
    atomic_write_text(run.latest_file, str(step))


def _shards(folder: Path) -> set[Path]:
    """Return the files that the tables of a checkpoint name, on whichever disks ranks have written them."""
    return {
        table.with_name(place.relative_path)
        for table in folder.rglob(METADATA_FILE)
        for place in (read_metadata(table.parent).storage_data or {}).values()
    }


def _remove(folder: Path) -> None:
    """Delete a checkpoint or the link to one; an interrupted deletion leaves no valid checkpoint."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def unfinished(run: RunFolder, step: int) -> Path:
    """Return the folder that `writing` yields, for the other ranks that write to it."""
    final = run.checkpoint(step)
    return final.with_name(f".{final.name}{_UNFINISHED}")


def begin(run: RunFolder, mode: str, path: str | None) -> tuple[int, Path] | None:
    """Return where a run resumes (`resume_source`), and move everything later out of the way.

    Later checkpoints are renamed to `global_step_N.earlier`; metrics logged after that step are dropped.
    """
    if mode == "auto":
        remote_checkpoints.pull(run)
    source = resume_source(run, mode, path)
    remote_checkpoints.set_aside(run, -1 if source is None else source[0])
    for folder in run.path.glob(f".global_step_*{_UNFINISHED}"):  # left by a killed process
        shutil.rmtree(folder, ignore_errors=True)
    for number, folder in run.checkpoints():
        if source is None or number > source[0]:
            new_path = folder.with_name(f"{folder.name}.earlier")
            _remove(new_path)
            folder.rename(new_path)
            log.warning("%s is not what this run continues from; kept as %s", folder, new_path.name)
    run.truncate_after(-1 if source is None else source[0])
    return source


def resume_source(run: RunFolder, mode: str, path: str | None) -> tuple[int, Path] | None:
    """Return step and folder given by `trainer.resume_mode` and `resume_from_path`; None starts a new run."""
    if mode == "disable":
        return None
    if mode != "auto":
        step, folder = named(path)
        if (problem := damage(folder)) is not None:
            raise CheckpointError(f"{folder} cannot be resumed: {problem}")
        return step, folder
    source = newest_sound(run)
    if source is None and (folders := run.checkpoints()):
        raise NoSoundCheckpoint(
            f"{run.path} has {len(folders)} checkpoints, and none can be resumed "
            f"({folders[-1][1].name}: {damage(folders[-1][1])}); nothing was changed. Restore one from a "
            "copy, set another trainer.default_local_dir, or start anew here with "
            "trainer.resume_mode=disable, which keeps them as global_step_N.earlier and erases the "
            "metrics and rollouts"
        )
    return source


def newest_sound(run: RunFolder) -> tuple[int, Path] | None:
    """Return the latest checkpoint whose files all match its manifest."""
    for step, folder in reversed(run.checkpoints()):
        problem = damage(folder)
        if problem is None:
            return step, folder
        log.warning("checkpoint %s is damaged (%s); trying the one before it", folder, problem)
    return None


def named(path: str | None) -> tuple[int, Path]:
    """Return step and folder of `trainer.resume_from_path`, which must exist."""
    folder = Path(copy_to_local(path or "")).expanduser()
    number = re.fullmatch(r"global_step_(\d+)", folder.name)
    if number is None:
        raise CheckpointError(
            f"trainer.resume_from_path={path} must name a folder global_step_N (resume_mode=resume_path)"
        )
    if not folder.is_dir():
        raise CheckpointError(
            f"trainer.resume_from_path={path} does not exist; name a global_step_N"
        )
    return int(number[1]), folder


def tell_resumed(folder: Path, step: int, total_steps: int | None) -> None:
    """Print where a run resumes, or that no step is left; None means that it takes no steps."""
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
    """Print the location of a run's results and the commands that show them."""
    folder = run.checkpoint(step)
    saved = f"the model is in {folder}" if folder.is_dir() else "no checkpoint of it was saved"
    screen().line(f"done at step {step}: {saved}; the run's metrics and config are in {run.path}")
    screen().line(f"look at it: hone report {shlex.quote(str(run.path))} --out report.html")


def prune(run: RunFolder, keep: int | None, spared: Collection[int] = ()) -> None:
    """Delete the oldest checkpoints beyond `keep`, including those of earlier processes; then copy the rest
    to the run's store.

    The steps in `spared`, and links to checkpoints elsewhere with their targets, are not deleted.
    """
    checkpoints = [pair for pair in run.checkpoints() if not pair[1].is_symlink()]
    keep = max(keep or 0, 0)
    for step, folder in checkpoints[:-keep]:  # 0 keeps all
        if step not in spared:
            _remove(folder)
    remote_checkpoints.push(run, keep, spared)


def write_state(folder: Path, state: Settings) -> None:
    (folder / STATE).write_text(json.dumps(state, default=_plain))


def read_state(folder: Path, *keys: str) -> Settings:
    """Read the state that `write_state` wrote, which must have these keys."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if isinstance(state, dict) and state.keys() >= set(keys):
            return state
    raise CheckpointError(
        f"{folder / STATE} is not the state of a run (it needs {', '.join(keys) or 'a table'}); set "
        "trainer.resume_from_path to another checkpoint"
    )


def _plain(value: T) -> JsonValue:
    """Convert NumPy values, which rows of a data generator may hold."""
    if hasattr(value, "tolist"):
        values: JsonValue = value.tolist()
        return values
    raise TypeError(
        f"a checkpoint cannot hold a {type(value).__name__}; rows, samplers and data generators must "
        "give plain values (numbers, text, lists, dicts) in their state"
    )


def changed_settings(before: Settings, now: Settings, keys: tuple[str, ...]) -> list[str]:
    """Return `key=value, before value` for the first few settings below `keys` that a resumed run changes.

    `keys` are the settings that affect what is computed.
    """
    old, new = dict(flatten(before)), dict(flatten(now))
    below = tuple(f"{key}." for key in keys)
    changed = [
        f"{key}={show_value(new[key])}, before {show_value(old[key])}"
        for key in new
        if f"{key}.".startswith(below)
        and not key.endswith(_DERIVED)
        and key in old
        and _lists(old[key]) != _lists(new[key])
    ]
    if len(changed) > MAX_LINES:
        changed[MAX_LINES - 1 :] = [f"and {len(changed) - MAX_LINES + 1} settings more"]
    return changed


def _lists(value: JsonValue) -> JsonValue:
    """Convert tuples to lists, as YAML does."""
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def _not_saved(run: RunFolder, step: int, number: int) -> str:
    saved = run.checkpoints()
    state = f"{saved[-1][1].name} is untouched" if saved else "there is no earlier checkpoint"
    advice = remedy(number).capitalize()
    if number in (errno.ENOSPC, errno.EDQUOT):
        advice += (
            ", keep fewer checkpoints (trainer.max_actor_ckpt_to_keep; SFT: trainer.max_ckpt_to_keep), or "
            "leave hf_model out of checkpoint.save_contents,"
        )
    return (
        f"{reason(number)}: step {step} could not be saved in {run.path}; {state}. {advice} and start "
        "the same command again: it resumes"
    )
