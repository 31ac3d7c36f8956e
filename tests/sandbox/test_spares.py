"""A spare is isolated like any other box, is used once, and is discarded after a short time."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hone.sandbox import Job, Status, client, run_many, run_python

from .test_warden import descendants, wait_until

pytestmark = pytest.mark.slow

NAMESPACES = (
    "import os\nprint([os.readlink(f'/proc/self/ns/{n}') for n in os.listdir('/proc/self/ns')])"
)


SPARE_LIFETIME_S = 120.0  # longer than any test: no spare is discarded before it is used


@pytest.fixture
def spare_lifetime(
    request: pytest.FixtureRequest, bwrap: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The next warden keeps its spares for SPARE_LIFETIME_S, or for the test's parameter."""
    assert run_python("pass").ok  # probes the machine, which runs a program
    monkeypatch.setattr(
        client._warden, "spare_lifetime_s", getattr(request, "param", SPARE_LIFETIME_S)
    )
    client.close()
    yield
    client.close()


def first_run() -> int:
    """Runs a program and returns the pid of its warden."""
    assert run_python("pass").ok
    process = client._warden._process
    assert process is not None
    return process.pid


@pytest.fixture
def warden(spare_lifetime: None) -> int:
    """The pid of a warden that has a spare, because two runs of one kind followed each other."""
    pid = first_run()
    assert run_python("pass").ok
    while not wait_until(lambda: len(descendants(pid)) == 2, seconds=1.0):
        assert first_run() == pid  # a slow machine has discarded the spare; this builds another
    return pid


def test_one_run_alone_builds_no_spare(spare_lifetime: None) -> None:
    pid = first_run()
    assert wait_until(lambda: descendants(pid) == [], seconds=SPARE_LIFETIME_S / 2)


def test_the_next_run_of_the_same_kind_uses_the_spare_with_its_own_limits(warden: int) -> None:
    first_process = descendants(warden)[1]  # of the spare's PID namespace
    code = "import resource, sys\nprint(resource.getrlimit(resource.RLIMIT_AS)[0] >> 20)\n"
    code += "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    code += "print(sys.stdin.read(), open('/proc/1/stat').read().split()[21], flush=True)\n"
    code += "while True: pass"
    start_time = Path(f"/proc/{first_process}/stat").read_text().split()[21]
    result = run_python(code, stdin="input", memory_mb=300, open_files=40, cpu_s=1, timeout_s=60.0)
    assert (result.status, result.exit_code) == (Status.TIMEOUT, 128 + 24), result
    assert result.stdout.split() == ["300", "40", "input", start_time]
    result = run_python("while True: pass", timeout_s=0.3)
    assert result.status is Status.TIMEOUT
    assert (
        result.wall_s < Job("pass").timeout_s
    )  # the limit of the run that the spare was built for


def test_standard_input_of_a_spare_cannot_be_written(warden: int) -> None:
    result = run_python("import os\nos.pwrite(0, b'x', 0)", stdin="input")
    assert "PermissionError" in result.stderr, result


def test_a_run_of_another_kind_does_not_use_the_spare(warden: int) -> None:
    code = "import os; s = os.statvfs('/box'); print(s.f_blocks * s.f_frsize >> 20)"
    result = run_python(code, disk_mb=7)
    assert result.stdout == "7\n"
    assert run_python("import sys; print(sys.argv[1:])", argv=["a"]).stdout == "['a']\n"
    assert run_python("import helper", files={"helper.py": ""}).ok


@pytest.mark.parametrize("spare_lifetime", [2.0], indirect=True)
def test_an_unused_spare_is_discarded(warden: int) -> None:
    assert wait_until(lambda: descendants(warden) == [], seconds=SPARE_LIFETIME_S / 2)
    assert run_python("print(1)").stdout == "1\n"


def test_a_spare_that_died_is_not_used(warden: int) -> None:
    spare = descendants(warden)
    for pid in spare:
        with contextlib.suppress(ProcessLookupError):  # the second may die with the first
            os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in spare))
    assert run_python("print(1)").stdout == "1\n"


def test_boxes_share_no_namespace_and_no_file(warden: int) -> None:
    outputs = [set(links_in(text)) for text in concurrent_outputs(6, sleep_s=1.0)]
    kinds = ("pid:", "mnt:", "net:", "user:", "ipc:", "uts:", "cgroup:")
    for name in kinds:
        assert len({link for links in outputs for link in links if link.startswith(name)}) == 6, (
            name
        )


def concurrent_outputs(count: int, sleep_s: float) -> list[str]:
    """Returns the outputs of boxes that ran at the same time, since namespace numbers are reused."""
    code = f"{NAMESPACES}\nopen('mine', 'x').close()\nimport time\nstart = time.monotonic()"
    code += f"\ntime.sleep({sleep_s})\nprint(start, time.monotonic())"
    results = run_many([Job(code, timeout_s=90.0) for _ in range(count)], max_concurrent=count)
    assert [result.status for result in results] == [Status.OK] * count
    lines = [result.stdout.splitlines() for result in results]
    starts, ends = zip(*(map(float, times.split()) for _, times in lines), strict=True)
    if max(starts) < min(ends):
        return [links for links, _ in lines]
    assert sleep_s < 30, f"{count} boxes were not alive together: {starts}, {ends}"
    return concurrent_outputs(count, 4 * sleep_s)


def links_in(text: str) -> list[str]:
    return [part.strip(" []'\n") for part in text.split(",")]


def test_a_program_larger_than_a_pipe_runs(warden: int) -> None:
    text = "x" * (1 << 20)
    for _ in range(2):
        assert run_python(f"print(len('{text}'))").stdout == f"{1 << 20}\n"
