"""Text from outside: what is cleaned, what is refused, what is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.text import (
    MAX_DEPTH,
    BadText,
    clean_text,
    clean_values,
    error_text,
    find_flaw,
    printable,
    read_json,
    read_yaml,
    short_repr,
)

ANY_TEXT = st.text(st.characters() | st.sampled_from("\ud800\udfff\0\x1b\n[{"))


class Hostile:
    def __repr__(self) -> str:
        raise SystemError("no")


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


@given(ANY_TEXT)
def test_clean_text_can_be_written_and_good_text_stays(text: str) -> None:
    clean_text(text).encode("utf-8")
    if find_flaw(text, allow_nul=True) is None:
        assert clean_text(text) == text
    else:
        assert "?" in clean_text(text)


@given(ANY_TEXT, st.sampled_from(["ascii", "utf-8", "latin-1"]))
def test_printable_text_holds_nothing_that_moves_a_cursor(text: str, encoding: str) -> None:
    seen = printable(text, encoding)
    seen.encode(encoding)
    assert not {"\x1b", "\0", "\r", "\x9b"} & set(seen)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_flaws_are_found_at_any_place_and_depth() -> None:
    assert find_flaw({"a": [1, {"b": "é😀"}]}) is None
    assert "lone surrogate (\\ud800)" in str(find_flaw({"a": [{"b": "x\ud800"}]}))
    assert "lone surrogate" in str(find_flaw({"\udfff": 1}))
    assert "NUL" in str(find_flaw(["\0"]))
    assert find_flaw(["\0"], allow_nul=True) is None
    assert find_flaw(nested(MAX_DEPTH)) is None
    assert "nested" in str(find_flaw(nested(200_000)))


def test_values_become_data_that_can_be_written() -> None:
    circle: dict[str, Any] = {"a": 1}
    circle["children"] = [circle, circle]
    value = {
        "\ud800": ("\udc00", {1}),
        5: np.float32(0.5),
        "array": np.array([[1, 2]]),
        "big": 10**5000,
        "own": Hostile(),
        "circle": circle,
        "deep": nested(1000),
    }
    clean = clean_values(value)
    json.dumps(clean, ensure_ascii=False).encode("utf-8")
    assert clean["?"] == ["?", [1]]
    assert (clean["5"], clean["array"]) == (0.5, [[1, 2]])
    assert clean["big"].startswith("0x")
    assert clean["own"] == "a Hostile that cannot be shown"
    assert clean["circle"]["children"] == ["(nested too deeply)"] * 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting"),
        ("[" * 100_000, "nested"),
        ("[" * 100 + "]" * 100, "nested"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested"),
        ("1" * 5000, "limit"),
        ("NaN", "NaN is not a JSON number"),
        ('{"a": 1, "a": 2}', "duplicate key"),
    ],
)
def test_what_is_no_json_is_told(text: str, why: str) -> None:
    with pytest.raises(BadText, match=why):
        read_json(text, strict=True)


def test_brackets_in_text_are_no_depth() -> None:
    assert read_json(json.dumps(["[" * 500])) == ["[" * 500]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"a: [", "cannot be read as YAML"),
        (b"\xff\xfe\x00", "cannot be read as YAML"),
        (b'a: "\\ud800"', "lone surrogate"),
        (b"a: ${nothing}", "cannot be read as YAML"),
        (b"!!python/object/apply:os.getcwd []", "cannot be read as YAML"),
    ],
)
def test_a_yaml_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(BadText, match=rf"x\.yaml.*{why}"):
        read_yaml(str(tmp_path / "x.yaml"))
    with pytest.raises(BadText, match="does not exist"):
        read_yaml(str(tmp_path / "no.yaml"))


def test_any_object_and_any_error_can_be_shown() -> None:
    assert short_repr(Hostile()) == "a Hostile that cannot be shown"
    assert len(short_repr("x" * 10_000)) == 200
    assert error_text(Silent()) == "Silent: (its message cannot be shown)"
    assert error_text(KeyError("\ud800")) == "KeyError: '\\ud800'"
    assert error_text(ValueError("\ud800")) == "ValueError: ?"
