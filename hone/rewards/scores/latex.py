r"""Finds mathematical answers in `\boxed{…}`, and normalizes answers, so that equal answers are equal text.

The normal form follows the MATH benchmark (Hendrycks et al. 2021).
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 2000  # longer answers are not normalized
_BRACE = re.compile(r"[{}]")


def last_boxed_only_string(string: str) -> str | None:
    r"""Returns the last `\boxed{…}` or `\fbox{…}` with balanced braces, or `\boxed x`, or None."""
    start = max(string.rfind("\\boxed"), string.rfind("\\fbox"))
    if start < 0:
        return None
    command = re.match(r"\\(?:boxed|fbox)\s*", string[start:])
    assert command is not None
    body_start = start + command.end()
    if not string.startswith("{", body_start):
        word = re.match(r"[^\s$]+", string[body_start:])
        has_space = string[start:body_start].endswith(" ")
        return string[start : body_start + word.end()] if has_space and word else None
    depth = 0
    for brace in _BRACE.finditer(string, body_start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return string[start : brace.end()]
    return None


def remove_boxed(boxed: str) -> str:
    r"""Returns the content of a box from `last_boxed_only_string`."""
    content = re.sub(r"^\\(?:boxed|fbox)\s*", "", boxed)
    return content[1:-1] if content.startswith("{") and content.endswith("}") else content


def boxed_answer(text: str) -> str | None:
    """Returns the content of the last box of a response, or None."""
    boxed = last_boxed_only_string(text)
    return None if boxed is None else remove_boxed(boxed)


_NOT_A_UNIT = re.compile(
    r"\d|\b(?:or|and|to|through|not|plus|minus|times|over|mod|modulo|base|power|squared|cubed"
    r"|factorial|remainder|pi|dozens?|(?:hundred|thousand|million|billion|trillion)(?:th|s|ths)?"
    r"|half|halves|thirds?|quarters?|fourths?|fifths?|sixths?|eighths?|tenths?"
    r"|(?-i:k)|lakhs?|crores?|negative|positive|double[ds]?|twice|tripled?|thrice"
    r"|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
    r"|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)\b|,",
    re.IGNORECASE,
)
"""Words that change the meaning of the number before them; every other word is a unit."""
_TEXT_PATTERN = r"\\(?:text|mbox|textbf|textit|textrm|mathrm|mathbf)\s*\{([^{}]*)\}"
_TEXT_COMMAND = re.compile(_TEXT_PATTERN)
_TRAILING_TEXT = re.compile(
    rf"(?<=[\w}})\]])(?:\s|\\[,;:! ]|~)*{_TEXT_PATTERN}(?:\^\{{?\d\}}?)?\s*$"
)
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r",\s*\\!\s*", ","),
        (r"\\!", ""),
        (r"\\,|\\;|\\:|\\ |\\q?quad(?![a-zA-Z])|~", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:left|right)(?![a-zA-Z])", ""),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree|°", " "),
        (r"\\?\$", " "),
        (r"\\?%", " "),
        (_TEXT_PATTERN, r" \1 "),
        (r"\{,\}", ","),
        (r"_\s*\{\s*(\w)\s*\}", r"_\1"),
        (r"\s+", " "),
        (r"(?<![\d.])\.(?=\d)", "0."),
        (r"\\sqrt ?([^{\[\\ ])", r"\\sqrt{\1}"),
        (r"\\frac ?(\d) ?(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac ?(\d) ?\{", r"\\frac{\1}{"),
        (r"\\frac ?(\{[^{}]*\}) ?(\d)", r"\\frac\1{\2}"),
        (r"\. ?$", ""),
    )
)
# `x=` or `f =` at the start of an answer
_SHORT_NAME = re.compile(r"[^=\d\s][^=\s]? ?=(?!=)")
_GROUPED_NUMBER = re.compile(r"[+-]? ?\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?")
_MIXED_NUMBER = re.compile(
    r"(?<![\w.^}\\])(\d{1,64})"
    r"(?: (\d{1,64})/(\d{1,64})| ?\\frac\{(\d{1,64})\}\{(\d{1,64})\})(?![\w.])"
)
# \text{ or } is not a sign, because it separates the members of a set
_CHAIN_SIGN = re.compile(
    r"\\[{}]|[{}()\[\]]|(?<![<>!:=])=(?!=)"
    r"|\\(?:lor|vee|implies|Rightarrow|Longrightarrow|iff|Leftrightarrow|equiv|approx|simeq|sim|cong)"
    r"(?![a-zA-Z])"
)
# `x`, `f(41)`, `P(A|B)`, `\angle ABC`, `\text{area of } ABC`
_NAME = re.compile(r"\s*\$?\s*(?:\\[a-zA-Z]+\s*)?(?:[a-zA-Z]|\{[^{}]*\})[^=+*/^]*")
# `4'2` is not a number, but a parser reads 42 or 4
_PRIMED_NUMBER = re.compile(r"\d\s*'+\s*\d")
# a space that is not between two numbers
_LOOSE_SPACE = re.compile(r"(?<![\d.]) | (?![\d.])")
_RATIO = re.compile(r"([+-]?)(\d+)/(\d+)")
_DECIMAL = re.compile(r"[+-]?\d{1,64}(?:\.\d{1,64})?", re.ASCII)
_FRACTION = re.compile(r"([+-]?)\\frac\{(-?\d{1,64})\}\{(-?\d{1,64})\}", re.ASCII)


def strip_string(string: str) -> str:
    """Returns the normal form of an answer, without units, spacing, `x=` and spelling variants.

    A percent sign is a unit. A mixed number (`1 1/2`) becomes one fraction. A space between two numbers
    is not removed: `4 2` is not `42`.
    """
    text = string.strip()
    if len(text) > MAX_CHARS:
        return text
    text = remove_unit(text.replace("\\\\", "\\").replace("\n", " "))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip()
    name = _SHORT_NAME.match(text)
    if name and name.end() < len(text):
        text = text[name.end() :].strip()
    if _GROUPED_NUMBER.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    text = _LOOSE_SPACE.sub("", _MIXED_NUMBER.sub(_to_improper_fraction, text))
    return _RATIO.sub(r"\1\\frac{\2}{\3}", text) if _RATIO.fullmatch(text) else text


def remove_unit(text: str) -> str:
    r"""Removes a unit at the end of the text, written as `\text{…}` (`5\text{ cm}^2`)."""
    match = _TRAILING_TEXT.search(text)
    return text[: match.start()] if match and not _NOT_A_UNIT.search(match.group(1)) else text


def chain_members(text: str) -> list[str]:
    r"""Returns the sides of the equations and alternatives in an answer (`x=6\cdot 7=42`, `41\lor 42`).

    A name before the first sign is left out. An answer without such a sign is its only member.
    """
    members, depth, start = [], 0, 0
    for match in _CHAIN_SIGN.finditer(text):
        sign = match[0].removeprefix("\\")
        depth += (sign in "{([") - (sign in "})]")
        if depth == 0 and sign not in "{([})]":
            members.append(text[start : match.start()])
            start = match.end()
    members.append(text[start:])
    return members[1:] if len(members) > 1 and _NAME.fullmatch(members[0]) else members


def is_unambiguous(string: str) -> bool:
    r"""Returns whether a parser reads the whole answer; of `4 2` or `4'2`, a parser reads only a part."""
    words = [text.strip() for text in _TEXT_COMMAND.findall(remove_unit(string.strip()))]
    if any(_NOT_A_UNIT.search(text) and text not in ("or", "and") for text in words):
        return False
    return " " not in strip_string(string) and not _PRIMED_NUMBER.search(string)


def _to_improper_fraction(match: re.Match[str]) -> str:
    """Converts a match of `_MIXED_NUMBER`; `1 3/2` is not a mixed number and stays unchanged."""
    whole, numerator, denominator = (group for group in match.groups() if group)
    if int(numerator) >= int(denominator):
        return match.group()
    return rf"\frac{{{int(whole) * int(denominator) + int(numerator)}}}{{{denominator}}}"


def as_number(normal_form: str) -> Fraction | None:
    """Returns the value of a normal form that is a decimal or a fraction of integers, else None."""
    if _DECIMAL.fullmatch(normal_form):
        return Fraction(normal_form)
    match = _FRACTION.fullmatch(normal_form)
    if match is None or int(match.group(3)) == 0:
        return None
    value = Fraction(int(match.group(2)), int(match.group(3)))
    return -value if match.group(1) == "-" else value


def num_decimals(normal_form: str) -> int | None:
    """Returns the number of digits after the decimal point; None without a point."""
    _, point, digits = normal_form.partition(".")
    return len(digits) if point and _DECIMAL.fullmatch(normal_form) else None


def collection_kind(normal_form: str) -> str | None:
    """Returns the kind of an answer with commas: `set`, `tuple`, `interval`, `list`, or None."""
    depth, first_end, has_outer_comma = 0, None, False
    for index, character in enumerate(normal_form):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character in ")]}" and first_end is None:
            first_end = index  # of the first outer pair of brackets
        has_outer_comma |= depth == 0 and character == ","
    if normal_form.startswith(("(", "[", "\\{")) and first_end == len(normal_form) - 1:
        if normal_form.startswith("\\{"):
            return "set"
        kind = "tuple" if normal_form[0] == "(" and normal_form[-1] == ")" else "interval"
        return kind if "," in normal_form else None
    return "list" if has_outer_comma else None
