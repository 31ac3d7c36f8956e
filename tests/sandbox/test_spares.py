"""A box built ahead of its order is a box like any other, used once and never kept for long."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from hone.sandbox import Job, Status, client, run_many, run_python

from .test_warden import descendants, wait_until

NAMESPACES = (
    "import os\nprint([os.readlink(f'/proc/self/ns/{n}') for n in os.listdir('/proc/self/ns')])"
)


KEEP_S = 120.0  # longer than any test looks: no spare goes away before it is used


@pytest.fixture
def keeping(
    request: pytest.FixtureRequest, bwrap: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The next warden keeps its spares for KEEP_S, or for what the test says."""
    assert run_python("pass").ok  # the machine is examined: no further run comes between
    monkeypatch.setattr(client._warden, "keep_spares_s", getattr(request, "param", KEEP_S))
    client.close()
    yield
    client.close()


def first_run() -> int:
    """The warden that made it."""
    assert run_python("pass").ok
    process = client._warden._process
    assert process is not None
    return process.pid


@pytest.fixture
def warden(keeping: None) -> int:
    """A warden that has a spare, because two runs of one kind followed each other."""
    pid = first_run()
    assert run_python("pass").ok
    assert wait_until(lambda: len(descendants(pid)) == 2)
    return pid


def test_one_run_alone_builds_no_spare(keeping: None) -> None:
    pid = first_run()
    assert wait_until(lambda: descendants(pid) == [], seconds=KEEP_S / 2)


def test_the_next_run_of_the_kind_gets_the_spare_and_its_own_limits(warden: int) -> None:
    spare = descendants(warden)
    code = "import resource, sys\nprint(resource.getrlimit(resource.RLIMIT_AS)[0] >> 20)\n"
    code += "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    code += "print(sys.stdin.read(), flush=True)\nwhile True: pass"
    results = []
    thread = threading.Thread(
        target=lambda: results.append(
            run_python(code, stdin="given", memory_mb=300, open_files=40, timeout_s=2.0)
        )
    )
    thread.start()
    assert wait_until(lambda: len(descendants(spare[0])) == 2)  # the program runs inside it
    thread.join(60)
    assert results[0].status is Status.TIMEOUT
    assert results[0].stdout.split() == ["300", "40", "given"]


def test_its_standard_input_cannot_be_written(warden: int) -> None:
    result = run_python("import os\nos.pwrite(0, b'x', 0)", stdin="given")
    assert "PermissionError" in result.stderr, result


def test_a_run_of_another_kind_does_not_take_it(warden: int) -> None:
    code = "import os; s = os.statvfs('/box'); print(s.f_blocks * s.f_frsize >> 20)"
    result = run_python(code, disk_mb=7)
    assert result.stdout == "7\n"
    assert run_python("import sys; print(sys.argv[1:])", argv=["a"]).stdout == "['a']\n"
    assert run_python("import helper", files={"helper.py": ""}).ok


@pytest.mark.parametrize("keeping", [2.0], indirect=True)
def test_an_unused_spare_is_given_up(warden: int) -> None:
    assert wait_until(lambda: descendants(warden) == [], seconds=KEEP_S / 2)
    assert run_python("print(1)").stdout == "1\n"


def test_a_spare_that_died_is_not_used(warden: int) -> None:
    spare = descendants(warden)
    for pid in spare:
        with contextlib.suppress(ProcessLookupError):  # the second may go with the first
            os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in spare))
    assert run_python("print(1)").stdout == "1\n"


def test_boxes_share_no_namespace_and_no_file(warden: int) -> None:
    seen = [set(links_in(text)) for text in said_at_the_same_time(6, nap_s=1.0)]
    own = ("pid:", "mnt:", "net:", "user:", "ipc:", "uts:", "cgroup:")
    for name in own:
        assert len({link for links in seen for link in links if link.startswith(name)}) == 6, name


def said_at_the_same_time(count: int, nap_s: float) -> list[str]:
    """What as many boxes say that all live at one moment: a dead one's numbers are given again."""
    code = f"{NAMESPACES}\nopen('mine', 'x').close()\nimport time\nborn = time.monotonic()"
    code += f"\ntime.sleep({nap_s})\nprint(born, time.monotonic())"
    results = run_many([Job(code, timeout_s=90.0) for _ in range(count)], max_concurrent=count)
    assert [result.status for result in results] == [Status.OK] * count
    said = [result.stdout.splitlines() for result in results]
    births, ends = zip(*(map(float, times.split()) for _, times in said), strict=True)
    if max(births) < min(ends):
        return [links for links, _ in said]
    assert nap_s < 30, f"{count} boxes were not alive together: {births}, {ends}"
    return said_at_the_same_time(count, 4 * nap_s)


def links_in(text: str) -> list[str]:
    return [part.strip(" []'\n") for part in text.split(",")]


def test_a_program_larger_than_a_pipe_arrives_whole(warden: int) -> None:
    text = "x" * (1 << 20)
    for _ in range(2):
        assert run_python(f"print(len('{text}'))").stdout == f"{1 << 20}\n"
