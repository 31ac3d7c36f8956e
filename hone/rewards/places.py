"""Source locations for messages: where a score function is defined, and where it raised."""

from __future__ import annotations

import functools
import sysconfig
import traceback
from pathlib import Path
from types import CodeType

from hone.types import Function

_PACKAGE_FOLDER = str(Path(__file__).parents[1])
_LIBRARY_FOLDERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def describe(function: Function) -> str:
    """Returns `name of file` for a function from a user's file, else `module.name`."""
    unwrapped = unwrap_function(function)
    name = getattr(unwrapped, "__qualname__", type(unwrapped).__qualname__)
    module = getattr(unwrapped, "__module__", "?")
    code = _code_of(unwrapped)
    if code is not None and str(module).startswith(("hone_extern_", "__main__")):
        return f"{name} of {code.co_filename}"
    return f"{module}.{name}"


def definition_location(function: Function) -> str | None:
    """Returns `file:line` of the definition, or None if it is not written in Python."""
    code = _code_of(unwrap_function(function))
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def error_location(error: BaseException, function: Function) -> str | None:
    """Returns `file:line` of the innermost frame in the user's file, or of the definition."""
    frames = traceback.extract_tb(error.__traceback__)
    code = _code_of(unwrap_function(function))
    user_frames = [
        frame for frame in frames if code is not None and frame.filename == code.co_filename
    ]
    if code is None or _is_in_hone(code.co_filename):
        # The table calls a registered rule, which is in the user's file.
        outside_frames = [frame for frame in frames if not _is_in_hone(frame.filename)]
        user_frames = [f for f in outside_frames if not _is_in_library(f.filename)] or frames
    if not user_frames:
        return definition_location(function)
    return f"{user_frames[-1].filename}:{user_frames[-1].lineno}"


def unwrap_function(function: Function) -> Function:
    """Returns the function inside `functools.partial` and `functools.wraps`."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def _code_of(function: Function) -> CodeType | None:
    code = getattr(function, "__code__", None)
    if code is None and callable(function):
        code = getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _is_in_library(filename: str) -> bool:
    return filename.startswith(_LIBRARY_FOLDERS)


def _is_in_hone(filename: str) -> bool:
    return filename.startswith(_PACKAGE_FOLDER)
