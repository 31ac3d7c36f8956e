r"""Mathematical answers as text: finding `\boxed{…}`, and one spelling for equal answers.

The normal form follows the usage of the MATH benchmark (Hendrycks et al. 2021). What is equal only
as mathematics is left to `hone.rewards.scores.symbolic`.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 2000
"""Longer answers are compared as they are: no real answer is that long."""


def last_boxed_only_string(string: str) -> str | None:
    r"""The last `\boxed{…}` or `\fbox{…}` with balanced braces, or `\boxed x`; None without one."""
    start = max(string.rfind("\\boxed"), string.rfind("\\fbox"))
    if start < 0:
        return None
    head = re.match(r"\\(?:boxed|fbox)\s*", string[start:])
    assert head is not None
    body = start + head.end()
    if not string.startswith("{", body):
        word = re.match(r"[^\s$]+", string[body:])
        spaced = string[start:body].endswith(" ")
        return string[start : body + word.end()] if spaced and word else None
    depth = 0
    for index in range(body, len(string)):
        if string[index] == "{":
            depth += 1
        elif string[index] == "}":
            depth -= 1
            if depth == 0:
                return string[start : index + 1]
    return None


def remove_boxed(boxed: str) -> str:
    r"""What stands inside a string that `last_boxed_only_string` returned."""
    inner = re.sub(r"^\\(?:boxed|fbox)\s*", "", boxed)
    return inner[1:-1] if inner.startswith("{") and inner.endswith("}") else inner


def boxed_answer(text: str) -> str | None:
    """Content of the last box of a response."""
    boxed = last_boxed_only_string(text)
    return None if boxed is None else remove_boxed(boxed)


_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\!|\\,|\\;|\\:|\\ |\\quad|~", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:left|right)(?![a-zA-Z])", ""),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree|°", ""),
        (r"\\?\$", ""),
        (r"\\?%", ""),
        (r"(?<=[\d}\s])\\(?:text|mbox|mathrm)\s*\{[^{}]*\}\s*$", ""),
        (r"\\(?:text|mbox|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1"),
        (r"\{,\}", ","),
        (r"\s+", ""),
        (r"(?<![\d.])\.(?=\d)", "0."),
        (r"\\sqrt([^{\[\\])", r"\\sqrt{\1}"),
        (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac(\d)\{", r"\\frac{\1}{"),
        (r"\\frac(\{[^{}]*\})(\d)", r"\\frac\1{\2}"),
        (r"\.$", ""),
    )
)
_SHORT_NAME = re.compile(r"[^=]{1,2}=(?!=)")
_GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_RATIO = re.compile(r"(-?)(\d+)/(\d+)")
_DECIMAL = re.compile(r"-?\d{1,64}(?:\.\d{1,64})?", re.ASCII)
_FRACTION = re.compile(r"(-?)\\frac\{(-?\d{1,64})\}\{(-?\d{1,64})\}", re.ASCII)


def strip_string(string: str) -> str:
    """The normal form of an answer: units, spacing, `x=` and spelling variants removed."""
    text = string.strip()
    if len(text) > MAX_CHARS:
        return text
    text = text.replace("\\\\", "\\").replace("\n", "")
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    name = _SHORT_NAME.match(text)
    if name and name.end() < len(text):
        text = text[name.end() :]
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    return _RATIO.sub(r"\1\\frac{\2}{\3}", text) if _RATIO.fullmatch(text) else text


def as_number(normal: str) -> Fraction | None:
    """The value of a normal form that is a decimal or a fraction of integers."""
    if _DECIMAL.fullmatch(normal):
        return Fraction(normal)
    match = _FRACTION.fullmatch(normal)
    if match is None or int(match.group(3)) == 0:
        return None
    value = Fraction(int(match.group(2)), int(match.group(3)))
    return -value if match.group(1) else value
