"""The filter, run by a small BPF interpreter, and its system call numbers."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from hone.sandbox import seccomp

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = 0x7FFF0000, 0x80000000
HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"__NR_(\w+)\s+(\d+)"),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), r"__NR(?:3264)?_(\w+)\s+(\d+)"),
}


def run_filter(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """Interprets the BPF instructions of the filter and returns its result."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=iIQ6Q", number, arch, 0, *padded)
    code = list(struct.iter_unpack("HBBI", program))
    register, position = 0, 0
    while True:
        op, if_true, if_false, value = code[position]
        position += 1
        if op == 0x06:
            return int(value)
        if op == 0x20:
            register = struct.unpack_from("=I", data, value)[0]
        else:
            is_true = {
                0x15: register == value,
                0x35: register >= value,
                0x45: bool(register & value),
            }[op]
            position += if_true if is_true else if_false


def errno_result(code: int) -> int:
    return 0x00050000 | code


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_denied_calls_are_refused_and_others_pass(machine: str) -> None:
    program = seccomp.build_filter(machine)
    denied = set(seccomp.DENIED_CALLS[machine].values())
    special = {56, 220, 435, 16, 29}
    for number in range(500):
        expected = errno_result(errno.EPERM) if number in denied else ALLOW
        if number not in special - denied:
            assert run_filter(program, ARCH[machine], number) == expected, number


@pytest.mark.parametrize(("machine", "clone", "ioctl"), [("x86_64", 56, 16), ("aarch64", 220, 29)])
def test_clone_may_fork_but_not_make_namespaces(machine: str, clone: int, ioctl: int) -> None:
    program, arch = seccomp.build_filter(machine), ARCH[machine]
    assert run_filter(program, arch, clone, 0x01200011) == ALLOW
    assert run_filter(program, arch, clone, 0x003D0F00) == ALLOW  # a thread
    for bit in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert run_filter(program, arch, clone, bit | 17) == errno_result(errno.EPERM)
    assert run_filter(program, arch, 435) == errno_result(errno.ENOSYS)
    assert run_filter(program, arch, ioctl, 0, 0x5412) == errno_result(errno.EPERM)
    assert run_filter(program, arch, ioctl, 0, 0x541C) == errno_result(errno.EPERM)
    assert run_filter(program, arch, ioctl, 0, 0x5401) == ALLOW


def test_foreign_architecture_is_killed_and_x32_is_absent() -> None:
    program = seccomp.build_filter("x86_64")
    assert run_filter(program, 0x40000003, 1) == KILL  # 32-bit calls by int 0x80
    assert run_filter(program, ARCH["x86_64"], 0x40000000 | 41) == errno_result(errno.ENOSYS)
    assert run_filter(seccomp.build_filter("aarch64"), ARCH["x86_64"], 1) == KILL


def test_setsid_and_setpgid_are_denied_on_request() -> None:
    plain, strict = (
        seccomp.build_filter("x86_64"),
        seccomp.build_filter("x86_64", deny_setsid_and_setpgid=True),
    )
    for number in (109, 112):
        assert run_filter(plain, ARCH["x86_64"], number) == ALLOW
        assert run_filter(strict, ARCH["x86_64"], number) == errno_result(errno.EPERM)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_call_numbers_are_those_of_the_kernel_headers(machine: str) -> None:
    path, pattern = HEADERS[machine]
    if not path.exists():
        pytest.skip(f"{path} is not installed (linux-libc-dev)")
    headers = {name: int(number) for name, number in re.findall(pattern, path.read_text())}
    denied = seccomp.DENIED_CALLS[machine]
    assert {name: headers.get(name) for name in denied} == denied


def test_unknown_machine_is_named() -> None:
    assert not seccomp.is_supported("riscv64")
    with pytest.raises(ValueError, match="riscv64"):
        seccomp.build_filter("riscv64")
