"""Resolves the path of a model, a training checkpoint or a run to a folder with `config.json`.

A training checkpoint contains a Hugging Face export, so a run can start from the folder of another run.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from hone.data.files import copy_to_local
from hone.errors import UserError
from hone.tracking.console import screen
from hone.tracking.manifest import MANIFEST, enclosing_checkpoint, find_damage

log = logging.getLogger(__name__)

EXPORT_FOLDER = "huggingface"
MAX_NAMED_RUNS = 5
_STEP_FOLDER = re.compile(r"(?:global_step_|checkpoint-)(\d+)$")


class ModelNotFound(UserError, ValueError):
    """The requested `path` does not exist or is a damaged checkpoint."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


def resolve_model_path(path: str) -> str:
    """Returns the folder with `config.json`: the path, or the export in a checkpoint or run folder.

    A name that is not a local folder may be a hub name and is returned unchanged. In a run folder, damaged
    checkpoints are skipped in favour of earlier ones; a damaged checkpoint given as the path raises.
    """
    try:
        path = copy_to_local(path)
    except OSError as error:
        raise ModelNotFound(f"model path {path} cannot be read: {error}", str(path)) from error
    folder = Path(path).expanduser()
    if not path or not folder.exists():
        if not path or str(path).startswith(("/", "~", ".")) or str(path).count("/") > 1:
            reason = f"model path {path} does not exist" if path else "the model path is empty"
            raise ModelNotFound(f"{reason}; give a folder or a hub name", str(path))
        return path
    if (folder / "config.json").is_file():
        checkpoint = enclosing_checkpoint(folder)
        has_manifest = checkpoint is not None and (checkpoint / MANIFEST).is_file()
        if has_manifest and (problem := _checkpoint_damage(folder)) is not None:
            raise ModelNotFound(f"{folder} is in a damaged checkpoint: {problem}", str(path))
        return str(folder)
    problems: list[str] = []
    for candidate in _exports(folder):
        problem = _checkpoint_damage(candidate)
        if problem is None:
            for skipped_problem in problems:
                _warn_once(f"{skipped_problem}; using {candidate}")
            if folder not in (candidate.parent, candidate.parent.parent):
                _print_once(f"{folder} is a run folder: its newest checkpoint {candidate} is used")
            return str(candidate)
        problems.append(f"{candidate.parent} is a damaged checkpoint: {problem}")
    if problems:
        raise ModelNotFound("; ".join(problems), str(path))
    runs = sorted({str(step_folder.parent) for step_folder in _step_folders(folder, "**/*")})
    if runs:
        more = ", …" if runs[MAX_NAMED_RUNS:] else ""
        raise ModelNotFound(
            f"{folder} holds no model, but {len(runs)} run{'s' * (len(runs) > 1)}: "
            f"{', '.join(runs[:MAX_NAMED_RUNS])}{more}; name one of them",
            str(path),
        )
    raise ModelNotFound(
        f"{folder} holds no model: expected config.json there, or a checkpoint with "
        f"actor/{EXPORT_FOLDER}/config.json inside",
        str(path),
    )


def _exports(folder: Path) -> Iterator[Path]:
    """Yields the exports in a checkpoint or run folder, the latest step's first."""
    candidates = [folder / EXPORT_FOLDER, folder / "actor" / EXPORT_FOLDER]
    for step_folder in _step_folders(folder, "*"):
        candidates += [step_folder / "actor" / EXPORT_FOLDER, step_folder / EXPORT_FOLDER]
    return (path for path in candidates if (path / "config.json").is_file())


def _step_folders(folder: Path, pattern: str) -> list[Path]:
    """Returns the checkpoint folders that match a glob pattern, the latest step first."""
    steps = [
        (int(match[1]), path)
        for path in folder.glob(pattern)
        if (match := _STEP_FOLDER.search(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(steps, reverse=True)]


def _checkpoint_damage(export: Path) -> str | None:
    """Returns a description of the damage to the checkpoint that contains an export, or None."""
    checkpoint = enclosing_checkpoint(export)
    if checkpoint is None:
        return None
    problem = find_damage(checkpoint, export)
    if problem is not None and not (checkpoint / MANIFEST).is_file():
        problem += f" (to use the model as it is, name {export})"
    return problem


@functools.cache
def _print_once(text: str) -> None:
    screen().line(text)


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)
