"""Conditions on the values of keys, in the words of `rules.txt`, and lines of text about keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from hone.config.convert import Value, is_same_value, parse_scalars, show_value
from hone.types import JsonValue

OFF_VALUES = (None, False, 0, -1, "", "none", "None", "disabled", "???")
ABSENT = object()
"""The value of an unset key in a condition."""
_TERM = re.compile(r"(!?)([\w.]+)(?:(!=|<=|=|>)(.+))?")
_VALUE = re.compile(r"\{([\w.]+)\}")


def is_off(value: JsonValue) -> bool:
    """Returns whether a value disables a feature."""
    if isinstance(value, Mapping | list | tuple):
        return all(map(is_off, value.values() if isinstance(value, Mapping) else value))
    return any(is_same_value(value, off) for off in OFF_VALUES)


def is_one_of(value: JsonValue, words: tuple[JsonValue, ...]) -> bool:
    """Returns whether a value is a word of `rules.txt`, or of the class that a word names (off, number …)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_count = type(value) is int and value >= 1
    is_of_class = {"any": True, "off": is_off(value), "number": is_number, "count": is_count}
    is_of_class["count_or_zero"] = is_count or (type(value) is int and value == 0)
    return any(is_of_class.get(str(word)) or is_same_value(value, word) for word in words)


def lines_per_sentence(
    notes: Iterable[tuple[str, str]], singular: str = "", plural: str = ""
) -> list[str]:
    """Returns one line per sentence of the notes (key, sentence), with the first three keys and the number of
    further keys; `singular` follows a single key, and `plural` several."""
    keys_by_sentence: dict[str, list[str]] = {}
    for key, sentence in notes:
        keys_by_sentence.setdefault(sentence, []).append(key)
    lines = []
    for sentence, keys in keys_by_sentence.items():
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        verb = singular if len(keys) == 1 else plural
        lines.append(f"{', '.join(keys[:3])}{more}{verb}: {sentence}")
    return lines


def fill_values(text: str, read: Callable[[str], Value]) -> str:
    """Replaces each `{key}` in a text by the value of the key."""
    return _VALUE.sub(lambda match: show_value(read(match[1])), text)


def condition_holds(condition: str, read: Callable[[str], Value]) -> bool:
    """Returns whether all terms hold: `key` is set, `!key` is not, `key=a,b`, `key!=a`, `key<=1`, `key>1`."""
    for term in filter(None, fill_values(condition, read).split(" and ")):
        match = _TERM.fullmatch(term)
        assert match is not None, term
        value, sign = read(match[2]), match[3]
        if sign is None:
            is_true = (value is ABSENT) == bool(match[1])
        elif sign in ("<=", ">"):
            is_true = isinstance(value, int | float) and (value > float(match[4])) == (sign == ">")
        else:
            is_true = is_one_of(value, parse_scalars(match[4])) == (sign == "=")
        if not is_true:
            return False
    return True
