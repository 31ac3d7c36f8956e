"""Writes Hugging Face folders atomically and without the progress bars of transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hone.tracking.atomic import add_file_name_to_errors, make_folder, rename_folder
from hone.tracking.lock import lock_target


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder and renames it to `target` on success; `target` must be new or empty.

    An error removes the temporary folder. If the process is killed, the next call for `target` removes it.
    """
    target = target.resolve()  # Path(".") has no name
    temporary = target.with_name(f".{target.name}.tmp")
    with lock_target(target):
        shutil.rmtree(temporary, ignore_errors=True)
        make_folder(temporary)
        try:
            with add_file_name_to_errors(target):
                yield temporary
            if target.exists():
                target.rmdir()
            rename_folder(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Disables the progress bars of transformers inside the block, but not those of hone."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
