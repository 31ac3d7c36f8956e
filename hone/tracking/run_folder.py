"""The run folder: config, metrics, rollouts and checkpoints under fixed names."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hone.redaction import redact
from hone.tracking.atomic import atomic_write_bytes, atomic_write_text, remove_leftovers
from hone.tracking.contract import RunInfo
from hone.tracking.metrics_file import MetricsFile
from hone.types import Fields, Settings


def get_checkpoint_tracker_filename(root_path: str) -> str:
    """Returns the file that names the latest checkpoint of a run; the function name is verl's."""
    return str(RunFolder(root_path).latest_file)


def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
    """Returns the folder of the latest checkpoint, or None; the function name is verl's."""
    if path is None or not (file := RunFolder(path).latest_file).is_file():
        return None
    folder = file.parent / directory_format.format(int(file.read_text(encoding="utf-8")))
    return str(folder) if folder.exists() else None


class RunFolder:
    """The paths inside a run folder; copies of the checkpoints go to the folder `remote`
    (`trainer.default_hdfs_dir`). The first write creates the folder."""

    def __init__(self, path: str | os.PathLike[str], remote: str | None = None) -> None:
        self.path = Path(path).expanduser()
        self.remote = None if remote is None else remote.rstrip("/")
        self.config_file = self.path / "config.yaml"
        self.config_origins_file = self.path / "config_origins.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.trackers_file = self.path / "trackers.json"
        self.rollouts = self.path / "rollouts"
        self.validation = self.path / "validation"
        self.latest_file = self.path / "latest_checkpointed_iteration.txt"

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def metrics(self) -> MetricsFile:
        return MetricsFile(self.metrics_file)

    def validation_file(self, step: int) -> Path:
        return self.validation / f"step_{step}.parquet"

    def checkpoint(self, step: int) -> Path:
        return self.path / f"global_step_{step}"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Returns the step and folder of every finished checkpoint, oldest first."""
        entries = _list_numbered(self.path, r"global_step_(\d+)")
        return [(step, path) for step, path in entries if path.is_dir()]

    def write_config(self, config: Settings, origins: Mapping[str, str] | None = None) -> None:
        """Writes the config without its secrets; a different earlier config becomes `config.N.yaml`.

        `origins` has the file or command line that set each key.
        """
        import yaml

        text = yaml.safe_dump(redact(config), sort_keys=False, allow_unicode=True)
        old_bytes = self.config_file.read_bytes() if self.config_file.exists() else text.encode()
        if old_bytes != text.encode():
            earlier_files = _list_numbered(self.path, r"config\.(\d+)\.yaml")
            number = earlier_files[-1][0] + 1 if earlier_files else 1
            atomic_write_bytes(self.path / f"config.{number}.yaml", old_bytes)
        atomic_write_text(self.config_file, text)
        if origins is not None:
            atomic_write_text(self.config_origins_file, json.dumps(dict(origins), indent=1))

    def read_config(self) -> Fields:
        """Returns the resolved config; empty if none was written."""
        import yaml

        if not self.config_file.exists():
            return {}
        return yaml.safe_load(self.config_file.read_text(encoding="utf-8")) or {}

    def read_config_or_empty(self) -> Fields:
        """Returns the resolved config; empty if the file cannot be read."""
        import yaml

        try:
            config = self.read_config()
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            return {}
        return config if isinstance(config, dict) else {}

    def read_config_origins(self) -> dict[str, str]:
        """Returns the file or command line that set each key; empty if none was written."""
        if not self.config_origins_file.exists():
            return {}
        return json.loads(self.config_origins_file.read_text(encoding="utf-8"))

    def experiment_name(self) -> str | None:
        """Returns `trainer.experiment_name`; None if the run has its default value or cannot be read."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            trainer = self.read_config_or_empty().get("trainer")
            if (
                isinstance(trainer, dict)
                and "trainer.experiment_name" in self.read_config_origins()
            ):
                return str(trainer.get("experiment_name"))
        return None

    def truncate_after(self, step: int) -> None:
        """Removes metrics, rollouts and validations after `step`; checkpoints are kept."""
        for folder in (self.path, self.rollouts, self.validation):
            remove_leftovers(folder)
        self.metrics.truncate_after(step)
        for file_step, file in (*step_files(self.rollouts), *step_files(self.validation)):
            if file_step > step:
                file.unlink(missing_ok=True)

    def run_ids_by_tracker(self) -> dict[str, str]:
        """Returns the saved ids that trackers gave this run, such as the wandb run id, by tracker."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            ids = json.loads(self.trackers_file.read_text(encoding="utf-8"))
            if isinstance(ids, dict):
                return {name: run_id for name, run_id in ids.items() if isinstance(run_id, str)}
        return {}

    def save_run_id(self, tracker: str, run_id: str) -> None:
        ids = {**self.run_ids_by_tracker(), tracker: run_id}
        atomic_write_text(self.trackers_file, json.dumps(ids, indent=1, sort_keys=True))


def resumed_run_id(run: RunInfo, tracker: str) -> str | None:
    """Returns the id that the tracker gave the run which this process resumes; None for a fresh run."""
    if run.folder is None or run.resumed_from is None:
        return None
    return RunFolder(run.folder).run_ids_by_tracker().get(tracker)


def save_run_id(run: RunInfo, tracker: str, run_id: str) -> None:
    """Saves the id that the tracker gave this run, if there is a run folder."""
    if run.folder is not None:
        RunFolder(run.folder).save_run_id(tracker, run_id)


def step_files(folder: Path) -> list[tuple[int, Path]]:
    """Returns the step and path of every `step_N.parquet` in a folder, ordered by step."""
    return _list_numbered(folder, r"step_(\d+)\.parquet")


def _list_numbered(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    """Returns the number and path of every entry that matches the pattern, ordered by number."""
    entries = folder.iterdir() if folder.is_dir() else ()
    matches = ((re.fullmatch(pattern, path.name), path) for path in entries)
    return sorted((int(match[1]), path) for match, path in matches if match)


def unique_labels(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Returns a label per run: the folder's name, with the parent's name or a number if names repeat."""
    resolved_paths = [Path(path).resolve() for path in paths]
    folders = [path.parent if path.is_file() else path for path in resolved_paths]
    labels = [folder.name for folder in folders]
    if len(set(labels)) < len(labels):
        labels = [f"{folder.parent.name}/{folder.name}" for folder in folders]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({number})" for number, label in enumerate(labels, start=1)]
    return labels
