"""The base class of clients of an HTTP inference server: calls, streams and errors."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from torch import Tensor

from hone.rollout.contract import RolloutError, Sampling
from hone.rollout.requests import Chunk, ConnectionLost, Request
from hone.rollout.server_weights import WeightFolder
from hone.text import error_text
from hone.types import Settings

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

T = TypeVar("T")
Event = dict[str, Any]
"""One JSON object of a stream."""
_UNAVAILABLE_STATUSES = (502, 503, 504)
"""The statuses of a server that starts, and of a proxy whose server is down."""
_HEALTH_POLL_INTERVAL_S = 0.2
_MAX_ERROR_CHARS = 300
"""Maximum length of a server's response in an error message."""


class ServerLost(ConnectionLost):
    """A server did not answer, or interrupted its response."""

    def __init__(self, server: HttpServer, reason: str) -> None:
        super().__init__(f"{server.safe_url} {reason}")
        self.server = server


@dataclass(eq=False)
class HttpServer:
    """The client of one server: address, state and calls. Subclasses implement the endpoints."""

    url: str = field(repr=False)
    start_timeout_s: float
    """The longest wait until the server is healthy, at the start and after the connection was lost."""
    call_timeout_s: float
    """The longest wait until a call returns, and between two chunks of a stream."""
    api_key_env: str | None = None
    eos_ids: tuple[int, ...] = ()
    tensor_parallel_size: int = 1
    num_open_requests: int = 0
    """Number of open streams."""
    healthy: bool = True
    expected_version: str | None = None
    """The weight version that the server must report; None until the version is known."""
    released_tags: Sequence[str] = ()
    """SGLang's names of the memory that the server has released: kv_cache, weights."""
    recovery: asyncio.Task[None] | None = None
    """The task that waits until the lost server has recovered."""
    version_verified: bool = False
    """Whether `verify_version` has succeeded since the server was last idle."""
    verify_lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    log_probs_after_temperature: bool = True
    """Whether log-probs are those of logits / temperature."""
    log_probs_before_truncation: bool = True
    """Whether log-probs are computed before top-k, top-p and min-p."""
    _session: aiohttp.ClientSession | None = field(default=None, repr=False)

    kind = "server"
    """The name of the server software."""
    log_prob_hint = "use temperature=1"
    """The advice to users whose server reports log-probs at temperature 1."""
    samples_by_position = honors_seeds = False
    """Whether the server has the traits of these names; see `Traits`."""
    orders_by_priority = False
    """Whether the server starts waiting requests by their priority."""
    started_by_hone = False
    """Whether hone started the server process, and so detects its restarts."""
    can_release_memory = False
    """Whether the server can release memory while the actor trains."""

    def __post_init__(self) -> None:
        if find_spec("aiohttp") is None:
            raise RolloutError(
                "rollout.server needs aiohttp, which is not installed: pip install 'hone-rl[server]'"
            )

    @property
    def safe_url(self) -> str:
        """The URL without user name and password."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit((parts.scheme, host, parts.path, "", ""))

    # -- implemented by subclasses --------------------------------------------------------------

    async def connect(self) -> None:
        """Reads the server's properties; raises RolloutError if the server cannot serve this run."""
        raise NotImplementedError

    def stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        raise NotImplementedError

    async def sample_one_token(self, prompt: list[int], sampling: Settings) -> tuple[float, float]:
        """Samples one token; returns its log-prob and the highest log-prob of any token."""
        raise NotImplementedError

    async def is_healthy(self) -> bool:
        status, _ = await self._request("GET", "/health")
        return status == 200

    async def weight_version(self) -> str | None:
        raise NotImplementedError

    async def verify_version(self) -> None:
        """Raises ServerLost if the server was restarted, or got other weights, while it was idle."""
        async with self.verify_lock:
            if self.version_verified or self.expected_version is None:
                return
            try:
                version = await self.weight_version()
            except RolloutError as error:
                raise ServerLost(self, f"did not return its weight version: {error}") from error
            self.check_version(version)
            self.version_verified = True

    def check_version(self, version: str | None) -> None:
        """Raises ServerLost if the server has reported another version than `expected_version`."""
        if self.expected_version is not None and version != self.expected_version:
            raise ServerLost(
                self,
                f"has weights {version!r} instead of {self.expected_version!r}: it was restarted or updated",
            )

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def release_memory(self, tags: Sequence[str]) -> bool:
        """Releases memory and returns True, or returns False if the server is not idle."""
        return False

    async def resume_memory(self, tags: Sequence[str]) -> None: ...

    def check_updates_supported(self) -> None:
        """Raises if the server cannot load new weights."""

    async def load_folder(self, folder: str, version: str) -> None:
        """Makes the server load a checkpoint folder, drop the KV cache and report `version`."""
        raise NotImplementedError

    async def send_tensors(self, bucket: Mapping[str, Tensor]) -> None:
        """Sends some of the new weights in a request."""
        raise NotImplementedError

    async def end_update(self, version: str) -> None:
        """Ends a weight update after `send_tensors`: the server drops the KV cache and reports `version`."""
        raise NotImplementedError

    async def check_weights(self, version: str, folder: WeightFolder | None) -> None:
        """Raises if the server does not report this version, or returns other weights than `folder` has."""
        if (reported_version := await self.weight_version()) != version:
            raise RolloutError(
                f"{self.safe_url} acknowledged weights {version!r}, but has {reported_version!r}"
            )

    # -- calls ----------------------------------------------------------------------------------

    def session(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            headers = {}
            if self.api_key_env:
                key = os.environ.get(self.api_key_env)
                if not key:
                    raise RolloutError(
                        f"rollout.server.api_key_env={self.api_key_env}: this environment variable is not set"
                    )
                headers["Authorization"] = f"Bearer {key}"
                self.url = self.safe_url  # the key replaces a user name and password
            self._session = aiohttp.ClientSession(
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.call_timeout_s),
                connector=aiohttp.TCPConnector(limit=0),
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(self, path: str, body: Settings | None = None, *, get: bool = False) -> Any:
        """Returns the JSON response of an endpoint; raises RolloutError if the status is not 200."""
        status, text = await self._request("GET" if get else "POST", path, body)
        if status in _UNAVAILABLE_STATUSES:
            raise ServerLost(self, f"answered {status} to {path}: {shorten(text)}")
        if status != 200:
            raise RolloutError(f"{self.safe_url}{path} answered {status}: {shorten(text)}")
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            return text

    async def call_checked(self, path: str, body: Settings) -> None:
        """Calls an endpoint; raises RolloutError if the response does not report success."""
        response = await self.call(path, body)
        if not isinstance(response, dict) or response.get("success") is not True:
            raise RolloutError(f"{self.safe_url}{path} did not succeed: {shorten(str(response))}")

    async def _request(
        self, method: str, path: str, body: Settings | None = None
    ) -> tuple[int, str]:
        import aiohttp

        async def send_request() -> tuple[int, str]:
            async with self.session().request(method, self.url + path, json=body) as response:
                return response.status, await response.text(errors="replace")

        try:
            return await _wait_for(self.call_timeout_s, send_request())
        except asyncio.TimeoutError:
            raise ServerLost(
                self, f"did not answer {path} within {self.call_timeout_s:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(self, f"was lost during {path} ({error_text(error)})") from error

    async def events(self, path: str, body: Settings) -> AsyncGenerator[Event, None]:
        """Yields the JSON objects of a stream of `data:` lines, until `[DONE]`."""
        import aiohttp

        # A request may wait in the server's queue before its first chunk.
        timeout_s = self.start_timeout_s
        client_timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=self.call_timeout_s,
            sock_read=self.start_timeout_s,
        )
        try:
            async with self.session().post(
                self.url + path, json=body, timeout=client_timeout
            ) as response:
                if response.status != 200:
                    text = await response.text(errors="replace")
                    if response.status < 500:
                        raise RolloutError(
                            f"{self.safe_url}{path} refused a request ({response.status}): {shorten(text)}"
                        )
                    raise ServerLost(self, f"answered {response.status} to {path}: {shorten(text)}")
                partial_line = b""
                while True:
                    received = await _wait_for(timeout_s, response.content.readany())
                    timeout_s = self.call_timeout_s
                    if not received:
                        reason = "ended a stream without [DONE]"
                        if partial_line.strip():  # the message of an error
                            reason += f", after {shorten(partial_line.decode(errors='replace'))}"
                        raise ServerLost(self, reason)
                    *lines, partial_line = (partial_line + received).split(b"\n")
                    for line in lines:
                        text = line.decode(errors="replace").strip()
                        if text == "data: [DONE]":
                            return
                        if text.startswith("data:"):
                            yield self._parse_event(text.removeprefix("data:"))
        except asyncio.TimeoutError:
            raise ServerLost(self, f"sent nothing for {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(self, f"interrupted a stream ({error_text(error)})") from error

    def _parse_event(self, text: str) -> Event:
        try:
            event = json.loads(text)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise ServerLost(self, f"sent a line that is not a JSON object: {shorten(text)}")
        if event.get("error") is not None:
            raise ServerLost(self, f"reported an error in a stream: {shorten(str(event['error']))}")
        return event

    @contextmanager
    def wrap_parse_errors(self, response: object) -> Iterator[None]:
        """Turns errors of reading a malformed response into RolloutError, which fails only one request."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise RolloutError(
                f"{self.safe_url} sent a response that hone cannot read ({error_text(error)}): "
                f"{shorten(str(response))}"
            ) from error

    async def wait_until_healthy(self) -> None:
        """Polls `/health` until it answers 200; raises RolloutError after `start_timeout_s`."""
        reason = "its /health does not answer 200"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.start_timeout_s
        while loop.time() < deadline:
            try:
                if await self.is_healthy():
                    return
            except ServerLost as error:
                reason = str(error)
            self.restart_if_ended()
            await asyncio.sleep(_HEALTH_POLL_INTERVAL_S)
        raise RolloutError(
            f"{self.safe_url} is not healthy after {self.start_timeout_s:g} s "
            f"(rollout.server.max_start_wait_time): {reason}"
        )

    def restart_if_ended(self) -> None:
        """Restarts a server process that hone started and that has ended; raises if the restart fails."""

    async def detect_log_prob_mode(self) -> None:
        """Detects how the server computes log-probs, from single tokens with different parameters.

        Log-probs after temperature change if the temperature changes. Log-probs after truncation are 0 with
        top_k=1, because only one token is left.
        """
        greedy_log_prob, max_log_prob = await self.sample_one_token([1], {"temperature": 0.0})
        _, max_log_prob_at_2 = await self.sample_one_token([1], {"temperature": 2.0})
        top_1_log_prob, _ = await self.sample_one_token([1], {"temperature": 1.0, "top_k": 1})
        if abs(max_log_prob) > 1e-3:  # otherwise this log-prob is about 0 in every mode
            difference = abs(max_log_prob_at_2 - max_log_prob)
            self.log_probs_after_temperature = difference > 1e-4 * abs(max_log_prob)
            self.log_probs_before_truncation = abs(top_1_log_prob) > 0.5 * abs(greedy_log_prob)

    def log_prob_problem(self, sampling: Sampling) -> str | None:
        """Returns why training cannot use log-probs of requests with these parameters; None if it can."""
        if not self.log_probs_after_temperature and sampling.temperature not in (0, 1):
            return (
                f"{self.safe_url} reports log-probs at temperature 1, and the rollout has temperature="
                f"{sampling.temperature}; {self.log_prob_hint}"
            )
        if not self.log_probs_before_truncation and sampling.truncates:
            return (
                f"{self.safe_url} reports log-probs after truncation; for training, use top_k=-1, top_p=1.0 "
                "and min_p=0.0"
            )
        return None


async def _wait_for(timeout_s: float, coroutine: Coroutine[None, None, T]) -> T:
    """Replaces `asyncio.wait_for`, which before Python 3.12 may lose a cancellation as the coroutine ends."""
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        if not task.done():
            task.cancel()
    if task.cancelled() or not task.done():
        raise asyncio.TimeoutError
    return task.result()


def shorten(text: str) -> str:
    """Returns text on one line, shortened to the length that an error message may quote."""
    text = " ".join(text.split())
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + " …"
