"""A box built ahead of its order is a box like any other, used once and never kept for long."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest

from hone.sandbox import Job, Status, client, run_many, run_python
from hone.sandbox.spares import KEEP_S

from .test_warden import descendants, wait_until

NAMESPACES = (
    "import os\nprint([os.readlink(f'/proc/self/ns/{n}') for n in os.listdir('/proc/self/ns')])"
)


@pytest.fixture
def warden(bwrap: None) -> int:
    """A warden that has a spare, because two runs of one kind followed each other."""
    client.close()
    for _ in range(2):
        assert run_python("pass").ok
    process = client._warden._process
    assert process is not None
    assert wait_until(lambda: len(descendants(process.pid)) == 2)
    return process.pid


def test_one_run_alone_builds_no_spare(bwrap: None) -> None:
    client.close()
    assert run_python("pass").ok
    process = client._warden._process
    assert process is not None
    assert wait_until(lambda: descendants(process.pid) == [], seconds=KEEP_S / 2)


def test_the_next_run_of_the_kind_gets_the_spare_and_its_own_limits(warden: int) -> None:
    spare = set(descendants(warden))
    code = "import resource, sys\nprint(resource.getrlimit(resource.RLIMIT_AS)[0] >> 20)\n"
    code += "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    code += "print(sys.stdin.read(), flush=True)\nwhile True: pass"
    seen: list[set[int]] = []

    def look() -> bool:
        seen.append(set(descendants(warden)))
        return len(seen[-1] - spare) >= 1 and spare <= seen[-1]

    results = []
    thread = threading.Thread(
        target=lambda: results.append(
            run_python(code, stdin="given", memory_mb=300, open_files=40, timeout_s=2.0)
        )
    )
    thread.start()
    assert wait_until(look)
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


def test_an_unused_spare_is_given_up(warden: int) -> None:
    assert wait_until(lambda: descendants(warden) == [], seconds=KEEP_S + 20)
    assert run_python("print(1)").stdout == "1\n"


def test_a_spare_that_died_is_not_used(warden: int) -> None:
    spare = descendants(warden)
    for pid in spare:
        with contextlib.suppress(ProcessLookupError):  # the second may go with the first
            os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in spare))
    assert run_python("print(1)").stdout == "1\n"


def test_boxes_share_no_namespace_and_no_file(warden: int) -> None:
    code = f"{NAMESPACES}\nopen('mine', 'x').close()\nimport time; time.sleep(0.3)"
    results = run_many([Job(code) for _ in range(6)], max_concurrent=6)
    assert [result.status for result in results] == [Status.OK] * 6
    seen = [set(links_in(result.stdout)) for result in results]
    own = ("pid:", "mnt:", "net:", "user:", "ipc:", "uts:", "cgroup:")
    for name in own:
        assert len({link for links in seen for link in links if link.startswith(name)}) == 6, name


def links_in(text: str) -> list[str]:
    return [part.strip(" []'\n") for part in text.split(",")]


def test_a_program_larger_than_a_pipe_arrives_whole(warden: int) -> None:
    text = "x" * (1 << 20)
    for _ in range(2):
        assert run_python(f"print(len('{text}'))").stdout == f"{1 << 20}\n"
