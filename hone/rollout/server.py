"""Inference servers as a rollout engine: SGLang (`rollout.name=sglang`), and servers that already run.

Requests are routed by trajectory, prefix and load. After a server is lost, the engine waits for it, sends
the current weights again if needed, and its requests continue after the tokens received so far.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from hone.rollout.contract import RolloutError, Sampling, Traits
from hone.rollout.http_server import HttpServer, ServerLost
from hone.rollout.remote_requests import RemoteEngine
from hone.rollout.requests import Chunk, ConnectionLost, Request, RequestRules
from hone.rollout.server_routing import Router
from hone.rollout.server_weights import WeightFolder, in_buckets
from hone.rollout.weights import check_name_and_shape

if TYPE_CHECKING:
    from hone.rollout.server_group import UpdateGroup

log = logging.getLogger(__name__)

ADAPTER_VERSION = "adapter-"
"""The prefix of the weight version of a server with an adapter over the base weights of its files."""


class ServerRollout(RemoteEngine):
    """A `RolloutEngine` over HTTP servers of one kind."""

    def __init__(
        self,
        servers: Sequence[HttpServer],
        rules: RequestRules,
        parameters: Mapping[str, Tensor],
        folder: WeightFolder,
        *,
        direct: bool = False,
        group: Callable[[], UpdateGroup] | None = None,
        to_checkpoint: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict,
        keep_weights: bool = True,
        adapters: bool = False,
        bucket_bytes: int = 2**30,
        max_attempts: int = 3,
    ) -> None:
        """Servers get weights in requests (`direct`), by broadcast (`group`), or load the folder.

        `parameters` are those of the model, or of a LoRA adapter with `adapters`; `to_checkpoint` converts
        tensors to the names of a checkpoint.
        """
        self.name = servers[0].kind
        self.retries = max_attempts
        self._servers = list(servers)
        self._parameters, self._folder = parameters, folder
        self._direct, self._open_group = direct, group
        self._update_group: UpdateGroup | None = None  # of the current update
        self._to_checkpoint = to_checkpoint
        self._keeps_weights = keep_weights or not (direct or group)
        self._bucket_bytes = bucket_bytes
        self._token = (ADAPTER_VERSION if adapters else "") + secrets.token_hex(4)
        self._expected_version: str | None = None
        """The version string of the last published weights; None before the first update."""
        self._names: set[str] = set()  # of the current update
        self._stale: set[HttpServer] = set()  # servers that missed a part of the current update
        self._weights_released = False
        """Whether memory of the weights was released and their values are not restored yet."""
        self._wake_lock = asyncio.Lock()
        self._route = Router(self._servers).route
        self._warnings: set[str] = set()
        self.traits = Traits(decodes_with_module=False, adapters=adapters)
        super().__init__(rules)

    async def start(self) -> None:
        """Waits for every server and reads its capabilities."""
        await self._submit(self._start())

    async def _start(self) -> None:
        await asyncio.gather(*(self._connect(server) for server in self._servers))
        self.traits = replace(
            self.traits,
            seeded=all(server.seeded for server in self._servers),
            positional=all(server.positional for server in self._servers),
            batch_invariant=all(server.positional for server in self._servers),
            untruncated_log_probs=all(s.mode.before_truncation for s in self._servers),
        )

    async def _connect(self, server: HttpServer) -> None:
        await server.wait_until_healthy()
        try:
            await server.connect()
        except ServerLost as error:
            raise RolloutError(str(error)) from error

    # -- requests -------------------------------------------------------------------------------

    def _check_sampling(self, sampling: Sampling, request_id: str) -> None:
        modes = [server.mode for server in self._servers]
        if not all(mode.after_temperature for mode in modes) and sampling.temperature not in (0, 1):
            self._warn_once(
                f"log-probs of requests with temperature={sampling.temperature} are those at temperature 1"
            )
        if not all(mode.before_truncation for mode in modes) and sampling.truncates:
            self._warn_once(
                "log-probs of requests with top-k, top-p or min-p are those after truncation"
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.add(text)
            log.warning("%s reports: %s (docs/engines.md)", self.name, text)

    def check_training_log_probs(self, sampling: Sampling) -> None:
        """Raises if a server's log-probs with this sampling are not those of the contract."""
        for server in self._servers:
            if not server.mode.after_temperature and sampling.temperature not in (0, 1):
                raise RolloutError(
                    f"{server.safe_url} reports log-probs at temperature 1, and the rollout has temperature="
                    f"{sampling.temperature}; {server.log_prob_hint}"
                )
            if not server.mode.before_truncation and sampling.truncates:
                raise RolloutError(
                    f"{server.safe_url} reports log-probs after truncation, and the rollout truncates; use "
                    "top_k=-1, top_p=1.0 and min_p=0.0 for training"
                )

    async def _remote_stream(
        self, request: Request, sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        if any(server.released for server in self._servers):
            await self._remote_wake_up()
        server = self._route(request)
        server.streams += 1
        try:
            await server.verify_version()
            async with aclosing(server.stream(request, sampling)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            server.streams -= 1
            server.verified &= server.streams > 0

    async def _remote_recover(self, error: ConnectionLost) -> None:
        """Repairs the lost server; waits for it only if no other server is healthy."""
        if not isinstance(error, ServerLost):
            return
        server = error.server
        recovery = self._recovery(server)
        if not any(other.healthy for other in self._servers if other is not server):
            await recovery

    def _recovery(self, server: HttpServer) -> asyncio.Future[None]:
        """Returns the repair task of a server, which continues if the caller is cancelled."""
        if server.recovery is None or server.recovery.done():
            server.recovery = asyncio.ensure_future(self._repair(server))
        return asyncio.shield(server.recovery)

    async def _repair(self, server: HttpServer) -> None:
        server.healthy = False
        for attempt in range(self.retries):
            await server.wait_until_healthy()
            try:
                version = await self._read_version(server)
                if self._update.in_progress:  # the commit repairs it
                    self._stale.add(server)
                elif version != self._expected_version:
                    await self._republish(server)
                break
            except ServerLost as error:
                if attempt == self.retries - 1:
                    raise RolloutError(f"{error} again while it was repaired") from error
        server.healthy = True

    async def _read_version(self, server: HttpServer) -> str | None:
        """Returns the weight version of a server; None before the first update.

        A version that this engine did not publish means a restart, after which no memory is released.
        """
        version = None if self._expected_version is None else await server.weight_version()
        if version is not None and not version.startswith(self._token):
            server.released = ()
        return version

    async def _republish(self, server: HttpServer) -> None:
        """Publishes the current weights to a server again."""
        if self._folder.current is None:
            raise RolloutError(
                f"{server.safe_url} has lost its weights, and the engine has no copy; set "
                "rollout.server.keep_weights=true"
            )
        log.info("%s gets the weights of version %d again", server.safe_url, self.version)
        assert self._expected_version is not None
        await self._publish_folder(server, self._expected_version)

    # -- control --------------------------------------------------------------------------------

    async def _remote_pause(self) -> None:
        await self._for_each_server(lambda server: server.pause())

    async def _remote_resume(self) -> None:
        await self._for_each_server(lambda server: server.resume())

    async def _for_each_server(
        self, call: Callable[[HttpServer], Coroutine[None, None, None]]
    ) -> None:
        """Calls a function for every server; repairs a lost server and calls it once more."""

        async def call_with_repair(server: HttpServer) -> None:
            try:
                await call(server)
            except ServerLost:
                await self._recovery(server)
                await call(server)

        await self._gather(call_with_repair(server) for server in self._servers)

    async def _gather(self, calls: Iterable[Coroutine[None, None, None]]) -> None:
        """Runs the calls concurrently; raises the first error after all have ended."""
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, ServerLost):
                raise RolloutError(str(outcome)) from outcome
            if isinstance(outcome, BaseException):
                raise outcome

    async def _remote_begin(self) -> None:
        for server in self._servers:
            if server.recovery is not None and not server.recovery.done():
                await self._recovery(server)
            server.check_updates_supported()
        await self._for_each_server(lambda server: self._resume_memory(server, ("weights",)))
        self._names.clear()
        self._stale.clear()
        self._folder.begin()

    async def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for tensors in in_buckets(self._check_names(weights), self._bucket_bytes):
            self._names |= set(tensors)
            bucket = self._to_checkpoint(tensors)
            if self._keeps_weights:
                self._folder.add(bucket)
            if self._open_group is not None:
                await self._submit(self._broadcast(bucket))
            elif self._direct:
                await self._submit(self._send_all(bucket))

    def _check_names(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            check_name_and_shape(name, tensor, self._parameters)
            yield name, tensor

    async def _broadcast(self, bucket: Mapping[str, Tensor]) -> None:
        """Broadcasts tensors in the group of this update; if that fails, `commit` publishes the copy."""
        assert self._open_group is not None
        if self._stale:
            return
        try:
            if self._update_group is None:
                self._update_group = self._open_group()
                await self._update_group.open()
            await self._update_group.send(bucket)
        except RolloutError as error:
            if not self._keeps_weights:
                raise
            log.warning("%s; the servers load the copy instead", error)
            self._stale |= set(self._servers)

    async def _send_all(self, bucket: Mapping[str, Tensor]) -> None:
        async def send(server: HttpServer) -> None:
            try:
                await server.send_tensors(bucket)
            except ServerLost:
                if not self._keeps_weights:
                    raise
                self._stale.add(server)

        await self._gather(send(server) for server in self._servers if server not in self._stale)

    async def _remote_commit(self, version: int, loaded: bool) -> None:
        if self._update_group is not None:
            group, self._update_group = self._update_group, None
            await group.close()
        if loaded:
            self._check_complete()
            if self._keeps_weights:
                self._folder.commit()
            expected = f"{self._token}-{version}"
            await self._gather(self._publish(server, expected) for server in self._servers)
            self._expected_version, self._weights_released = expected, False
        else:  # the weights, and so the servers' version strings, do not change
            await self._restore_weights()

    def _check_complete(self) -> None:
        # By id, because tied weights have two names and one tensor.
        loaded = {id(self._parameters[name]) for name in self._names}
        missing = [name for name, tensor in self._parameters.items() if id(tensor) not in loaded]
        if missing:
            raise RolloutError(
                f"an update has {len(self._names)} of {len(self._parameters)} tensors and lacks "
                f"{min(missing)!r}"
            )

    async def _publish(self, server: HttpServer, expected: str) -> None:
        """Ends the update of one server; a lost server gets all weights once more."""
        try:
            if (self._direct or self._open_group) and server not in self._stale:
                await server.end_update(expected)
                await server.check_weights(expected, self._folder if self._keeps_weights else None)
            else:
                await self._publish_folder(server, expected)
        except ServerLost:
            if not self._keeps_weights:
                raise
            await server.wait_until_healthy()
            await self._read_version(server)
            await self._publish_folder(server, expected)
        server.weights, server.healthy = expected, True

    async def _publish_folder(self, server: HttpServer, expected: str) -> None:
        assert self._folder.current is not None
        if self._direct:
            for shard in self._folder.shards():
                await server.send_tensors(shard)
            await server.end_update(expected)
        else:
            await server.load_folder(str(self._folder.current), expected)
        await server.check_weights(expected, self._folder)
        server.weights = expected

    async def _remote_sleep(self) -> None:
        """Frees the KV caches, and the weights if a copy can restore them."""
        if any(server.released or not server.can_release_memory for server in self._servers):
            return
        tags = ["kv_cache"]
        if self._expected_version and self._folder.current and not self.traits.adapters:
            tags.append("weights")
        await self._for_each_server(lambda server: self._release_memory(server, tags))

    async def _release_memory(self, server: HttpServer, tags: Sequence[str]) -> None:
        if self._expected_version is None and not server.started_by_hone:
            return  # a restart could not be detected
        if await server.release_memory(tags):
            server.released = tuple(tags)
            self._weights_released |= "weights" in tags
        else:
            log.warning("%s serves other requests and keeps its memory", server.safe_url)

    async def _resume_memory(self, server: HttpServer, tags: Sequence[str]) -> None:
        """Allocates released memory again; a restarted server has it already and would fail."""
        if server.released:
            await self._read_version(server)
        if released := [tag for tag in server.released if tag in tags]:
            await server.resume_memory(released)
            server.released = tuple(tag for tag in server.released if tag not in tags)

    async def _remote_wake_up(self) -> None:
        async with self._wake_lock:
            await self._for_each_server(lambda server: self._resume_memory(server, server.released))
            if not self._update.in_progress:  # otherwise `commit` publishes the weights
                await self._restore_weights()

    async def _restore_weights(self) -> None:
        """Publishes the current weights again if their memory was released."""
        if self._weights_released:
            await self._for_each_server(self._republish)
            self._weights_released = False

    async def _remote_close(self) -> None:
        async def end(server: HttpServer) -> None:
            if server.recovery is not None:
                server.recovery.cancel()
            if self._paused:
                with suppress(ConnectionLost, RolloutError):
                    await server.resume()
            await server.close()

        try:
            await self._gather(end(server) for server in self._servers)
        finally:
            self._folder.close()
