"""Describes a scorer in messages: the name of the scorer, and the line of an error in its file."""

from __future__ import annotations

import sysconfig
import traceback
from functools import partial
from pathlib import Path

from hone.plugins import code_of, definition_location, unwrap_function
from hone.redaction import redact_text
from hone.text import error_text, printable
from hone.types import Function, Settings

_PACKAGE_FOLDER = str(Path(__file__).parents[1])
_LIBRARY_FOLDERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def describe(function: Function) -> str:
    """Returns `NAME of FILE` for a function from a user's file, else `MODULE.NAME`."""
    unwrapped = unwrap_function(function)
    name = getattr(unwrapped, "__qualname__", type(unwrapped).__qualname__)
    module = getattr(unwrapped, "__module__", "?")
    code = code_of(unwrapped)
    if code is not None and str(module).startswith(("hone_extern_", "__main__")):
        return f"{name} of {code.co_filename}"
    return f"{module}.{name}"


def error_location(error: BaseException, function: Function) -> str | None:
    """Returns `FILE:LINE` of the innermost frame in the user's file, or of the definition."""
    frames = traceback.extract_tb(error.__traceback__)
    code = code_of(function)
    if code is None or code.co_filename.startswith(_PACKAGE_FOLDER):
        # `function` is hone's own, but may have called a registered rule in the user's file.
        non_user_folders = (_PACKAGE_FOLDER, *_LIBRARY_FOLDERS)
        user_frames = [frame for frame in frames if not frame.filename.startswith(non_user_folders)]
        user_frames = user_frames or frames
    else:
        user_frames = [frame for frame in frames if frame.filename == code.co_filename]
    if not user_frames:
        return definition_location(function)
    return f"{user_frames[-1].filename}:{user_frames[-1].lineno}"


def error_message(error: BaseException, function: Function, options: Settings | None) -> str:
    """Returns the message of an exception of a scorer, without the secrets in the scorer's options.

    The message may quote the response, whose control characters would reach the terminal.
    """
    bound_options = function.keywords if isinstance(function, partial) else {}
    return printable(redact_text(error_text(error), {**bound_options, **(options or {})}))
