"""The client of services: one deadline, one limit of the answer, no redirects, no proxy on this machine."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hone.agents.tools.search import SearchTool
from hone.config.reward import RewardServerConfig
from hone.retrieval.client import RetrievalFailed, retrieve
from hone.rewards.failures import Failed
from hone.rewards.remote import ScoringServer
from hone.sandbox import service as sandbox_service
from hone.sandbox.service import SandboxService, SandboxServiceError
from hone.services import json_client
from hone.services.json_client import (
    ServiceError,
    ServiceTimeout,
    post_json,
    service_opener,
)
from tests.services.hostile_peers import hostile_peer, peak_mb

BOUND_S = 30.0
"""Far more than the deadline of 1 s of each request, and far less than a peer would hold the client."""


@pytest.fixture
def peer(request: pytest.FixtureRequest) -> Iterator[str]:
    with hostile_peer(request.param) as url:
        yield url


@pytest.mark.parametrize(
    "peer", ["silent", "drips_body", "drips_chunks", "drips_headers", "continues"], indirect=True
)
def test_the_deadline_holds_for_a_peer_that_sends_slowly(peer: str) -> None:
    start_s = time.monotonic()
    with pytest.raises(ServiceTimeout, match="no answer after 1 s"):
        post_json(peer, b"{}", timeout_s=1.0)
    assert 0.9 < time.monotonic() - start_s < BOUND_S


def test_the_deadline_holds_for_a_body_that_is_not_read() -> None:
    with hostile_peer("reads_nothing") as url:
        start_s = time.monotonic()
        with pytest.raises(ServiceTimeout):
            post_json(url, bytes(64 << 20), timeout_s=1.0)
        assert time.monotonic() - start_s < BOUND_S


@pytest.mark.parametrize("peer", ["drips_body", "drips_headers"], indirect=True)
@pytest.mark.parametrize("name", ["retrieval", "search_tool", "sandbox", "judge"])
def test_the_deadline_holds_for_every_client(
    peer: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_service, "_QUEUE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(sandbox_service, "_ATTEMPTS", 1)
    start_s = time.monotonic()
    assert "no answer" in CLIENTS[name](peer)
    assert time.monotonic() - start_s < BOUND_S


@pytest.mark.parametrize("kind", ["endless", "endless_chunk", "endless_chunks", "negative_chunk"])
def test_an_endless_answer_costs_bounded_memory(kind: str) -> None:
    """In a process of its own: 4 clients, each with a deadline that an endless answer does not reach."""
    code = "from tests.services.test_json_client import measure; import sys; measure(sys.argv[1])"
    with hostile_peer(kind) as url:
        run = subprocess.run(
            [sys.executable, "-c", code, url], capture_output=True, text=True, timeout=300
        )
    assert run.returncode == 0, run.stderr[-2000:]
    growth_mb, *messages = run.stdout.splitlines()
    assert float(growth_mb) < 400
    assert len(messages) == len(CLIENTS)
    assert all("the answer has more than" in message for message in messages), messages


def measure(url: str) -> None:
    """Prints how far the memory of the process grew, and the message of each client."""
    import resource

    def process_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()

    limit = process_bytes() + (4 << 30)  # spares the machine if the client has no limit
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    start_mb = peak_mb()
    messages = [call(url, 100.0) for call in CLIENTS.values()]
    sys.stdout.write("\n".join([str(peak_mb() - start_mb), *messages]))


def _retrieve(url: str, timeout_s: float = 1.0) -> str:
    with pytest.raises(RetrievalFailed) as failure:
        retrieve(url, ["a"], 1, timeout_s)
    return str(failure.value)


def _search(url: str, timeout_s: float = 1.0) -> str:
    tool = SearchTool({"retrieval_service_url": url, "timeout": timeout_s})
    with pytest.raises(ServiceError) as failure:
        asyncio.run(tool.execute("i", {"query_list": ["a"]}))
    return str(failure.value)


def _run_code(url: str, timeout_s: float = 1.0) -> str:
    service = SandboxService(url, max_concurrent=1, memory_limit_mb=64)
    with pytest.raises(SandboxServiceError) as failure:
        service.run_python("x", timeout_s=min(timeout_s, 1.0) / 4)
    return str(failure.value)


def _judge(url: str, timeout_s: float = 1.0) -> str:
    async def post() -> Failed | int:
        server = ScoringServer(RewardServerConfig(url=url, timeout_s=timeout_s, retries=0), "/")
        return await server.post({}, lambda _: 1)

    failure = asyncio.run(post())
    assert isinstance(failure, Failed)
    return failure.detail


CLIENTS: dict[str, Callable[..., str]] = {
    "retrieval": _retrieve,
    "search_tool": _search,
    "sandbox": _run_code,
    "judge": _judge,
}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
@pytest.mark.parametrize("kind", ["answers", "drips_body", "no_handshake"])
def test_the_deadline_holds_over_tls(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = str(tmp_path / "certificate"), str(tmp_path / "key")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    json_client._tls_context.cache_clear()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with hostile_peer(kind, None if kind == "no_handshake" else context) as url:
        url = url.replace("http://127.0.0.1", "https://localhost")
        if kind == "answers":
            assert post_json(url, b"{}", timeout_s=60.0) == b"{}"
        else:
            start_s = time.monotonic()
            with pytest.raises(ServiceTimeout):
                post_json(url, b"{}", timeout_s=1.0)
            assert time.monotonic() - start_s < BOUND_S
    json_client._tls_context.cache_clear()


def test_a_redirect_is_an_error_and_its_target_gets_no_request() -> None:
    with hostile_peer("redirects") as url, pytest.raises(ServiceError) as failure:
        post_json(url, b"{}", timeout_s=60.0, headers={"Authorization": "Bearer key"})
    assert failure.value.status == 302


def test_an_answer_that_breaks_off_is_an_error() -> None:
    with hostile_peer("breaks_off") as url, pytest.raises(ServiceError, match="IncompleteRead"):
        post_json(url, b"{}", timeout_s=60.0)


@pytest.mark.parametrize(
    ("url", "has_proxy"),
    [
        ("http://127.0.0.1:8000/retrieve", False),
        ("http://localhost/run_code", False),
        ("http://[::1]:9/score", False),
        ("http://10.0.0.7:8000/retrieve", True),
        ("http://localhost.example.org/", True),
    ],
)
def test_only_other_machines_are_reached_through_the_proxy(
    url: str, has_proxy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    service_opener.cache_clear()
    opener = service_opener(url)
    service_opener.cache_clear()
    kinds = [type(handler) for handler in opener.handlers]
    assert (urllib.request.ProxyHandler in kinds) is has_proxy
