"""An HTTP client of scoring servers, with limits, retries, deadlines and a cache of answers.

Messages contain neither the API key nor the query of a URL.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from hone.config.reward import RewardServerConfig
from hone.rewards.failures import Failed, WrongSetting
from hone.rewards.managers.reward_loop import AsyncTokenBucket
from hone.services.json_client import AnswerTooLarge, ServiceError, ServiceTimeout, post_json
from hone.text import clean_text, error_text
from hone.tracking import atomic_write_text
from hone.types import Fields, JsonObject, JsonValue

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_CACHED_ANSWERS = 100_000
"""The size of the cache in memory; when it is full, the oldest answer is dropped."""
FIRST_RETRY_PAUSE_S = 0.5  # the pause doubles after each attempt
CONNECT_TIMEOUT_S = 5.0
_CONFIG_KEY = "reward_model.server"
_RETRY_CODES = frozenset({408, 425, 429, 500, 502, 503, 504})


class RemoteError(RuntimeError):
    """A request failed; `reason` is a part of the name of a failure metric."""

    def __init__(
        self,
        reason: str,
        detail: str,
        *,
        is_retryable: bool = True,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{reason}: {detail}")
        self.failure = Failed(reason, detail)
        self.is_retryable, self.retry_after_s = is_retryable, retry_after_s


class AnswerCache:
    """Caches answers at `location`: "memory", a folder with one file per answer, or None (no cache)."""

    def __init__(self, location: str | None) -> None:
        self._folder = None if location in (None, "memory") else Path(str(location)).expanduser()
        self._max_answers = 0 if location is None else MAX_CACHED_ANSWERS
        self._memory: dict[str, JsonValue] = {}

    def get(self, key: str) -> JsonValue:
        """Returns the cached answer, or None."""
        if self._folder is None:
            return self._memory.get(key)
        try:
            return json.loads(self._file(key).read_text())["answer"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, key: str, answer: JsonValue) -> None:
        """Adds an answer; an answer that cannot be written to the folder is not cached."""
        if self._folder is not None:
            try:
                atomic_write_text(self._file(key), json.dumps({"answer": answer}))
            except OSError as error:
                _warn_once(f"the cache {self._folder} cannot be written: {error.strerror}")
            return
        self._memory[key] = answer
        if len(self._memory) > self._max_answers:
            del self._memory[next(iter(self._memory))]

    def _file(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key}.json"


class ScoringServer:
    """Posts JSON to one server or to several servers in turn, within the configured limits."""

    def __init__(self, config: RewardServerConfig, path: str) -> None:
        urls = config.url if isinstance(config.url, tuple) else (config.url,)
        self._urls = [_endpoint_url(str(url), path) for url in urls]
        self.address = redacted_url(self._urls[0])
        self._config = config
        variable = config.api_key_env
        self._api_key = os.environ.get(variable, "").strip() if variable else ""
        if variable and not self._api_key:
            raise WrongSetting(
                f"{_CONFIG_KEY}.api_key_env={variable}: this environment variable is not set"
            )
        rate = config.requests_per_minute
        self._bucket = None if rate is None else AsyncTokenBucket(rate / 60.0, max(rate / 60.0, 1))
        self._loop_and_semaphore: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._is_reachable = True
        self._num_requests = 0
        self.cache = AnswerCache(config.cache)
        self.counts: Counter[str] = Counter()

    def connection_error(self) -> str | None:
        """Returns the error of the first server that cannot be connected to, or None."""
        for url in self._urls:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            try:
                socket.create_connection((str(parts.hostname), port), CONNECT_TIMEOUT_S).close()
            except OSError as error:
                return f"{redacted_url(url)}: {error}"
        return None

    async def post(self, body: JsonObject, parse: Callable[[Fields], T]) -> T | Failed:
        """Returns the parsed answer, or the failure of the last attempt."""
        backoff_s, attempt, url_index = FIRST_RETRY_PAUSE_S, 0, self._num_requests
        self._num_requests += 1
        while True:
            try:
                url = self._urls[(url_index + attempt) % len(self._urls)]
                value = await self._attempt(body, parse, url)
            except RemoteError as error:
                # While the server is unreachable, no request is retried, because the pauses would add up.
                max_attempts = self._config.retries + 1 if self._is_reachable else 1
                attempt += 1
                if error.is_retryable and attempt < max_attempts:
                    self.counts["retries"] += 1
                    wait_s = backoff_s if error.retry_after_s is None else error.retry_after_s
                    await asyncio.sleep(min(wait_s, self._config.timeout_s))
                    backoff_s *= 2
                    continue
                if self._is_reachable and error.failure.reason in ("unreachable", "timeout"):
                    logger.warning("%s; until it answers, requests are not retried", error)
                    self._is_reachable = False
                return error.failure
            if not self._is_reachable:
                logger.warning("the server answers again: %s", redacted_url(url))
            self._is_reachable = True
            return value

    async def _attempt(self, body: JsonObject, parse: Callable[[Fields], T], url: str) -> T:
        """Returns the parsed answer of one request, or raises RemoteError."""
        if self._bucket is not None:
            await self._bucket.acquire()
        loop, timeout_s = asyncio.get_running_loop(), self._config.timeout_s
        if self._loop_and_semaphore is None or self._loop_and_semaphore[0] is not loop:
            self._loop_and_semaphore = loop, asyncio.Semaphore(self._config.max_concurrency)
        async with self._loop_and_semaphore[1]:
            self.counts["requests"] += 1
            call = functools.partial(self._send, url, json.dumps(body).encode())
            try:
                content = await asyncio.wait_for(loop.run_in_executor(None, call), timeout_s)
            except asyncio.TimeoutError:
                detail = f"no answer after {timeout_s:g} s from {redacted_url(url)}"
                raise RemoteError("timeout", detail) from None
        try:
            return parse(json.loads(content))
        except Exception as error:  # an answer may be anything
            detail = f"{redacted_url(url)} answered {self._redact(content)!r}: {error_text(error)}"
            raise RemoteError("bad_answer", detail) from error

    def _send(self, url: str, data: bytes) -> bytes:
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        address = redacted_url(url)
        try:
            return post_json(url, data, timeout_s=self._config.timeout_s, headers=headers)
        except ServiceError as error:
            detail = self._redact(str(error).encode())
            if isinstance(error, AnswerTooLarge):
                raise RemoteError("bad_answer", f"{address}: {detail}") from None
            if error.status is None:
                reason = "timeout" if isinstance(error, ServiceTimeout) else "unreachable"
                raise RemoteError(reason, f"{address}: {detail}") from None
            body = self._redact(error.content)
            raise RemoteError(
                "busy" if error.status == 429 else "http_error",
                f"{address} answered with status {error.status}: {body!r}",
                is_retryable=error.status in _RETRY_CODES,
                retry_after_s=error.retry_after_s,
            ) from None

    def _redact(self, content: bytes) -> str:
        """Returns the start of an answer as text, without the API key."""
        text = clean_text(content[:4096].decode("utf-8", "replace"))
        if self._api_key:
            for secret in (self._api_key, repr(self._api_key)[1:-1]):  # repr() for escaped text
                text = text.replace(secret, "***")
        return text[:200]

    def pop_metrics(self) -> dict[str, float]:
        """Returns the numbers of requests, retries and cache hits since the last call, as metrics."""
        metrics = {f"reward/server/{name}": float(n) for name, n in sorted(self.counts.items())}
        self.counts.clear()
        return metrics


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def cache_key(*parts: JsonValue) -> str:
    """Returns a hash of the values that determine an answer."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def redacted_url(url: str) -> str:
    """Returns the URL without its query, because the query may contain an API key."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def _endpoint_url(url: str, path: str) -> str:
    """Returns the URL of the endpoint; `path` is added to a URL without a path."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise WrongSetting(f"{_CONFIG_KEY}.url={url!r} is not a URL; write it as http://HOST:PORT")
    if parts.username or parts.password:
        raise WrongSetting(
            f"{_CONFIG_KEY}.url of {parts.hostname} contains a password; put the key into an "
            f"environment variable and name it in {_CONFIG_KEY}.api_key_env"
        )
    if parts.path.rstrip("/") in ("", "/v1"):
        path = path.removeprefix("/v1") if parts.path.startswith("/v1") else path
        return parts._replace(path=parts.path.rstrip("/") + path).geturl()
    return url
