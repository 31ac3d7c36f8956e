"""The seccomp filter: a BPF program that denies system calls which no ordinary Python program uses.

A call of another ABI, such as a 32-bit call, is refused or kills the program.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import re
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
# Offsets in struct seccomp_data; the offset of an argument is the offset of its low word.
_CALL_NUMBER, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag of clone(2)
_TERMINAL_IOCTLS = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX type into the parent's terminal

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Call numbers on x86_64 and on aarch64; "-" where the architecture has no such call.
_TABLE = """
network (`socketpair` is allowed: it reaches no other process, and asyncio needs it):
  socket 41 198, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427
other processes:
  ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440,
  kcmp 312 272, pidfd_getfd 438 438, pidfd_open 434 434, process_mrelease 448 448,
  migrate_pages 256 238, move_pages 279 239
namespaces and mounts (inotify could watch host files below /usr):
  unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51,
  open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432,
  fspick 433 433, mount_setattr 442 442, name_to_handle_at 303 264, open_by_handle_at 304 265,
  fanotify_init 300 262, inotify_init 253 -, inotify_init1 294 26
kernel surface:
  bpf 321 280, mbind 237 235, get_mempolicy 239 236, set_mempolicy 238 237,
  set_mempolicy_home_node 450 450, vmsplice 278 75, sysfs 139 -, perf_event_open 298 241,
  userfaultfd 323 282, keyctl 250 219, add_key 248 217, request_key 249 218, init_module 175 105,
  finit_module 313 273, delete_module 176 106, kexec_load 246 104, kexec_file_load 320 294,
  reboot 169 142, syslog 103 116, acct 163 89, quotactl 179 60, swapon 167 224, swapoff 168 225,
  settimeofday 164 170, clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266,
  sethostname 170 161, setdomainname 171 162, personality 135 92, vhangup 153 58,
  lookup_dcookie 212 18, iopl 172 -, ioperm 173 -, modify_ldt 154 -, uselib 134 -
memory that no address-space limit counts:
  memfd_create 319 279, memfd_secret 447 447, shmget 29 194, msgget 68 186, semget 64 190,
  mq_open 240 180
"""
_CALLS = re.findall(r"(\w+) (\d+) (\d+|-)", _TABLE)
DENIED_CALLS: dict[str, dict[str, int]] = {
    "x86_64": {name: int(number) for name, number, _ in _CALLS},
    "aarch64": {name: int(number) for name, _, number in _CALLS if number != "-"},
}
"""The numbers of denied calls by machine and name."""
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_IOCTL = {"x86_64": 16, "aarch64": 29}
# Without a PID namespace, the warden kills the process group, so no process may leave the group.
_SETSID_AND_SETPGID = {"x86_64": (112, 109), "aarch64": (157, 154)}


def is_supported(machine: str | None = None) -> bool:
    """Returns whether the numbers of the system calls of a machine are known."""
    return (machine or platform.machine()) in _AUDIT_ARCH


@functools.lru_cache(maxsize=4)
def build_filter(machine: str | None = None, *, deny_setsid_and_setpgid: bool = False) -> bytes:
    """Returns the filter, as an array of `struct sock_filter`."""
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCH:
        raise ValueError(
            f"seccomp: no system-call table for {machine!r}; known: {sorted(_AUDIT_ARCH)}"
        )
    numbers = [*DENIED_CALLS[machine].values()]
    if deny_setsid_and_setpgid:
        numbers += _SETSID_AND_SETPGID[machine]
    permission_error, not_implemented = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    program = [
        _instruction(_LOAD, _ARCH),
        _instruction(_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _CALL_NUMBER),
    ]
    if machine == "x86_64":
        program += [_instruction(_AT_LEAST, _X32_BIT, 0, 1), _instruction(_RETURN, not_implemented)]
    for number in sorted(numbers):
        program += [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, permission_error)]
    # A filter cannot read the flags of clone3, which are in memory; libc uses clone instead.
    program += [_instruction(_EQUAL, _CLONE3, 0, 1), _instruction(_RETURN, not_implemented)]
    program += [
        _instruction(_EQUAL, _CLONE[machine], 0, 4),
        _instruction(_LOAD, _ARG0),
        _instruction(_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        _instruction(_RETURN, permission_error),
        _instruction(_RETURN, _ALLOW),
    ]
    program += [
        _instruction(_EQUAL, _IOCTL[machine], 0, 2 + 2 * len(_TERMINAL_IOCTLS)),
        _instruction(_LOAD, _ARG1),
    ]
    for request in _TERMINAL_IOCTLS:
        program += [_instruction(_EQUAL, request, 0, 1), _instruction(_RETURN, permission_error)]
    program += [_instruction(_RETURN, _ALLOW), _instruction(_RETURN, _ALLOW)]
    return b"".join(program)


def install(program: bytes) -> None:
    """Applies the filter to this thread and its later children, irrevocably."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(program, len(program))
    sock_fprog = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    no_new_privs, set_seccomp, filter_mode = 38, 22, 2  # arguments of prctl(2)
    if libc.prctl(no_new_privs, 1, 0, 0, 0) != 0 or libc.prctl(
        set_seccomp, filter_mode, ctypes.create_string_buffer(sock_fprog, len(sock_fprog)), 0, 0
    ):
        error_number = ctypes.get_errno()
        reason = os.strerror(error_number)
        raise OSError(error_number, f"seccomp: the kernel refused the filter: {reason}")


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Returns a BPF instruction; `if_true` and `if_false` are numbers of instructions to skip."""
    return struct.pack("HBBI", code, if_true, if_false, value)
