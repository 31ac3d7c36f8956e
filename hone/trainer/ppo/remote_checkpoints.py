"""Copies a run's checkpoints to the remote store `trainer.default_hdfs_dir`, and back.

A store may have no atomic rename, so the manifest is written last: a copy with a manifest is complete.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Collection

from hone.config import ConfigError
from hone.data.files import copy, file_system, remote_files, upload
from hone.tracking import RunFolder
from hone.tracking.atomic import make_folder, rename_folder
from hone.tracking.manifest import MANIFEST, find_damage

log = logging.getLogger(__name__)

_DISCARDED_MANIFEST = f"{MANIFEST}.earlier"


def check_store(url: str | None) -> None:
    """Raises an error if `url`, the value of `trainer.default_hdfs_dir`, cannot be reached."""
    if url is None:
        return
    try:
        system, path = file_system(url)
        system.exists(path)
    except Exception as error:  # every store has its own errors
        raise ConfigError(
            f"trainer.default_hdfs_dir={url} cannot be reached: {error}; correct it, or leave it out "
            "(checkpoints are in trainer.default_local_dir)"
        ) from error


def push(run: RunFolder, num_to_keep: int, protected: Collection[int] = ()) -> None:
    """Copies checkpoints, config, metrics and tracker ids to the store, and deletes old checkpoints there.

    The store keeps the checkpoints that exist locally, the `protected` steps and the newest `num_to_keep`. If
    `num_to_keep` is 0, the store keeps every checkpoint, else invalidated checkpoints up to the newest step
    are deleted too. An error of the store is logged, since the next call copies all missing files.
    """
    if run.remote is None:
        return
    try:
        # The metrics are copied first, because a run that resumes from a checkpoint needs all earlier lines.
        for file in (run.config_file, run.trackers_file, run.metrics_file):
            if file.is_file():
                upload(file, f"{run.remote}/{file.name}")
        for step, folder in run.checkpoints():
            url, manifest = f"{run.remote}/{folder.name}", folder / MANIFEST
            if manifest.is_file() and _read_manifest(url) != manifest.read_bytes():
                _delete(url)  # an invalidated checkpoint may have other files
                upload(folder, url, last=MANIFEST)
                log.info("checkpoint of step %d copied to %s", step, url)
        if run.latest_file.is_file():
            upload(run.latest_file, f"{run.remote}/{run.latest_file.name}")
        local_steps = {step for step, _ in run.checkpoints()}
        remote_steps = set(complete_steps(run))
        # [-0:] is the whole list, so 0 keeps all.
        kept_steps = {*local_steps, *protected, *sorted(remote_steps)[-num_to_keep:]}
        if num_to_keep:
            newest_step = max(remote_steps, default=-1)
            discarded_steps = _steps_with(run, _DISCARDED_MANIFEST)
            remote_steps.update(step for step in discarded_steps if step <= newest_step)
        for step in remote_steps - kept_steps:
            _delete(f"{run.remote}/global_step_{step}")
    except Exception as error:  # every store has its own errors
        message = "%s: checkpoints could not be copied there (%s); they are still in %s"
        log.warning(message, run.remote, error, run.path)


def pull(run: RunFolder) -> None:
    """Downloads the newest complete checkpoint if it is newer than all intact ones in the run folder."""
    local_checkpoints = reversed(run.checkpoints()) if run.remote is not None else ()
    intact_steps = (step for step, folder in local_checkpoints if find_damage(folder) is None)
    newest_step = next(intact_steps, -1)
    for step in reversed([step for step in complete_steps(run) if step > newest_step]):
        url, final_folder = f"{run.remote}/global_step_{step}", run.checkpoint(step)
        make_folder(run.path)
        temporary = final_folder.with_name(f".{final_folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        copy(url, temporary)
        problem = find_damage(temporary)
        if problem is None:
            shutil.rmtree(final_folder, ignore_errors=True)
            rename_folder(temporary, final_folder)
            for file in (run.config_file, run.trackers_file, run.metrics_file):
                is_replaced = file == run.metrics_file or not file.exists()
                if is_replaced and remote_files(f"{run.remote}/{file.name}"):
                    copy(f"{run.remote}/{file.name}", file)
            log.warning("fetched %s, which is newer than what is in %s", url, run.path)
            return
        shutil.rmtree(temporary)
        log.warning("checkpoint %s is damaged (%s); trying the one before it", url, problem)


def invalidate_after(run: RunFolder, last_step: int) -> None:
    """Renames the manifests of checkpoints after `last_step`, so that no run resumes from them."""
    for step in complete_steps(run):
        if step > last_step:
            url = f"{run.remote}/global_step_{step}"
            system, path = file_system(url)
            with system.open(f"{path}/{_DISCARDED_MANIFEST}", "wb") as file:
                file.write(_read_manifest(url))
            system.rm_file(f"{path}/{MANIFEST}")
            message = "%s is not the checkpoint to resume; its manifest is now %s"
            log.warning(message, url, _DISCARDED_MANIFEST)


def complete_steps(run: RunFolder) -> list[int]:
    """Returns the steps of the complete checkpoints in the run's store, oldest first."""
    return _steps_with(run, MANIFEST)


def _steps_with(run: RunFolder, file_name: str) -> list[int]:
    """Returns the steps of the checkpoints in the store that have this file, oldest first."""
    names = remote_files(run.remote) if run.remote is not None else ()
    matches = (re.fullmatch(rf"global_step_(\d+)/{re.escape(file_name)}", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def _delete(url: str) -> None:
    """Deletes a checkpoint in the store, the manifest first; does nothing if there is none."""
    system, path = file_system(url)
    if system.exists(f"{path}/{MANIFEST}"):
        system.rm_file(f"{path}/{MANIFEST}")
    if system.exists(path):
        system.rm(path, recursive=True)


def _read_manifest(url: str) -> bytes:
    """Returns the manifest of a checkpoint in the store; empty if the checkpoint is not complete."""
    system, path = file_system(f"{url}/{MANIFEST}")
    return bytes(system.cat_file(path)) if system.exists(path) else b""
