"""A program in the box can do ordinary work, and attacks from inside the box fail."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hone.sandbox import Job, SandboxResult, Status, client, run_many, run_python

from .attacks import NETWORK, TRY_TO_WRITE, processes_that_mention

RunPython = Callable[..., SandboxResult]


# ---- ordinary programs ----


def test_program_gets_stdin_arguments_and_files(run: RunPython) -> None:
    result = run(
        "import sys, helper\nprint(helper.double(int(input())), sys.argv[1:])\n"
        "print(open('data/table.txt').read())\nprint(sys.stdin.read())",
        stdin="21\nrest",
        files={"helper.py": "def double(x):\n    return 2 * x\n", "data/table.txt": "α"},
        argv=["--flag", "a b"],
    )
    assert result.status is Status.OK, result
    assert result.stdout == "42 ['--flag', 'a b']\nα\nrest\n"
    assert result.exit_code == 0
    assert result.stderr == ""


def test_exit_code_and_traceback_are_returned(run: RunPython) -> None:
    assert run("import sys; sys.exit(3)").exit_code == 3
    result = run("x = 1\nraise KeyError('gone')")
    assert result.status is Status.ERROR
    assert 'File "/box/main.py", line 2' in result.stderr
    assert result.stderr.endswith("KeyError: 'gone'\n")


def test_ordinary_things_work_in_the_box(run: RunPython) -> None:
    code = """
import asyncio, subprocess, sys, tempfile, threading
from multiprocessing import Pool
print(open('/dev/stdin').readline().strip())
with tempfile.NamedTemporaryFile() as f:
    f.write(b'x' * 1000)
values = []
t = threading.Thread(target=values.append, args=(1,)); t.start(); t.join()
async def main():
    await asyncio.sleep(0)
    return 2
print(values, asyncio.run(main()))
print(subprocess.run([sys.executable, '-c', 'print(3)'], capture_output=True, text=True).stdout)
if __name__ == '__main__':
    with Pool(2) as pool:
        print(pool.map(abs, [-4, -5]))
exit(0)
"""
    result = run(code, stdin="hello\n", timeout_s=60.0)
    assert result.status is Status.OK, result
    assert result.stdout.split() == ["hello", "[1]", "2", "3", "[4,", "5]"]


def test_signals_have_their_default_handlers(run: RunPython) -> None:
    code = (
        "from signal import *\nprint(getsignal(SIGTERM) is SIG_DFL, getsignal(SIGHUP) is SIG_DFL)"
    )
    code += "\nprint(getsignal(SIGINT) is default_int_handler)"
    assert run(code).stdout.split() == ["True"] * 3


def test_set_order_is_the_same_in_every_run(run: RunPython) -> None:
    code = "print(list({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}))"
    assert len({run(code).stdout for _ in range(3)}) == 1


def test_invalid_source_is_an_error_of_the_program(run: RunPython) -> None:
    for code in ("def f(:", "\udc80", "x = '\0'"):
        assert run(code).status is Status.ERROR
    assert run("").status is Status.OK


# ---- attacks on the machine's resources ----


def test_fork_bomb_is_contained(run: RunPython) -> None:
    token = uuid.uuid4().hex
    result = run("import os\nwhile True:\n    os.fork()", timeout_s=1.0, argv=[token])
    assert result.status in (Status.TIMEOUT, Status.ERROR, Status.MEMORY, Status.KILLED)
    assert processes_that_mention(token) == []


def test_number_of_processes_is_limited(run: RunPython) -> None:
    code = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(100)
        count += 1
except OSError:
    print(count)
"""
    result = run(code, processes=20, timeout_s=20.0)
    assert result.status is Status.OK, result
    assert 10 <= int(result.stdout) <= 20


def test_memory_bomb_in_one_process_is_stopped(run: RunPython) -> None:
    result = run("x = []\nwhile True:\n    x.append(bytearray(1 << 20))", memory_mb=128)
    assert result.status is Status.MEMORY, result


def test_memory_bomb_over_many_processes_is_stopped(run: RunPython) -> None:
    code = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(b'x') * (80 << 20)
        time.sleep(100)
time.sleep(100)
"""
    result = run(code, memory_mb=256, timeout_s=30.0)
    assert result.status is Status.MEMORY, result


@pytest.mark.slow
def test_endless_loop_ends_at_the_wall_limit(run: RunPython) -> None:
    result = run("print('started', flush=True)\nwhile True: pass", timeout_s=6.0)
    assert (result.status, result.exit_code) == (Status.TIMEOUT, None)
    assert result.stdout == "started\n"
    assert run("import time; time.sleep(100)", timeout_s=0.3).status is Status.TIMEOUT


def test_limits_and_texts_may_be_numpy_values(bwrap: None) -> None:
    code = "import sys, helper; print(sys.argv[1])"
    files = {np.str_("helper.py"): np.str_("")}
    result = run_python(code, timeout_s=np.float64(30), argv=[np.str_("a")], files=files)
    assert result.stdout == "a\n", result


@pytest.mark.slow
def test_cpu_limit_ends_a_busy_program(run: RunPython) -> None:
    result = run("while True: pass", cpu_s=1, timeout_s=60.0)
    assert result.status is Status.TIMEOUT, result
    assert result.exit_code == 128 + 24


@pytest.mark.slow
def test_cpu_limit_holds_even_when_its_signal_is_ignored(run: RunPython) -> None:
    ignoring = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    result = run(ignoring, cpu_s=1, timeout_s=60.0)
    assert result.status is Status.KILLED, result


def test_a_gigabyte_of_output_is_truncated_at_the_limit(run: RunPython) -> None:
    code = "import os\nfor _ in range(1024):\n    os.write(1, b'x' * (1 << 20))"
    result = run(code, output_bytes=100_000, timeout_s=60.0)
    assert result.status is Status.OUTPUT
    assert len(result.stdout) + len(result.stderr) == 100_000


def test_output_flood_costs_no_memory(bwrap: None) -> None:
    client.close()
    run_python("pass")
    code = "import os\nfor _ in range(1024):\n    os.write(2, b'x' * (1 << 20))"
    assert run_python(code, timeout_s=60.0).status is Status.OUTPUT
    process = client._warden._process
    assert process is not None
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak_kb = next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)
    assert peak_kb < 64 * 1024


def test_disk_of_the_box_is_limited(run: RunPython) -> None:
    one_file = "f = open('big', 'wb')\nfor _ in range(64): f.write(b'x' * (1 << 20))"
    assert "No space left" in run(one_file, disk_mb=8).stderr
    many = "for i in range(64): open(str(i), 'wb').write(b'x' * (1 << 20))"
    assert "No space left" in run(many, disk_mb=8).stderr


# ---- attacks on the host ----


def test_nothing_outside_can_be_written(run: RunPython, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    victim.chmod(0o666)
    targets = [str(victim), str(tmp_path / "new"), "/usr/planted", "/etc/planted", "/planted"]
    targets += ["/bin/planted", "/dev/planted", "/proc/sys/kernel/hostname", "/home/planted"]
    result = run(TRY_TO_WRITE, argv=targets)
    assert (result.status, result.stdout) == (Status.OK, "")
    assert victim.read_text() == "untouched"
    assert not any(
        Path(target).exists() for target in targets if target.endswith(("new", "planted"))
    )


def test_temporary_files_of_the_box_never_reach_the_host(run: RunPython) -> None:
    name = f"hone-test-{uuid.uuid4().hex}"
    result = run(f"open('/tmp/{name}', 'w').write('x'); print(open('/box/{name}').read())")
    assert result.stdout == "x\n"
    assert not Path("/tmp", name).exists()


def test_a_planted_secret_file_cannot_be_read(run: RunPython, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("planted-secret")
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    secret.chmod(0o644)
    code = """
import os, sys
for path in sys.argv[1:]:
    try:
        print(open(path).read())
    except OSError as error:
        print(type(error).__name__)
print(sorted(os.listdir('/')))
"""
    paths = [str(secret), f"/proc/1/root{secret}", "/etc/passwd", "/etc/shadow"]
    paths += [f"/proc/{os.getpid()}/cmdline", f"/box/../{secret}"]
    result = run(code, argv=paths)
    assert "planted-secret" not in result.stdout
    assert result.stdout.split().count("FileNotFoundError") == len(paths), result.stdout
    visible = set(os.listdir("/")) & {"etc", "home", "var", "work", "srv", "mnt", "opt"}
    assert not any(f"'{name}'" in result.stdout for name in visible)


def test_the_environment_cannot_be_read_in_any_way(run: RunPython) -> None:
    code = """
import os, glob
print(dict(os.environ))
for path in glob.glob('/proc/*/environ') + glob.glob('/proc/*/cmdline'):
    try:
        print(path, open(path, 'rb').read())
    except OSError:
        pass
"""
    result = run(code)
    assert result.status is Status.OK, result
    assert "planted-secret" not in result.stdout
    assert "/proc/self/environ" in result.stdout
    assert "HONE_SECRET" not in result.stdout


def test_no_descriptor_leaks_into_the_box(run: RunPython) -> None:
    result = run("import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))")
    assert result.stdout == "[0, 1, 2, 3]\n"  # 3 is the open directory


def test_tcp_and_udp_reach_no_host(run: RunPython) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(("127.0.0.1", 0))
        ports = [str(tcp.getsockname()[1]), str(udp.getsockname()[1])]
        result = run(NETWORK, argv=ports)
        assert (result.status, result.stdout) == (Status.OK, "refused refused refused refused\n")
        for listener in (tcp, udp):
            listener.settimeout(0.05)
        with pytest.raises(TimeoutError):
            tcp.accept()
        with pytest.raises(TimeoutError):
            udp.recv(10)


def test_signals_do_not_leave_the_box(run: RunPython) -> None:
    before = run("pass")
    assert before.ok
    code = """
import os, signal, sys
for pid in [os.getppid(), -1, *map(int, sys.argv[1:]), *range(2, 400)]:
    if pid != os.getpid():
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
print('done')
"""
    process = client._warden._process
    pids = [os.getpid(), os.getppid(), process.pid if process else os.getpid()]
    result = run(code, argv=[str(pid) for pid in pids])
    assert result.status in (Status.OK, Status.KILLED)
    assert run("print(1)").stdout == "1\n"
    assert process is None or process.poll() is None


def test_a_daemon_is_killed_when_its_parent_exits(run: RunPython) -> None:
    token = uuid.uuid4().hex
    code = """
import os, sys
executed, inherited = os.pipe()  # exec closes it, so reading ends when the daemon runs its program
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(1000)', sys.argv[1]])
    os._exit(0)
os.close(inherited)
assert os.read(executed, 1) == b''
print('parent exits')
"""
    result = run(code, argv=[token])
    assert (result.status, result.stdout) == (Status.OK, "parent exits\n")
    assert processes_that_mention(token) == []


def test_dangerous_system_calls_are_denied(run: RunPython) -> None:
    code = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == 'x86_64'
calls = {
    'unshare': (272 if x86 else 97, 0x10000000), 'mount': (165 if x86 else 40, 0, 0, 0, 0, 0),
    'ptrace': (101 if x86 else 117, 0), 'bpf': (321 if x86 else 280, 0, 0, 0),
    'keyctl': (250 if x86 else 219, 0), 'perf': (298 if x86 else 241, 0, 0, 0, 0, 0),
    'clone': (56 if x86 else 220, 0x10000011, 0, 0, 0, 0), 'userfaultfd': (323 if x86 else 282, 0),
    'io_uring': (425, 1, 0), 'memfd': (319 if x86 else 279, 0, 0),
}
for name, (number, *arguments) in calls.items():
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments)
    print(name, result, ctypes.get_errno())
print('uid', os.getuid(), [line for line in open('/proc/self/status') if line.startswith('Cap')])
for become in (os.setuid, os.setgid):
    try:
        become(0)
        print('became root')
    except OSError:
        pass
"""
    result = run(code)
    assert result.status is Status.OK, result
    lines = result.stdout.splitlines()
    assert all(line.split()[1:] == ["-1", "1"] for line in lines[:10]), lines
    assert lines[10].startswith("uid 65534")
    assert lines[10].count("\\t0000000000000000\\n") == 5
    assert len(lines) == 11


# ---- concurrent runs ----


def test_run_many_returns_results_in_the_order_of_the_jobs(bwrap: None) -> None:
    jobs = [Job(f"print({i})") for i in range(6)] + [
        Job("while True: pass", timeout_s=0.3),
        Job("raise ValueError"),
    ]
    results = run_many(jobs, max_concurrent=4)
    assert [result.stdout.strip() for result in results[:6]] == list("012345")
    assert [result.status for result in results[6:]] == [Status.TIMEOUT, Status.ERROR]
    with pytest.raises(ValueError, match="max_concurrent=0"):
        run_many(jobs, max_concurrent=0)


def test_limits_are_per_run(bwrap: None) -> None:
    code = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(0)
for _ in range(6):
    os.wait()
"""
    results = run_many([Job(code, processes=8, timeout_s=60.0)] * 4, max_concurrent=4)
    assert [result.status for result in results] == [Status.OK] * 4, results


def _child(queue: Any) -> None:
    queue.put(run_python("print('from a fork')").stdout)


def test_a_forked_process_may_use_the_sandbox_too(bwrap: None) -> None:
    run_python("pass")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_child, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == "from a fork\n"
    process.join(30)
    assert run_python("print('parent')").stdout == "parent\n"


def test_wall_time_is_reported(bwrap: None) -> None:
    started = time.monotonic()
    result = run_python("import time; time.sleep(0.3)")
    assert 0.3 <= result.wall_s <= time.monotonic() - started
