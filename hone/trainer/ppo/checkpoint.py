"""Writes checkpoints to a temporary folder, adds a manifest, and renames the folder.

A run resumes from the newest checkpoint whose files match its manifest. If all checkpoints are damaged, the
run stops, since only the user may decide to start over.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hone.config import PPOTrainerConfig, config_to_dict
from hone.config.convert import show_value
from hone.data.files import copy_to_local
from hone.data.loader import Dataset, is_stateful
from hone.engine.saved_state import METADATA_FILE, read_metadata
from hone.errors import UserError
from hone.redaction import redact
from hone.tracking import RunFolder, atomic_write_text
from hone.tracking.atomic import STORAGE_ERRORS, make_folder, rename_folder, storage_errno, sync
from hone.tracking.console import hone_command, screen
from hone.tracking.contract import flatten
from hone.tracking.lock import raise_if_lock_lost
from hone.tracking.manifest import MANIFEST, find_damage, require_files, write_manifest
from hone.trainer.ppo import remote_checkpoints
from hone.types import JsonValue, Settings

if TYPE_CHECKING:
    from hone.trainer.ppo.plan import Plan

T = TypeVar("T")
log = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
_TEMPORARY_SUFFIX = ".tmp"
_MODEL_KEY = "actor_rollout_ref.model.path"
MAX_CHANGES_SHOWN = 6


def _keys(block: str, names: str) -> list[str]:
    """Returns the full names of keys of a block."""
    return [f"{block}.{name}" for name in names.split()]


PPO_KEYS = (
    *("algorithm", "custom_reward_function", "reward_model", "critic.optim", "trainer.seed"),
    *_keys("actor_rollout_ref.actor", "optim policy_loss loss_agg_mode entropy_coeff grad_clip"),
    *_keys("actor_rollout_ref.actor", "clip_ratio clip_ratio_low clip_ratio_high ppo_epochs"),
    *_keys("actor_rollout_ref.actor", "use_kl_loss kl_loss_coef kl_loss_type ppo_mini_batch_size"),
    *_keys("actor_rollout_ref.rollout", "n temperature top_k top_p min_p multi_turn"),
    *_keys("actor_rollout_ref.rollout", "agent.default_agent_loop"),
    *_keys("data", "train_batch_size max_prompt_length max_response_length"),
    *_keys("data", "truncation prompt_format apply_chat_template_kwargs"),
)
"""Keys and blocks whose changes are printed when a run resumes."""
_USER_NAMED_KEYS = (
    "custom_reward_function.reward_kwargs.",
    "data.apply_chat_template_kwargs.",
    "reward_model.turn_reward_coef.",
    "reward_model.trajectory_reward_coef.",
    "reward_model.scores.",
    "reward_model.score_kwargs.",
    "reward_model.reward_kwargs.extra.",
)
"""Blocks whose keys are names that the user chose."""
_DERIVED_KEYS = ("total_training_steps", "input_tokenizer")
"""Keys that are derived from the length of the run or from the model; their changes are not reported."""


class CheckpointError(UserError, RuntimeError):
    """Raised when a checkpoint cannot be loaded or written."""


class NoValidCheckpoint(CheckpointError):
    """Raised when checkpoints exist but all are damaged."""

    skips_error_log = True
    """No traceback is written to the run folder."""


@contextmanager
def atomic_folder(run: RunFolder, step: int) -> Iterator[Path]:
    """Yields a temporary folder, which is renamed to `global_step_N` when the block has finished.

    The checkpoint and the metrics file are flushed to disk before the rename.
    """
    final_folder, temporary = run.checkpoint(step), temporary_folder(run, step)
    raise_if_lock_lost(run.path)
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(run.path)
    try:
        temporary.mkdir()
        yield temporary
        shard_files = {
            metadata_file.with_name(shard.relative_path)
            for metadata_file in temporary.rglob(METADATA_FILE)
            for shard in (read_metadata(metadata_file.parent).storage_data or {}).values()
        }
        require_files(temporary, shard_files)
        write_manifest(temporary)
        if run.metrics_file.exists():
            sync(run.metrics_file)
        raise_if_lock_lost(run.path)
        _remove_checkpoint(final_folder)
        rename_folder(temporary, final_folder)
    except BaseException as error:  # torch's checkpoint errors do not derive from Exception
        shutil.rmtree(temporary, ignore_errors=True)
        error_number = storage_errno(error)
        if error_number is None:
            raise
        raise CheckpointError(_save_error_message(run, step, error_number)) from error
    atomic_write_text(run.latest_file, str(step))


def _remove_checkpoint(folder: Path) -> None:
    """Deletes a checkpoint, or a link to one; without its manifest, a half-deleted checkpoint is invalid."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def temporary_folder(run: RunFolder, step: int) -> Path:
    """Returns the folder that `atomic_folder` yields; every rank writes its part of the checkpoint there."""
    final_folder = run.checkpoint(step)
    return final_folder.with_name(f".{final_folder.name}{_TEMPORARY_SUFFIX}")


def find_resume_source(run: RunFolder, mode: str, path: str | None) -> tuple[int, Path] | None:
    """Returns the result of `resume_source`, after downloading a newer checkpoint of the remote store.

    Deletes the unfinished checkpoints of killed processes if there is no error.
    """
    if mode == "auto":
        remote_checkpoints.pull(run)
    source = resume_source(run, mode, path)
    if source is None and mode == "auto" and (steps := remote_checkpoints.complete_steps(run)):
        raise NoValidCheckpoint(
            f"{run.remote} has {len(steps)} checkpoints, but all of them are damaged; nothing was changed. "
            "Restore one, set another trainer.default_hdfs_dir, or start anew with "
            "trainer.resume_mode=disable"
        )
    for folder in run.path.glob(f".global_step_*{_TEMPORARY_SUFFIX}"):
        shutil.rmtree(folder, ignore_errors=True)
    return source


def discard_after(run: RunFolder, source: tuple[int, Path] | None) -> None:
    """Discards the files of the steps after `source` (step and folder); None discards the files of all steps.

    Later checkpoints are renamed to `global_step_N.earlier`, and later metrics are deleted.
    """
    last_step = -1 if source is None else source[0]
    remote_checkpoints.invalidate_after(run, last_step)
    for step, folder in run.checkpoints():
        if step > last_step:
            new_path = folder.with_name(f"{folder.name}.earlier")
            _remove_checkpoint(new_path)
            folder.rename(new_path)
            log.warning("%s is not the checkpoint to resume; renamed to %s", folder, new_path.name)
    if not run.checkpoint(last_step).is_dir():
        run.latest_file.unlink(missing_ok=True)
    elif run.latest_file.exists():
        atomic_write_text(run.latest_file, str(last_step))
    run.truncate_after(last_step)


def resume_source(run: RunFolder, mode: str, path: str | None) -> tuple[int, Path] | None:
    """Returns the step and folder of the checkpoint to resume from; None means a new run.

    `mode` is `trainer.resume_mode` and `path` is `trainer.resume_from_path`.
    """
    if mode == "disable":
        return None
    if mode != "auto":
        step, folder = checkpoint_from_path(path)
        if (problem := find_damage(folder)) is not None:
            raise CheckpointError(f"{folder} cannot be resumed: {problem}")
        return step, folder
    source = newest_valid_checkpoint(run)
    if source is None and (folders := run.checkpoints()):
        raise NoValidCheckpoint(
            f"{run.path} has {len(folders)} checkpoints, but none can be resumed "
            f"({folders[-1][1].name}: {find_damage(folders[-1][1])}); nothing was changed. Restore one "
            "from a copy, set another trainer.default_local_dir, or start anew here with "
            "trainer.resume_mode=disable, which keeps them as global_step_N.earlier and erases the "
            "metrics and rollouts"
        )
    return source


def newest_valid_checkpoint(run: RunFolder) -> tuple[int, Path] | None:
    """Returns the step and folder of the newest checkpoint whose files all match its manifest."""
    for step, folder in reversed(run.checkpoints()):
        problem = find_damage(folder)
        if problem is None:
            return step, folder
        log.warning("checkpoint %s is damaged (%s); trying the one before it", folder, problem)
    return None


def checkpoint_from_path(path: str | None) -> tuple[int, Path]:
    """Returns the step and folder of `trainer.resume_from_path`; raises an error if there is none."""
    folder = Path(copy_to_local(path or "")).expanduser()
    match = re.fullmatch(r"global_step_(\d+)", folder.name)
    problem = "does not exist; name a global_step_N"
    if match is None:
        problem = "must name a folder global_step_N (resume_mode=resume_path)"
    if match is None or not folder.is_dir():
        raise CheckpointError(f"trainer.resume_from_path={path} {problem}")
    return int(match[1]), folder


def print_resumed(folder: Path, step: int, total_steps: int | None) -> None:
    """Prints the checkpoint that a run resumes from, or that the run is complete.

    `total_steps` is None for a run that only validates.
    """
    if total_steps is not None and step >= total_steps:
        screen().line(
            f"already at step {step} of {total_steps}: nothing to do ({folder}); a larger "
            "trainer.total_training_steps (or total_epochs) goes on from there, "
            "trainer.resume_mode=disable starts anew; a run with other settings needs another "
            "trainer.default_local_dir"
        )
    else:
        screen().line(f"resumed from {folder}")


def print_result(run: RunFolder, step: int) -> None:
    """Prints the location of a run's results and the commands that show them."""
    folder = run.checkpoint(step)
    model = f"the model is in {folder}" if folder.is_dir() else "no checkpoint of it was saved"
    screen().line(f"done at step {step}: {model}; the run's metrics and config are in {run.path}")
    report = hone_command("report", str(run.path), "--out", "report.html")
    screen().line(f"look at it: {report}")


def prune(run: RunFolder, num_to_keep: int | None, protected: Collection[int] = ()) -> None:
    """Deletes all but the newest `num_to_keep` checkpoints, and updates the remote store.

    With `num_to_keep` 0 or None, nothing is deleted. Symbolic links and the steps in `protected` also remain.
    """
    checkpoints = [pair for pair in run.checkpoints() if not pair[1].is_symlink()]
    num_to_keep = max(num_to_keep or 0, 0)
    for step, folder in checkpoints[:-num_to_keep]:  # [:-0] is empty, so 0 keeps all
        if step not in protected:
            _remove_checkpoint(folder)
    remote_checkpoints.push(run, num_to_keep, protected)


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes the state of the trainer (step, loader, KL controller and the like) as JSON."""
    (folder / STATE_FILE).write_text(json.dumps(state, default=_to_json))


def read_state(folder: Path, *keys: str) -> dict[str, Any]:
    """Returns the state that `write_state` wrote; raises an error if one of `keys` is missing."""
    file = folder / STATE_FILE
    with contextlib.suppress(OSError, ValueError, RecursionError):
        state = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(state, dict) and state.keys() >= set(keys):
            return state
    raise CheckpointError(
        f"{file} is not the state of a run (it needs {', '.join(keys) or 'a table'}); set "
        "trainer.resume_from_path to another checkpoint"
    )


def _to_json(value: T) -> JsonValue:
    """Converts a NumPy value, which the state of a data generator may contain."""
    if hasattr(value, "tolist"):
        json_value: JsonValue = value.tolist()
        return json_value
    raise TypeError(
        f"a checkpoint cannot hold a {type(value).__name__}; rows, samplers and data generators must "
        "give plain values (numbers, text, lists, dicts) in their state"
    )


def changed_settings(
    old_config: Settings, new_config: Settings, keys: tuple[str, ...]
) -> list[str]:
    """Returns `key=new value, before old value` for the first few settings below `keys` that differ.

    A key that only one config has is a change if the user chose its name; others are of another version.
    """
    old_values, new_values = (dict(flatten(redact(config))) for config in (old_config, new_config))
    prefixes = tuple(f"{key}." for key in keys)
    changes = []
    for key in dict.fromkeys([*new_values, *old_values]):
        if not f"{key}.".startswith(prefixes) or key.endswith(_DERIVED_KEYS):
            continue
        is_in_both = key in old_values and key in new_values
        if not is_in_both and not key.startswith(_USER_NAMED_KEYS):
            continue
        old_value, new_value = old_values.get(key), new_values.get(key)
        if not is_in_both or _to_lists(old_value) != _to_lists(new_value):
            new_text = f"={show_value(new_value)}" if key in new_values else " not set"
            old_text = show_value(old_value) if key in old_values else "not set"
            changes.append(f"{key}{new_text}, before {old_text}")
    if len(changes) > MAX_CHANGES_SHOWN:  # the last line counts the other changes
        num_hidden = len(changes) - MAX_CHANGES_SHOWN + 1
        changes[MAX_CHANGES_SHOWN - 1 :] = [f"and {num_hidden} settings more"]
    return changes


def _to_lists(value: JsonValue) -> JsonValue:
    """Converts tuples to lists, as YAML does."""
    return [_to_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def _save_error_message(run: RunFolder, step: int, error_number: int) -> str:
    names = [folder.name for _, folder in run.checkpoints()]
    earlier = f"{names[-1]} is untouched" if names else "there is no earlier checkpoint"
    cause, remedy = STORAGE_ERRORS[error_number]
    advice = remedy.capitalize()
    if error_number in (errno.ENOSPC, errno.EDQUOT):
        advice += (
            ", keep fewer checkpoints (trainer.max_actor_ckpt_to_keep; SFT: trainer.max_ckpt_to_keep), or "
            "leave hf_model out of checkpoint.save_contents,"
        )
    return (
        f"{cause}: step {step} could not be saved in {run.path}; {earlier}. {advice} and start "
        "the same command again: it resumes with trainer.resume_mode=auto (the default)"
    )


class EarlierRun:
    """The run that wrote the checkpoint to resume from; `checkpoint` is None for a new run."""

    def __init__(self, config: PPOTrainerConfig) -> None:
        self.config, trainer = config, config.trainer
        self.checkpoint: Path | None = None
        self._settings: Settings = {}
        if trainer.resume_mode == "auto":
            newest = RunFolder(trainer.default_local_dir).checkpoints()[-1:]
            self.checkpoint = newest[0][1] if newest else None
        elif trainer.resume_mode != "disable":
            self.checkpoint = checkpoint_from_path(trainer.resume_from_path)[1]
        if self.checkpoint is not None:
            self._settings = RunFolder(self.checkpoint.parent).read_config_or_empty()

    def problems(self, plan: Plan) -> Iterator[str]:
        """Yields the reasons why this run cannot resume from the checkpoint."""
        if self.checkpoint is None:
            return
        has_actor, has_critic, has_reward_model = (
            (self.checkpoint / name).is_dir() for name in ("actor", "critic", "reward")
        )
        if plan.needs_implicit_rewards and has_actor and not has_reward_model:
            yield (
                f"{self.checkpoint} has no reward model: the run that wrote it trained none, but "
                "reward_model.type=prime needs one; start in another trainer.default_local_dir with its "
                f"model ({_MODEL_KEY}={self.checkpoint})"
            )
        if plan.needs_critic and has_actor and not has_critic:
            estimator = self._settings.get("algorithm", {}).get("adv_estimator")
            setting = f" (algorithm.adv_estimator={estimator})" if estimator else ""
            yield (
                f"{self.checkpoint} has no critic: the run that wrote it{setting} trained none, but "
                f"algorithm.adv_estimator={self.config.algorithm.adv_estimator} needs one; keep the "
                "estimator, or start in another trainer.default_local_dir with its model "
                f"({_MODEL_KEY}={self.checkpoint})"
            )

    def require_same_data(self, dataset: Dataset | None) -> None:
        """Raises an error if `dataset` is not the data set that the checkpoint was trained on."""
        if self.checkpoint is None or not is_stateful(dataset):
            return
        with contextlib.suppress(CheckpointError):  # loading the checkpoint reports an error
            state = read_state(self.checkpoint, "loader")["loader"]
            if isinstance(state, dict) and state.get("dataset") is not None:
                dataset.load_state_dict(state["dataset"])

    def changes(self, total_steps: int) -> Iterator[str]:
        """Yields one line per setting that differs from the earlier run."""
        old_config = self._settings
        if self.checkpoint is None or not old_config or self.config.trainer.val_only:
            return
        if checkpoint_from_path(str(self.checkpoint))[0] >= total_steps:
            return
        path = self.config.actor_rollout_ref.model.path
        base_model = old_config.get("actor_rollout_ref", {}).get("model", {}).get("path", path)
        if base_model not in (path, None):
            yield (
                f"{self.checkpoint} was trained from {_MODEL_KEY}={base_model}, not from {path}; to train "
                f"{path}, set another trainer.default_local_dir"
            )
        changes = changed_settings(old_config, config_to_dict(self.config), PPO_KEYS)
        yield from (f"from {self.checkpoint.name} on: {change}" for change in changes)
