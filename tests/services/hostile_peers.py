"""Services on real sockets that never end their answer, send it slowly, or break off."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
MEGABYTE = b"x" * (1 << 20)
REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
BROKEN = OK + b"Content-Length: 1000\r\n\r\n{"
PEERS: dict[str, tuple[bytes, bytes, float]] = {
    "silent": (b"", b"", 0.05),
    "drips_body": (OK + b"Content-Length: 100000\r\n\r\n", b"x", 0.05),
    "drips_chunks": (CHUNKED, b"1\r\nx\r\n", 0.05),
    "drips_headers": (OK + b"X: ", b"x", 0.05),
    "continues": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.05),
    "endless": (OK + b"\r\n", MEGABYTE, 0.0),
    "endless_chunk": (CHUNKED + b"ffffffffffff\r\n", MEGABYTE, 0.0),
    "endless_chunks": (CHUNKED, b"100000\r\n" + MEGABYTE + b"\r\n", 0.0),
    "negative_chunk": (CHUNKED + b"-1\r\n", MEGABYTE, 0.0),
    "redirects": (REDIRECT, b"", -1.0),
    "answers": (OK + b"Content-Length: 2\r\n\r\n{}", b"", -1.0),
    "breaks_off": (BROKEN, b"", -1.0),
}
"""What a peer sends first, what it then repeats, and the pause between; it ends after a negative pause."""


def peak_mb() -> float:
    """Returns the largest memory of this process so far; `getrusage` has that of its parent too."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


@contextlib.contextmanager
def hostile_peer(kind: str, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serves one kind of answer until the end of the `with` block; gives its URL."""
    has_ended = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            if kind in ("reads_nothing", "no_handshake"):
                has_ended.wait()
                return
            stream = connection if tls is None else tls.wrap_socket(connection, server_side=True)
            first, repeated, pause_s = PEERS[kind]
            with stream:
                stream.recv(1 << 16)
                stream.sendall(first)
                while pause_s >= 0 and not has_ended.wait(pause_s):
                    stream.sendall(repeated)
                stream.shutdown(socket.SHUT_WR)
                while stream.recv(
                    1 << 16
                ):  # a close before the client's would reset the connection
                    pass

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/path"
        finally:
            has_ended.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(60)
