"""One inference server behind HTTP: calls, streamed lines, and the sentences of its failures."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import torch
from torch import Tensor

from hone.rollout.contract import RolloutError, Sampling
from hone.rollout.requests import Chunk, ConnectionLost, Request
from hone.rollout.server_weights import WeightFolder
from hone.types import Settings

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

T = TypeVar("T")
Event = dict[str, Any]
"""One object of a stream, as the server wrote it."""
_POLL_S = 0.2
_CHECKED, _ROWS = 8, 4
"""Weights that are read back after an update, and rows of each."""
_SHOWN = 300
"""Characters of a server's answer that an error message repeats."""


class ServerLost(ConnectionLost):
    """A server did not answer, or broke off its answer."""

    def __init__(self, server: HttpServer, reason: str) -> None:
        super().__init__(f"{server.shown_url} {reason}")
        self.server = server


@dataclass(frozen=True)
class LogProbMode:
    """What the log-probs of a server mean, as two requests at its start have shown."""

    after_temperature: bool = True
    before_truncation: bool = True


@dataclass(frozen=True)
class Limits:
    """The waits of one server, in seconds."""

    start_s: float
    """Until a server is healthy, at the start and after a loss."""
    call_s: float
    """Until a call is answered, and between two chunks of a stream."""


@dataclass(eq=False)
class HttpServer:
    """A server's address and state; subclasses know its endpoints."""

    url: str = field(repr=False)
    limits: Limits
    api_key_env: str | None = None
    streams: int = 0
    """Requests that it serves now."""
    healthy: bool = True
    weights: str | None = None
    """The weight version that it must report; None until it is known."""
    released: Sequence[str] = ()
    """What its memory lacks while it sleeps: kv_cache, weights."""
    recovery: asyncio.Task[None] | None = None
    verified: bool = False
    """Whether its weight version was read since it last served no request."""
    verifying: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    mode: LogProbMode = LogProbMode()
    _session: aiohttp.ClientSession | None = field(default=None, repr=False)

    kind = "server"
    log_prob_hint = "use temperature=1"
    positional = False
    seeded = False
    launched_here = False
    """Whether hone has started its process, and notices a restart."""
    frees_memory = False
    """Whether it can give back memory while the actor trains."""
    shows_weights = False
    """Whether it has a route that shows weights."""

    @property
    def shown_url(self) -> str:
        """The address without a user name or password."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit((parts.scheme, host, parts.path, "", ""))

    # -- what a subclass provides ---------------------------------------------------------------

    async def connect(self) -> None:
        """Reads what the server is; raises RolloutError if it cannot serve this run."""
        raise NotImplementedError

    def stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        raise NotImplementedError

    async def one_token(self, prompt: list[int], sampling: Settings) -> tuple[float, float]:
        """Returns the log-probs of one sampled token and of the most likely one."""
        raise NotImplementedError

    async def healthy_now(self) -> bool:
        status, _ = await self._answer("GET", "/health")
        return status == 200

    async def weight_version(self) -> str | None:
        raise NotImplementedError

    async def verify_version(self) -> None:
        """Raises ServerLost if it was restarted or updated while it served no request."""
        async with self.verifying:
            if self.verified or self.weights is None:
                return
            try:
                version = await self.weight_version()
            except RolloutError as error:
                raise ServerLost(self, f"did not tell its weight version: {error}") from error
            if version != self.weights:
                raise ServerLost(
                    self,
                    f"has weights {version!r} instead of {self.weights!r}: it was restarted or updated",
                )
            self.verified = True

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def release_memory(self, tags: Sequence[str]) -> bool:
        """Returns whether it has freed this memory; a server that is not idle does not."""
        return False

    async def resume_memory(self, tags: Sequence[str]) -> None: ...

    def refuse_updates(self) -> None:
        """Raises if the server cannot take new weights, and so only generates."""

    async def load_folder(self, folder: str, version: str) -> None:
        """Makes the server load a checkpoint folder, drop its KV cache and report `version`."""
        raise NotImplementedError

    async def send_tensors(self, bucket: Mapping[str, Tensor]) -> None:
        """Sends some new weights in a request."""
        raise NotImplementedError

    async def end_update(self, version: str) -> None:
        """Ends an update by `send_tensors`: the server drops its KV cache and reports `version`."""
        raise NotImplementedError

    async def values_of(self, name: str, count: int) -> Any:
        """Returns the first rows of one weight; None if the server does not show its weights."""
        return None

    async def check_weights(self, version: str, folder: WeightFolder | None) -> None:
        """Raises if the server has another version, or other values in a sample of its weights."""
        if (current := await self.weight_version()) != version:
            raise RolloutError(
                f"{self.shown_url} acknowledged weights {version!r}, but has {current!r}"
            )
        checked = 0
        for name, tensor in folder.sample(_CHECKED) if folder is not None else ():
            shown = await self.values_of(name, _ROWS)
            if shown is None:
                continue
            checked += 1
            values, expected = torch.tensor(shown).flatten(), tensor[:_ROWS].float().flatten()
            values = values[: len(expected)]  # a server with several replicas shows each
            if values.shape != expected.shape or not torch.allclose(
                values.float(), expected, rtol=2e-2, atol=1e-6
            ):
                raise RolloutError(
                    f"{self.shown_url} acknowledged new weights, but {name!r} has other values: the update "
                    "was applied in part"
                )
        if folder is not None and not checked and self.shows_weights:
            self.shows_weights = False  # one warning
            log.warning(
                "%s shows none of the weights that were asked for after an update; updates are checked by "
                "their version alone",
                self.shown_url,
            )

    # -- calls ----------------------------------------------------------------------------------

    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            aiohttp = _aiohttp()
            headers = {}
            if self.api_key_env:
                key = os.environ.get(self.api_key_env)
                if not key:
                    raise RolloutError(
                        f"rollout.server.api_key_env={self.api_key_env}: this environment variable is not set"
                    )
                headers["Authorization"] = f"Bearer {key}"
                self.url = self.shown_url  # the key replaces a user name and password
            self._session = aiohttp.ClientSession(
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.limits.call_s),
                connector=aiohttp.TCPConnector(limit=0),
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(self, path: str, body: Settings | None = None, *, get: bool = False) -> Any:
        """Returns the JSON answer of an endpoint; another status than 200 raises RolloutError."""
        status, text = await self._answer("GET" if get else "POST", path, body)
        if status != 200:
            raise RolloutError(f"{self.shown_url}{path} answered {status}: {shortened(text)}")
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            return text

    async def has(self, path: str) -> bool:
        status, _ = await self._answer("GET", path)
        return status == 200

    async def _answer(
        self, method: str, path: str, body: Settings | None = None
    ) -> tuple[int, str]:
        aiohttp = _aiohttp()
        try:
            work = self._exchange(method, path, body)
            return await _within(self.limits.call_s, work)
        except asyncio.TimeoutError:
            raise ServerLost(
                self, f"did not answer {path} within {self.limits.call_s:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(self, f"is lost in {path} ({_named(error)})") from error

    async def _exchange(self, method: str, path: str, body: Settings | None) -> tuple[int, str]:
        async with self.session().request(method, self.url + path, json=body) as answer:
            return answer.status, await answer.text()

    async def events(self, path: str, body: Settings) -> AsyncGenerator[Event, None]:
        """Yields the objects of a stream of `data:` lines, up to `[DONE]`."""
        aiohttp = _aiohttp()
        # Until the first part a request may wait for its turn in the server's queue.
        limit_s = self.limits.start_s
        wait = aiohttp.ClientTimeout(
            total=None, sock_connect=self.limits.call_s, sock_read=self.limits.start_s
        )
        try:
            async with self.session().post(self.url + path, json=body, timeout=wait) as answer:
                if answer.status != 200:
                    text = await answer.text()
                    if answer.status < 500:
                        raise RolloutError(
                            f"{self.shown_url}{path} refused a request ({answer.status}): {shortened(text)}"
                        )
                    raise ServerLost(self, f"answered {answer.status} to {path}: {shortened(text)}")
                rest = b""
                while True:
                    part = await _within(limit_s, answer.content.readany())
                    limit_s = self.limits.call_s
                    if not part:
                        raise ServerLost(self, "ended a stream without [DONE]")
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        text = line.decode(errors="replace").strip()
                        if text == "data: [DONE]":
                            return
                        if text.startswith("data:"):
                            yield self._event(text.removeprefix("data:"))
        except asyncio.TimeoutError:
            raise ServerLost(self, f"sent nothing for {limit_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(self, f"broke off a stream ({_named(error)})") from error

    def _event(self, text: str) -> Event:
        try:
            event = json.loads(text)
        except ValueError:
            raise ServerLost(self, f"sent a line that is no JSON: {shortened(text)}") from None
        if not isinstance(event, dict):
            raise ServerLost(self, f"sent a line that is no object: {shortened(text)}")
        if "error" in event:
            raise ServerLost(
                self, f"reported an error in a stream: {shortened(str(event['error']))}"
            )
        return event

    async def wait_until_healthy(self) -> None:
        """Polls `/health` until it answers 200; raises RolloutError at the deadline."""
        reason = "its /health does not answer 200"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.limits.start_s
        while loop.time() < deadline:
            try:
                if await self.healthy_now():
                    return
            except ServerLost as error:
                reason = str(error)
            self.raise_if_ended()
            await asyncio.sleep(_POLL_S)
        raise RolloutError(
            f"{self.shown_url} is not healthy after {self.limits.start_s:g} s "
            f"(rollout.server.max_start_wait_time): {reason}"
        )

    def raise_if_ended(self) -> None:
        """Raises if the server's process has ended and cannot come back by itself."""

    async def find_log_prob_mode(self) -> None:
        """Learns what the log-probs mean, from the most likely token at other settings."""
        greedy, best = await self.one_token([1], {"temperature": 0.0})
        _, hot = await self.one_token([1], {"temperature": 2.0})
        cut, _ = await self.one_token([1], {"temperature": 1.0, "top_k": 1})
        if abs(best) > 1e-3:  # otherwise the model is certain, and every mode says the same
            self.mode = LogProbMode(
                after_temperature=abs(hot - best) > 1e-4 * abs(best),
                before_truncation=abs(cut) > 0.5 * abs(greedy),
            )


async def _within(seconds: float, work: Coroutine[None, None, T]) -> T:
    """Like `asyncio.wait_for`, which before Python 3.12 loses a cancellation if the work has just ended."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
    if task.cancelled() or not task.done():
        raise asyncio.TimeoutError
    return task.result()


def shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " …"


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError:
        raise RolloutError(
            "rollout.server speaks HTTP with aiohttp, which is not installed: pip install 'hone-rl[server]'"
        ) from None
    return aiohttp
