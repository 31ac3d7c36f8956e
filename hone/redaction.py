"""Removes secrets from settings and texts that are written to a file or shown.

A secret is the value of a key such as `api_key`, the user, password and query of a URL, or a bearer token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

REDACTED = "<redacted>"
_SECRET_KEY = re.compile(
    r"secret|passw|passphrase|credential|authoriz|bearer|cookie|key_?id$|(?:^|[_-])token$"
    r"|(?:api|access|private|auth)[_-]?key$",
    re.IGNORECASE,
)
_TEXT_SECRETS = (
    re.compile(r"(://)[^/?\s]+(?=@)"),
    re.compile(r"(://[^\s?'\"]*\?)[^\s'\"]+"),
    re.compile(r"(\bBearer )\S+", re.IGNORECASE),
)
_MIN_SECRET_CHARS = 4
"""A shorter secret is not searched in a text, where it may be a part of a word."""


def redact(value: Any, key: str = "") -> Any:
    """Returns a value of settings with `<redacted>` in place of secrets; `key` is the key of the value."""
    if isinstance(value, Mapping):
        is_secret = is_secret_key(key)
        return {name: redact(item, key if is_secret else str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, key) for item in value]
    if is_secret_key(key) and value is not None and not isinstance(value, bool) and value != "":
        return REDACTED
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str, settings: Any = None) -> str:
    """Returns a text without the secrets of its URLs and without those of `settings`."""
    for secret in sorted(set(_secrets(settings)), key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    for pattern in _TEXT_SECRETS:
        text = pattern.sub(rf"\1{REDACTED}", text)
    return text


def is_redacted(value: Any) -> bool:
    """Returns whether a value, or a value in it, is what `redact` left of a secret."""
    if isinstance(value, Mapping):
        return any(map(is_redacted, value.values()))
    if isinstance(value, list | tuple):
        return any(map(is_redacted, value))
    return isinstance(value, str) and REDACTED in value


def is_secret_key(key: str) -> bool:
    """Returns whether the value of a key, which may be dotted, is a secret."""
    return _SECRET_KEY.search(key.rpartition(".")[2]) is not None


def _secrets(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _secrets(item, key if is_secret_key(key) else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets(item, key)
    elif is_secret_key(key) and len(str(value)) >= _MIN_SECRET_CHARS:
        yield str(value)
