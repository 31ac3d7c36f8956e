"""Programs that attack from inside the box, and a search for processes they left outside."""

from __future__ import annotations

import os
from pathlib import Path

TRY_TO_WRITE = """
import os, sys
for path in sys.argv[1:]:
    try:
        with open(path, 'w') as f:
            f.write('was here')
        print('wrote', path)
    except OSError:
        pass
"""

NETWORK = """
import socket, sys
tcp, udp = map(int, sys.argv[1:])
def attempt(action):
    try:
        action()
        return 'reached'
    except OSError:
        return 'refused'
def connect():
    socket.create_connection(('127.0.0.1', tcp), timeout=2)
def send():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.connect(('127.0.0.1', udp))
    s.send(b'x')
    s.settimeout(0.2)
    s.recv(1)
def outside():
    socket.create_connection(('1.1.1.1', 53), timeout=2)
def raw():
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
print(*map(attempt, (connect, send, outside, raw)))
"""


def processes_that_mention(token: str) -> list[int]:
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (
                token.encode() in (entry / "cmdline").read_bytes()
                and int(entry.name) != os.getpid()
            ):
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids
