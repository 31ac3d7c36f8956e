"""An HTTP server of JSON requests and pages with limits, for the services of this package.

A request must come from a program that knows the server: requests of web pages have another Host, Origin or
Content-Type and are refused. There is no authentication, so servers listen on loopback by default.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import json
import logging
import select
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias

from hone.services.sockets import DISCONNECT_EVENTS, Deadline, DeadlineReader
from hone.types import JsonObject, JsonValue

log = logging.getLogger(__name__)

HOST_NAME_HELP = "a host name that clients use for this server; can be repeated"
MAX_CONNECTIONS = 512
"""More connections wait in the queue of the kernel."""
_MIN_COUNTED_BODY_BYTES = 1 << 16
"""Smaller bodies do not count as buffered bytes: the number of connections limits them."""
_READ_TIMEOUT_S = 60.0  # for the headers of a request, and for its body
_WRITE_TIMEOUT_S = 60.0  # for a part of the answer
_CHECK_INTERVAL_S = 0.2  # between two checks whether the client of a waiting request is connected
_FAILURE_LOG_INTERVAL_S = 10.0
_CHUNK_BYTES = 1 << 16


class HttpError(Exception):
    """A request is refused; nothing runs."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class ClientDisconnected(Exception):
    """The client closed its connection, so that nobody waits for the answer."""


class Slots:
    """A semaphore that is acquired by several slots at once: requests that run, bytes that are held."""

    def __init__(self, count: int) -> None:
        self._num_free, self._condition = count, threading.Condition()

    def acquire(self, count: int, timeout_s: float) -> bool:
        with self._condition:
            if not self._condition.wait_for(lambda: self._num_free >= count, timeout_s):
                return False
            self._num_free -= count
            return True

    def release(self, count: int) -> None:
        with self._condition:
            self._num_free += count
            self._condition.notify_all()


class Caller:
    """The client of one request."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._poll = select.poll()
        self._poll.register(connection, DISCONNECT_EVENTS)

    def has_disconnected(self) -> bool:
        return bool(self._poll.poll(0))

    def check(self) -> None:
        """Raises ClientDisconnected if the client has disconnected."""
        if self.has_disconnected():
            raise ClientDisconnected

    @contextlib.contextmanager
    def hold(self, slots: Slots, count: int = 1) -> Iterator[None]:
        """Holds slots in the `with` block; raises ClientDisconnected if the client disconnects before."""
        while not slots.acquire(count, _CHECK_INTERVAL_S):
            self.check()
        try:
            yield
        finally:
            slots.release(count)


Answer: TypeAlias = JsonObject | Iterator[bytes]
"""A JSON object, or the parts of its text, which are sent as they are made."""
Get: TypeAlias = Callable[[], JsonObject | str]
"""Returns a JSON object, or the text of an HTML page."""
Post: TypeAlias = Callable[[JsonObject, Caller], Answer]
"""Answers a request; ValueError says what is wrong with it."""


class JsonServer(ThreadingHTTPServer):
    """Serves POST requests with a JSON object as body, and GET requests of objects and pages, by path."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        host: str,
        port: int,
        *,
        posts: Mapping[str, Post],
        gets: Mapping[str, Get] | None = None,
        max_body_bytes: int,
        max_connections: int = MAX_CONNECTIONS,
        host_names: Sequence[str] = (),
    ) -> None:
        self.posts, self.gets, self.max_body_bytes = posts, gets or {}, max_body_bytes
        self.buffered_bytes = Slots(2 * max_body_bytes)
        self.host_names = {"localhost", socket.gethostname().lower(), *map(str.lower, host_names)}
        self._connections = Slots(max_connections)
        self._log_lock, self._next_log_s, self._num_unlogged = threading.Lock(), 0.0, 0
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer looks up a name, which may take long

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if self.address_family == socket.AF_INET6 else host
        return f"http://{name!s}:{port}"

    def serve_until_interrupted(self) -> None:
        """Serves until SIGINT or SIGTERM, and closes the server."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with self, contextlib.suppress(KeyboardInterrupt):
            self.serve_forever()

    def is_own_host(self, host: str) -> bool:
        """Returns whether the host of a request is an IP address or a name of this server.

        In a DNS-rebinding attack, it is a name of the attacker.
        """
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            return True
        return host in self.host_names

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """Accepts a connection; while there are too many, it stays in the queue of the kernel."""
        if not self._connections.acquire(1, _CHECK_INTERVAL_S):
            raise BlockingIOError("too many connections")
        try:
            return super().get_request()
        except OSError:
            self._connections.release(1)
            time.sleep(_CHECK_INTERVAL_S)  # too many open files, for example
            raise

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        """Closes a connection; called once for each connection that was accepted."""
        super().shutdown_request(request)
        self._connections.release(1)

    def handle_error(
        self,
        request: socket.socket | tuple[bytes, socket.socket],
        client_address: tuple[str, int] | str,
    ) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):  # not a lost connection
            self.log_failure(error)

    def log_failure(self, error: BaseException | None) -> None:
        """Logs a failed request with its traceback; at most one in ten seconds, and counts the others."""
        with self._log_lock:
            if time.monotonic() < self._next_log_s:
                self._num_unlogged += 1
                return
            self._next_log_s = time.monotonic() + _FAILURE_LOG_INTERVAL_S
            num_unlogged, self._num_unlogged = self._num_unlogged, 0
        count = f" ({num_unlogged} more failed before)" if num_unlogged else ""
        log.error("a request to %s failed%s", self.address, count, exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    server: JsonServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self.rfile.close()
        self._deadline = Deadline(_READ_TIMEOUT_S)
        self.rfile = io.BufferedReader(DeadlineReader(self.connection, self._deadline))

    def handle_one_request(self) -> None:
        self._deadline.restart(_READ_TIMEOUT_S)
        try:
            super().handle_one_request()
        except (ClientDisconnected, ConnectionError):
            self.close_connection = True

    def do_GET(self) -> None:
        try:
            self._check_path(self.server.gets)
            self._check_sender()
        except HttpError as error:
            self._refuse(error)
        else:
            self._send(HTTPStatus.OK, self.server.gets[self.path]())

    def do_POST(self) -> None:
        caller = Caller(self.connection)
        try:
            self._check_path(self.server.posts)
            self._check_sender()
            self._check_content_type()
            length = self._body_length()
            num_counted = length if length >= _MIN_COUNTED_BODY_BYTES else 0
            with caller.hold(self.server.buffered_bytes, num_counted):
                status, answer = self._answer(self._read_body(length), caller)
        except HttpError as error:
            self._refuse(error)
        else:
            self._send(status, answer)

    def _answer(self, body: JsonObject, caller: Caller) -> tuple[HTTPStatus, Answer]:
        try:
            return HTTPStatus.OK, self.server.posts[self.path](body, caller)
        except ClientDisconnected:
            raise
        except ValueError as error:
            return HTTPStatus.BAD_REQUEST, {"detail": str(error)}
        except Exception as error:
            self.server.log_failure(error)
            detail = f"{type(error).__name__}; the log of the server has the traceback"
            return HTTPStatus.INTERNAL_SERVER_ERROR, {"detail": detail}

    def _check_path(self, paths: Collection[str]) -> None:
        if self.path not in paths:
            known_paths = " and ".join([*self.server.posts, *self.server.gets])
            raise HttpError(HTTPStatus.NOT_FOUND, f"only {known_paths} are served")

    def _check_sender(self) -> None:
        """Raises HttpError for requests of web pages, which have another Host or Origin."""
        host_header = self.headers.get("Host", "")
        host = host_header.strip().lower()
        host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if not self.server.is_own_host(host):
            detail = (
                f"Host {host!r:.80} is not a name of this server; start it with --name {host:.80}"
            )
            raise HttpError(HTTPStatus.FORBIDDEN, detail)
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{host_header}":
            raise HttpError(HTTPStatus.FORBIDDEN, f"Origin {origin!r:.80} is not this server")

    def _check_content_type(self) -> None:
        content_type = (self.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            detail = f"Content-Type must be application/json, not {content_type!r:.80}"
            raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, detail)

    def _body_length(self) -> int:
        length_text = self.headers.get("Content-Length")
        if length_text is None or self.headers.get("Transfer-Encoding") is not None:
            raise HttpError(
                HTTPStatus.LENGTH_REQUIRED, "Content-Length is required; chunked bodies are refused"
            )
        is_single = len(self.headers.get_all("Content-Length", [])) == 1
        is_number = length_text.isascii() and length_text.isdigit() and len(length_text) <= 20
        if not (is_single and is_number):
            detail = f"Content-Length {length_text!r:.80} is not a length"
            raise HttpError(HTTPStatus.BAD_REQUEST, detail)
        length, max_bytes = int(length_text), self.server.max_body_bytes
        if length > max_bytes:
            detail = f"the body has {length} bytes; at most {max_bytes} are allowed"
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail)
        return length

    def _read_body(self, length: int) -> JsonObject:
        self._deadline.restart(_READ_TIMEOUT_S)
        data = self.rfile.read(length)
        if len(data) != length:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"the body ended after {len(data)} bytes")
        try:
            body: JsonValue = json.loads(data)
        except RecursionError:
            raise HttpError(HTTPStatus.BAD_REQUEST, "the JSON is nested too deeply") from None
        except ValueError as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            detail = f"the body must be a JSON object, not {type(body).__name__}"
            raise HttpError(HTTPStatus.BAD_REQUEST, detail)
        return body

    def _refuse(self, error: HttpError) -> None:
        """Answers a request and closes the connection.

        The rest of the body is received and dropped: a close before would take the answer from the client.
        """
        self.close_connection = True
        self._send(error.status, {"detail": str(error)})
        self._deadline.restart(_READ_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while self.rfile.read1(_CHUNK_BYTES):
                pass

    def _send(self, status: HTTPStatus, answer: Answer | str) -> None:
        """Sends an object or a page with its length, and parts as chunks."""
        deadline = Deadline(_WRITE_TIMEOUT_S)
        self.connection.settimeout(deadline.remaining_s())
        self.send_response(status)
        is_page = isinstance(answer, str)
        self.send_header(
            "Content-Type", "text/html; charset=utf-8" if is_page else "application/json"
        )
        if isinstance(answer, (dict, str)):
            body = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        is_chunked = self.request_version != "HTTP/1.0"
        self.close_connection |= not is_chunked
        self.send_header(
            *(("Transfer-Encoding", "chunked") if is_chunked else ("Connection", "close"))
        )
        self.end_headers()
        for part in answer:
            self.connection.settimeout(deadline.remaining_s())
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part) if is_chunked else part)
        if is_chunked:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: str | int) -> None:
        log.debug(format, *args)
