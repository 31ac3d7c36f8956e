"""Cleans, checks and parses text (JSON, YAML) from models, tools and files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hone.redaction import redact_text
from hone.types import JsonObject, JsonValue, Settings

T = TypeVar("T")

MAX_DEPTH = 64
"""Maximum nesting of lists and objects in data; deep values could exceed Python's recursion limit."""
MAX_INTEGER_BITS = 14_000
"""`clean_values` writes longer integers as hexadecimal text: Python writes at most 4,300 decimal digits."""
MAX_MESSAGE_CHARACTERS = 200


class BadText(ValueError):
    """Raised if a text cannot be parsed."""


def clean_text(text: str) -> str:
    """Replaces every lone surrogate, which UTF-8 cannot encode, by a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def clean_values(value: T) -> Any:
    """Returns a copy of the value as JSON data, with every text cleaned by `clean_text`."""
    return _clean(value, ())


def _clean(value: T, parents: tuple[int, ...]) -> JsonValue:
    """Cleans a value; `parents` are the ids of the containers around it."""
    if isinstance(value, str):
        return clean_text(value)
    if value is None or isinstance(value, float | bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= MAX_INTEGER_BITS else hex(value)
    if id(value) in parents or len(parents) > MAX_DEPTH:
        return "(nested too deeply)"
    parents = (*parents, id(value))
    if isinstance(value, Mapping):
        return {
            clean_text(key) if isinstance(key, str) else short_repr(key): _clean(item, parents)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean(item, parents) for item in value]
    if hasattr(value, "tolist"):  # an array or a tensor
        return _clean(value.tolist(), parents)
    return short_repr(value)


def find_flaw(value: JsonValue, *, allow_nul: bool = False) -> str | None:
    """Returns why a value of a data row is unusable (lone surrogates, NUL, depth), or None."""
    for depth, level in enumerate(_levels(value)):
        if depth > MAX_DEPTH:
            return f"is nested more than {MAX_DEPTH} levels deep"
        for item in level:
            if isinstance(item, str) and (flaw := _text_flaw(item, allow_nul)):
                return flaw
    return None


def _levels(value: JsonValue) -> Iterator[list[JsonValue]]:
    """Yields the values of each nesting level: first `value` alone, then its items, then their items.

    The items of an object are its keys and its values.
    """
    level = [value]
    while level:
        yield level
        items: list[JsonValue] = []
        for item in level:
            if isinstance(item, Mapping):
                items += (*item.keys(), *item.values())
            elif isinstance(item, list | tuple):
                items += item
        level = items


def _text_flaw(text: str, allow_nul: bool) -> str | None:
    """Returns why a text is unusable, or None."""
    if not allow_nul and "\0" in text:
        return "contains a NUL character"
    if text.isascii():
        return None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if 0xDC80 <= code <= 0xDCFF:  # `surrogateescape` decodes an invalid byte to this range
            return f"is not UTF-8 (byte 0x{code - 0xDC00:02x}) or contains a lone surrogate"
        return f"contains a lone surrogate (\\u{code:04x}), which is not Unicode text"
    return None


def read_json(text: str, *, strict: bool = False) -> Any:
    """Parses JSON; raises BadText if the text is invalid or nested too deeply.

    `strict` also rejects NaN, infinities and duplicate keys.
    """
    hooks = {"parse_constant": _reject_constant, "object_pairs_hook": _reject_duplicate_keys}
    options: Settings = hooks if strict else {}
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise BadText(f"it is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:  # raised also for integers with more digits than Python parses
        raise BadText(clean_text(str(error))[:MAX_MESSAGE_CHARACTERS]) from None
    if text.count("[") + text.count("{") > MAX_DEPTH:  # otherwise the value cannot be too deep
        level = next(itertools.islice(_levels(value), MAX_DEPTH, None), [])
        if any(isinstance(item, dict | list) for item in level):
            raise BadText(f"it is nested more than {MAX_DEPTH} levels deep")
    return value


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _reject_duplicate_keys(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object has a duplicate key")
    return values


def working_folder_hint(path: Path) -> str:
    """Returns ` (looked in FOLDER)` for a relative path, and an empty string for an absolute path."""
    return "" if path.is_absolute() else f" (looked in {Path.cwd()})"


def read_yaml(path: str) -> Any:
    """Reads a YAML file of the configuration; raises BadText with the file and the reason."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    file = Path(path).expanduser()
    if not file.is_file():
        raise BadText(f"{file} does not exist{working_folder_hint(file)}")
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except RecursionError:
        raise BadText(f"{path} is nested too deeply") from None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        reason = " ".join(clean_text(str(error)).split())[:MAX_MESSAGE_CHARACTERS]
        raise BadText(f"{path} cannot be read as YAML: {reason}") from error
    if flaw := find_flaw(content):
        raise BadText(f"{path} {flaw}")
    return content


def short_repr(value: T) -> str:
    """Returns the shortened `repr` of an object, or its type if `repr` fails."""
    try:
        text = clean_text(repr(value))
    except Exception:  # the object's `__repr__` may raise any exception
        return f"a {type(value).__name__} that cannot be shown"
    if len(text) <= MAX_MESSAGE_CHARACTERS:
        return text
    return f"{text[: MAX_MESSAGE_CHARACTERS - 3]}..."


def error_text(error: BaseException) -> str:
    """Returns `ValueError: reason` for an exception, even if its `str` fails, without secrets of URLs."""
    try:
        reason = redact_text(clean_text(str(error)))
    except Exception:  # the exception's `__str__` may raise any exception
        reason = "(its message cannot be shown)"
    return f"{type(error).__name__}: {reason}"


def printable(text: str, encoding: str | None = None) -> str:
    """Escapes control characters and characters that `encoding` (by default UTF-8) lacks."""
    text = text.translate(_CONTROL_ESCAPES)
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


_CONTROL_ESCAPES = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}
