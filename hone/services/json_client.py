"""Posts JSON to services: the servers of rewards, retrieval, sandbox and search.

A request has one deadline for the whole exchange (connection, headers, body) and a limit of the answer's
size, so that a service that never ends its answer costs neither memory nor time. Only the lookup of a host
name has the deadline of the system's resolver.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from hone.services.sockets import Deadline, DeadlineReader, TooManyBytes

MAX_ANSWER_BYTES = 1 << 26
"""The limit of everything that an answer has: status, headers and body."""
_MAX_ERROR_BYTES = 4096
_CHUNK_BYTES = 1 << 16


class ServiceError(OSError):
    """A service gave no usable answer; the message contains no URL.

    `status` is the HTTP status, or None if there was no complete answer.
    """

    def __init__(
        self,
        detail: str,
        *,
        status: int | None = None,
        content: bytes = b"",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.content, self.retry_after_s = status, content, retry_after_s


class ServiceTimeout(ServiceError):
    """The answer was not complete at the deadline."""


class AnswerTooLarge(ServiceError):
    """The answer has more than MAX_ANSWER_BYTES."""


def post_json(
    url: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
) -> bytes:
    """Returns the answer of a service to a JSON body; raises ServiceError. Redirects are errors."""
    default_headers = {"Content-Type": "application/json", "Accept": "application/json"}
    request = urllib.request.Request(url, body, {**default_headers, **(headers or {})})
    try:
        with service_opener(url).open(request, timeout=timeout_s) as answer:
            # Read in pieces, because the memory of one read is allocated for the length that it names.
            content = b"".join(iter(lambda: answer.read(_CHUNK_BYTES), b""))
            if answer.length:  # bytes that Content-Length promised and that did not come
                raise http.client.IncompleteRead(content, answer.length)
            return content
    except urllib.error.HTTPError as error:
        raise _http_error(error) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)
        if isinstance(cause, TimeoutError):
            raise ServiceTimeout(f"no answer after {timeout_s:g} s") from error
        if isinstance(cause, TooManyBytes):
            raise AnswerTooLarge(f"the answer has {cause}") from error
        raise ServiceError(str(cause) or type(cause).__name__) from error


def _http_error(error: urllib.error.HTTPError) -> ServiceError:
    content = b""
    # The status is reported if the body cannot be read.
    with contextlib.suppress(OSError, http.client.HTTPException), error:
        content = error.read(_MAX_ERROR_BYTES)
    retry_after_s = None
    with contextlib.suppress(ValueError):  # the header may be a date, which is ignored
        retry_after_s = max(0.0, float(error.headers.get("Retry-After", "")))
    detail = f"HTTP {error.code}: {content[:500].decode(errors='replace')}"
    return ServiceError(detail, status=error.code, content=content, retry_after_s=retry_after_s)


@functools.cache
def service_opener(url: str) -> urllib.request.OpenerDirector:
    """Returns a URL opener with deadlines, without redirects, and without a proxy for this machine."""
    is_local = urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")
    proxies = [urllib.request.ProxyHandler({})] if is_local else []
    return urllib.request.build_opener(_HTTPHandler, _HTTPSHandler, _NoRedirect, *proxies)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would send an API key to another host."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


class _HTTPConnection(http.client.HTTPConnection):
    """A connection whose timeout is the deadline of everything that happens on it."""

    timeout: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline = Deadline(self.timeout)
        self._create_connection = self._connect_before_deadline
        response_class: Any = functools.partial(_Response, deadline=self._deadline)
        self.response_class = response_class

    def _connect_before_deadline(self, address: tuple[str, int], *options: object) -> socket.socket:
        """Connects to the first address of the host that accepts; all of them share the deadline."""
        failure: OSError = OSError(f"the host {address[0]} has no address")
        for _, _, _, _, resolved in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            ip, port = str(resolved[0]), int(resolved[1])
            try:
                connection = socket.create_connection((ip, port), self._deadline.remaining_s())
            except OSError as error:
                failure = error
            else:
                return connection
        raise failure

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(self._deadline.remaining_s())  # of the TLS handshake

    def send(self, data: Any) -> None:
        if self.sock is None:
            self.connect()
        self.sock.settimeout(self._deadline.remaining_s())
        super().send(data)


class _HTTPSConnection(http.client.HTTPSConnection, _HTTPConnection):
    """The same over TLS: `super().connect()` of HTTPSConnection is the one above."""


class _Response(http.client.HTTPResponse):
    """An answer that is read until the deadline of its connection."""

    def __init__(self, sock: socket.socket, *args: Any, deadline: Deadline, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp.close()
        self.fp = io.BufferedReader(DeadlineReader(sock, deadline, MAX_ANSWER_BYTES))


class _HTTPHandler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HTTPConnection, request)


class _HTTPSHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HTTPSConnection, request, context=_tls_context())


@functools.cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()
