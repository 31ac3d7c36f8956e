"""Checkpoints of a run: written under a temporary name, sealed with a manifest, renamed.

A folder without a matching manifest is not a checkpoint: it is skipped with a warning and the one
before it is used. Where none is sound the run stops: starting anew is the user's decision.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hone.config.convert import show_value
from hone.tracking import RunFolder, atomic_write_text
from hone.tracking.atomic import make_folder, rename_folder, sync
from hone.tracking.console import screen
from hone.tracking.lock import require_lock
from hone.tracking.manifest import MANIFEST, damage, seal
from hone.tracking.storage import reason, remedy, storage_failure
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
"""Keys that follow from the length of the run, which a resumed one may change, and from the model."""


class CheckpointError(RuntimeError):
    """No usable checkpoint where one was asked for, or one that could not be written."""


class NoSoundCheckpoint(CheckpointError):
    """There are checkpoints, and none can be resumed; the user decides."""

    changes_nothing = True


@contextmanager
def writing(run: RunFolder, step: int) -> Iterator[Path]:
    """A folder to fill; on success it becomes `global_step_N` and the latest.

    All of it, and the metrics up to it, are on the disk before it gets that name.
    """
    final, temporary = run.checkpoint(step), unfinished(run, step)
    require_lock(run.path)
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(run.path)
    try:
        temporary.mkdir()
        yield temporary
        seal(temporary)
        if run.metrics_file.exists():
            sync(run.metrics_file)
        require_lock(run.path)
        _remove(final)
        rename_folder(temporary, final)
    except BaseException as error:  # torch's own checkpoint errors are no Exception
        shutil.rmtree(temporary, ignore_errors=True)
        number = storage_failure(error)
        if number is None:
            raise
        raise CheckpointError(_not_saved(run, step, number)) from error
    atomic_write_text(run.latest_file, str(step))


def _remove(folder: Path) -> None:
    """Delete a checkpoint, or the link to one; a kill midway leaves nothing that looks whole."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def unfinished(run: RunFolder, step: int) -> Path:
    """The folder that `writing` hands out, for ranks that help to fill it."""
    final = run.checkpoint(step)
    return final.with_name(f".{final.name}{_UNFINISHED}")


def begin(run: RunFolder, mode: str, path: str | None) -> tuple[int, Path] | None:
    """Where a run resumes (`resume_source`); everything later in its folder is put out of the way.

    Later checkpoints are saved as `global_step_N.earlier`; what was logged after that step is forgotten.
    """
    source = resume_source(run, mode, path)
    for folder in run.path.glob(f".global_step_*{_UNFINISHED}"):  # of a killed process
        shutil.rmtree(folder, ignore_errors=True)
    for number, folder in run.checkpoints():
        if source is None or number > source[0]:
            aside = folder.with_name(f"{folder.name}.earlier")
            _remove(aside)
            folder.rename(aside)
            log.warning("%s is not what this run continues from; kept as %s", folder, aside.name)
    run.cut_back(-1 if source is None else source[0])
    return source


def resume_source(run: RunFolder, mode: str, path: str | None) -> tuple[int, Path] | None:
    """Step and folder that `trainer.resume_mode` and `resume_from_path` lead to; None starts anew."""
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
    """The latest checkpoint whose files are all there and whole."""
    for step, folder in reversed(run.checkpoints()):
        problem = damage(folder)
        if problem is None:
            return step, folder
        log.warning("checkpoint %s is damaged (%s); trying the one before it", folder, problem)
    return None


def named(path: str | None) -> tuple[int, Path]:
    """Step and folder of `trainer.resume_from_path`, which must exist."""
    folder = Path(path or "").expanduser()
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
    """Print where a run resumes, or that no step is left; None: it takes no steps."""
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
    """Print where the results of a run lie, and how to look at them."""
    folder = run.checkpoint(step)
    saved = f"the model is in {folder}" if folder.is_dir() else "no checkpoint of it was saved"
    screen().line(f"done at step {step}: {saved}; the run's metrics and config are in {run.path}")
    screen().line(f"look at it: hone report {shlex.quote(str(run.path))} --out report.html")


def prune(run: RunFolder, keep: int | None) -> None:
    """Delete the oldest checkpoints beyond `keep`, also those of earlier processes.

    A link to a checkpoint elsewhere is left alone, and so is what it leads to.
    """
    if keep is None or keep < 1:
        return
    own = [folder for _, folder in run.checkpoints() if not folder.is_symlink()]
    for folder in own[:-keep]:
        _remove(folder)


def write_state(folder: Path, state: Settings) -> None:
    (folder / STATE).write_text(json.dumps(state, default=_plain))


def read_state(folder: Path, *keys: str) -> Settings:
    """What `write_state` wrote; it has these keys."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if isinstance(state, dict) and state.keys() >= set(keys):
            return state
    raise CheckpointError(
        f"{folder / STATE} is not the state of a run (it needs {', '.join(keys) or 'a table'}); set "
        "trainer.resume_from_path to another checkpoint"
    )


def _plain(value: T) -> JsonValue:
    """The rows of a data generator may hold numpy values."""
    if hasattr(value, "tolist"):
        values: JsonValue = value.tolist()
        return values
    raise TypeError(
        f"a checkpoint cannot hold a {type(value).__name__}; rows, samplers and data generators must "
        "give plain values (numbers, text, lists, dicts) in their state"
    )


def changed_settings(before: Settings, now: Settings, keys: tuple[str, ...]) -> list[str]:
    """`key=value, before value` for each setting below `keys` that a resumed run changes, a few at most.

    `keys` are those that decide what is computed.
    """
    old, new = dict(_leaves(before)), dict(_leaves(now))
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


def _leaves(tree: Settings, prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _lists(value: JsonValue) -> JsonValue:
    """YAML has lists where a config has tuples."""
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def _not_saved(run: RunFolder, step: int, number: int) -> str:
    saved = run.checkpoints()
    left = f"{saved[-1][1].name} is untouched" if saved else "there is no earlier checkpoint"
    advice = remedy(number).capitalize()
    if number in (errno.ENOSPC, errno.EDQUOT):
        advice += (
            ", keep fewer checkpoints (trainer.max_actor_ckpt_to_keep; SFT: trainer.max_ckpt_to_keep), or "
            "leave hf_model out of checkpoint.save_contents,"
        )
    return (
        f"{reason(number)}: step {step} could not be saved in {run.path}; {left}. {advice} and start "
        "the same command again: it resumes"
    )
