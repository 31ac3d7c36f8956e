"""A run is a folder: its config, its metrics, its rollouts and its checkpoints, by fixed names.

Knows where things lie and how they are written safely; what is in them is their writers' matter.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from hone.tracking.atomic import atomic_write_bytes, atomic_write_text, remove_leftovers
from hone.tracking.metrics_file import MetricsFile
from hone.types import Row, Settings

_STEP_FILE = re.compile(r"step_(\d+)\.parquet")
_CHECKPOINT = re.compile(r"global_step_(\d+)")


def get_checkpoint_tracker_filename(root_path: str) -> str:
    """The file that names the latest checkpoint of a run."""
    return str(RunFolder(root_path).latest_file)


def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
    """The folder of the latest checkpoint, under verl's name; None where there is none."""
    file = None if path is None else RunFolder(path).latest_file
    if path is None or file is None or not file.is_file():
        return None
    folder = Path(path) / directory_format.format(int(file.read_text(encoding="utf-8")))
    return str(folder) if folder.exists() else None


class RunFolder:
    """The names inside a run folder; the folder itself appears with the first write."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.origins_file = self.path / "config_origins.json"
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

    def rollout_file(self, step: int) -> Path:
        return self.rollouts / f"step_{step}.parquet"

    def validation_file(self, step: int) -> Path:
        return self.validation / f"step_{step}.parquet"

    def checkpoint(self, step: int) -> Path:
        return self.path / f"global_step_{step}"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Step and folder of every finished checkpoint, oldest first."""
        found = ((_CHECKPOINT.fullmatch(p.name), p) for p in _entries(self.path) if p.is_dir())
        return sorted((int(match[1]), path) for match, path in found if match)

    def rollout_files(self) -> list[tuple[int, Path]]:
        return step_files(self.rollouts)

    def validation_files(self) -> list[tuple[int, Path]]:
        return step_files(self.validation)

    def write_config(self, config: Settings, origins: Mapping[str, str] | None = None) -> None:
        """Keep the resolved config, and where each dotted key came from (file, argument, default).

        A resumed run whose config differs keeps the earlier one as `config.1.yaml`, `.2`, …: the
        steps before were made with it.
        """
        import yaml

        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        if self.config_file.exists():
            before = self.config_file.read_bytes()  # whatever it holds, it is kept
            if before != text.encode():
                earlier = len(list(self.path.glob("config.*.yaml"))) + 1
                atomic_write_bytes(self.path / f"config.{earlier}.yaml", before)
        atomic_write_text(self.config_file, text)
        if origins is not None:
            atomic_write_text(self.origins_file, json.dumps(dict(origins), indent=1))

    def read_config(self) -> Row:
        """The resolved config; empty when none was written."""
        import yaml

        if not self.config_file.exists():
            return {}
        return yaml.safe_load(self.config_file.read_text(encoding="utf-8")) or {}

    def earlier_config(self) -> Row:
        """The resolved config where it can be read, else nothing: it is looked at, not relied on."""
        import yaml

        try:
            config = self.read_config()
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            return {}
        return config if isinstance(config, dict) else {}

    def read_origins(self) -> dict[str, str]:
        if not self.origins_file.exists():
            return {}
        return json.loads(self.origins_file.read_text(encoding="utf-8"))

    def cut_back(self, step: int) -> None:
        """Forget everything logged after `step`: what a run resumed from its checkpoint redoes.

        Checkpoints are left alone: the caller that resumes judges which of them is sound.
        """
        for folder in (self.path, self.rollouts, self.validation):
            remove_leftovers(folder)
        self.metrics.cut_back(step)
        for at, file in (*self.rollout_files(), *self.validation_files()):
            if at > step:
                file.unlink(missing_ok=True)

    def tracker_id(self, tracker: str) -> str | None:
        """The id a remote tracker gave this run, so that a resumed process continues it."""
        return self._tracker_ids().get(tracker)

    def keep_tracker_id(self, tracker: str, run_id: str) -> None:
        ids = {**self._tracker_ids(), tracker: run_id}
        atomic_write_text(self.trackers_file, json.dumps(ids, indent=1, sort_keys=True))

    def _tracker_ids(self) -> dict[str, str]:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            ids = json.loads(self.trackers_file.read_text(encoding="utf-8"))
            if isinstance(ids, dict):
                return {name: run_id for name, run_id in ids.items() if isinstance(run_id, str)}
        return {}


def step_files(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of every `step_N.parquet` in a folder, in order of steps."""
    found = ((_STEP_FILE.fullmatch(p.name), p) for p in _entries(folder))
    return sorted((int(match[1]), path) for match, path in found if match)


def _entries(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() else iter(())
