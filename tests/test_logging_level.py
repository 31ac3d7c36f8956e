"""The variables of the logging level hold in every process that imports the package."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from hone.logging_level import LEVEL_VARIABLES, level_variables, set_logging_level


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    for name in LEVEL_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    log = logging.getLogger("hone")
    level, handlers, propagate = log.level, list(log.handlers), log.propagate
    yield log
    log.setLevel(level)
    log.handlers[:], log.propagate = handlers, propagate


@pytest.mark.parametrize("name", LEVEL_VARIABLES)
@pytest.mark.parametrize(("text", "level"), [("debug", 10), ("WARN", 30), ("15", 15)])
def test_a_level_is_set_by_either_name(
    name: str, text: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    set_logging_level()
    set_logging_level()
    log = logging.getLogger("hone")
    assert log.level == level
    assert len(log.handlers) == 1
    assert level_variables() == {name: text}


def test_nothing_happens_without_one() -> None:
    before = logging.getLogger("hone").level
    set_logging_level()
    assert logging.getLogger("hone").level == before
    assert level_variables() == {}


def test_a_word_that_is_no_level_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "chatty")
    set_logging_level()
    assert "VERL_LOGGING_LEVEL=chatty is not a level; use DEBUG, INFO" in caplog.text
