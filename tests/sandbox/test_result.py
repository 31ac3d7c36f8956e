"""Job refuses invalid limits, file names and texts."""

from __future__ import annotations

import math

import pytest

from hone.sandbox import Job, Status


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout_s", 0.0),
        ("timeout_s", math.inf),
        ("timeout_s", math.nan),
        ("cpu_s", -1.0),
        ("memory_mb", 0),
        ("output_bytes", 0),
        ("processes", 0),
        ("disk_mb", -1),
        ("open_files", 3),
        ("argv", ["a\0b"]),
        ("argv", ["\ud800"]),
        ("argv", [5]),
        ("code", b"pass"),
        ("stdin", None),
        ("files", {"a": b"bytes"}),
        ("files", {"\ud800": ""}),
        *(
            (field, value)
            for field in ("timeout_s", "cpu_s", "memory_mb", "output_bytes", "processes")
            for value in (True, "1", 2**70, 1e308, math.nan, -math.inf, [1])
        ),
        *((field, value) for field in ("disk_mb", "open_files") for value in (2**70, 64.5, True)),
    ],
)
def test_impossible_limits_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"sandbox: ({field}|an? |file)"):
        Job(**{"code": "pass", field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../up", "a/../../b", "", "main.py", "./main.py", "a\0"]
)
def test_files_outside_the_box_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="sandbox"):
        Job("pass", files={path: ""})


def test_too_many_files_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 200"):
        Job("pass", files={str(i): "" for i in range(201)})


def test_default_cpu_limit_is_above_the_wall_limit() -> None:
    assert Job("pass", timeout_s=2.1).cpu_limit_s == 3 + 5
    assert Job("pass", timeout_s=2.1, cpu_s=6.5).cpu_limit_s == 7


@pytest.mark.parametrize(
    ("stderr", "status"),
    [
        (b"Traceback (most recent call last):\n  ...\nMemoryError\n", Status.MEMORY),
        (b"Exception ignored in m_clear of module time:\nMemoryError: \n", Status.MEMORY),
        (b"object type name: MemoryError\nobject repr     : MemoryError()\nlost sys.stderr\n", Status.MEMORY),
        (b"object repr     : ValueError()\nlost sys.stderr\n", Status.ERROR),
        (b"MemoryError\nValueError: 3\n", Status.ERROR),
        (b"", Status.ERROR),
    ],
)  # fmt: skip
def test_a_program_whose_last_words_are_a_memory_error_has_run_out_of_memory(
    stderr: bytes, status: Status
) -> None:
    """As CPython 3.11 and 3.13 write them."""
    assert Status.of_failed_program(stderr) is status
