"""Writing Hugging Face folders without another library's progress bar between our lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
