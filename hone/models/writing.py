"""Writing Hugging Face folders: whole or not at all, and with no progress bar between our lines."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hone.tracking.atomic import make_folder, rename_folder
from hone.tracking.lock import lock_target
from hone.tracking.storage import naming


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write to. It becomes `target`, a new or empty folder, when all is
    written; on an error it goes away, and what a kill leaves of it the next writer removes."""
    target = target.resolve()  # "." has no name
    temporary = target.with_name(f".{target.name}.tmp")
    with lock_target(target):
        shutil.rmtree(temporary, ignore_errors=True)
        make_folder(temporary)
        try:
            with naming(target):
                yield temporary
            if target.exists():
                target.rmdir()
            rename_folder(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """transformers shows none of its own bars inside; ours go on."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
