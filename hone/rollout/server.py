"""Inference servers as a rollout engine: SGLang (`rollout.name=sglang`), and servers that already run.

Requests are routed by trajectory, prefix and load. If a server is lost, its requests continue after the
tokens that were received. Once the server is healthy again, it gets the current weights if it lacks them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

import torch
from torch import Tensor

from hone.rollout.contract import RolloutError, Sampling, Traits, Weights
from hone.rollout.http_server import HttpServer, ServerLost
from hone.rollout.requests import Chunk, ConnectionLost, Request, RequestRules
from hone.rollout.routing import Router
from hone.rollout.server_group import UpdateGroup
from hone.rollout.server_weights import WeightFolder, split_into_buckets
from hone.rollout.streaming_engine import StreamingEngine, in_engine_loop

log = logging.getLogger(__name__)

ADAPTER_VERSION_PREFIX = "adapter-"
"""The prefix of a server's weight version while it serves a LoRA adapter over its base checkpoint."""


class ServerRollout(StreamingEngine):
    """A `RolloutEngine` over HTTP servers that all run the same software."""

    def __init__(
        self,
        servers: Sequence[HttpServer],
        rules: RequestRules,
        parameters: Mapping[str, Tensor],
        folder: WeightFolder,
        *,
        send_tensors: bool = False,
        broadcast_device: torch.device | None = None,
        to_checkpoint: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict,
        keep_weights: bool = True,
        loads_adapters: bool = False,
        bucket_bytes: int = 2**30,
        max_attempts: int = 3,
    ) -> None:
        """Servers get weights in requests (`send_tensors`), by broadcast from a device, or from the folder.

        `parameters` has the parameters of the model, or with `loads_adapters` those of its LoRA adapter;
        `to_checkpoint` gives tensors their names in a checkpoint. With `keep_weights`, the folder has a copy
        of the last weights, which a server gets again after it was lost.
        """
        self.name = servers[0].kind
        super().__init__(rules, parameters)
        self.retries = max_attempts
        self._servers, self._folder = list(servers), folder
        self._sends_tensors, self._broadcast_device = send_tensors, broadcast_device
        self._group: UpdateGroup | None = None  # of the current weight update
        self._to_checkpoint = to_checkpoint
        self._loads_folders = not send_tensors and broadcast_device is None
        self._keeps_weights = keep_weights or self._loads_folders
        self._bucket_bytes = bucket_bytes
        self._version_prefix = (
            ADAPTER_VERSION_PREFIX if loads_adapters else ""
        ) + secrets.token_hex(4)
        self._expected_version: str | None = None
        """The weight version that servers report after the last update; None before the first update."""
        self._stale_servers: set[HttpServer] = set()
        """The servers that missed a part of the current weight update; `commit` sends them all weights."""
        self._weights_released = False
        """Whether the memory of the weights was released and their values have not been restored."""
        self._wake_lock = asyncio.Lock()
        self._route = Router(self._servers, lambda server: server.healthy).route
        self._warnings: set[str] = set()
        self.traits = Traits(uses_policy_module=False, loads_adapters=loads_adapters)

    @in_engine_loop
    async def start(self) -> None:
        """Waits for every server and reads its capabilities."""
        await asyncio.gather(*(self._connect(server) for server in self._servers))
        self.traits = replace(
            self.traits,
            honors_seeds=all(server.honors_seeds for server in self._servers),
            samples_by_position=all(server.samples_by_position for server in self._servers),
            batch_invariant=all(server.samples_by_position for server in self._servers),
            orders_by_priority=all(server.orders_by_priority for server in self._servers),
            untruncated_log_probs=all(
                server.log_probs_before_truncation for server in self._servers
            ),
        )
        if not self.traits.orders_by_priority:
            log.info(
                "%s: requests start in order of arrival, because a server runs without priority scheduling "
                "(see docs/engines.md)",
                self.name,
            )

    async def _connect(self, server: HttpServer) -> None:
        await server.wait_until_healthy()
        try:
            await server.connect()
        except ServerLost as error:
            raise RolloutError(str(error)) from error

    # -- requests -------------------------------------------------------------------------------

    def _check_sampling(self, sampling: Sampling, request_id: str) -> None:
        """Warns once about log-probs that differ from the trainer's."""
        problem = self._log_prob_problem(sampling)
        if problem is not None and problem not in self._warnings:
            self._warnings.add(problem)
            log.warning("%s: %s (see docs/engines.md)", self.name, problem)

    def check_training_log_probs(self, sampling: Sampling) -> None:
        """Raises if training cannot use the log-probs that a server reports with these parameters."""
        problem = self._log_prob_problem(sampling)
        if problem is not None:
            raise RolloutError(problem)

    def _log_prob_problem(self, sampling: Sampling) -> str | None:
        """Returns the first problem that a server has, or None."""
        problems = (server.log_prob_problem(sampling) for server in self._servers)
        return next((problem for problem in problems if problem is not None), None)

    async def _backend_stream(
        self, request: Request, sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        if any(server.released_tags for server in self._servers):
            await self.wake_up()
        server = self._route(request)
        server.num_open_requests += 1
        try:
            await server.verify_version()
            async with aclosing(server.stream(request, sampling)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            server.num_open_requests -= 1
            if server.num_open_requests == 0:  # an idle server may restart unnoticed
                server.version_verified = False

    async def _backend_recover(self, error: ConnectionLost) -> None:
        """Starts the recovery of the lost server; waits for it only if no other server is healthy."""
        if not isinstance(error, ServerLost):
            return
        server = error.server
        self._start_recovery(server)
        if not any(other.healthy for other in self._servers if other is not server):
            await self._wait_for_recovery(server)

    def _start_recovery(self, server: HttpServer) -> asyncio.Task[None]:
        if server.recovery is None or server.recovery.done():
            server.recovery = asyncio.create_task(self._recover(server))
            server.recovery.add_done_callback(_log_failed_recovery)
        return server.recovery

    async def _wait_for_recovery(self, server: HttpServer) -> None:
        """Waits until the server has recovered; the recovery continues if the caller is cancelled."""
        await asyncio.shield(self._start_recovery(server))

    async def _recover(self, server: HttpServer) -> None:
        """Waits until a lost server is healthy; publishes the current weights if the server lacks them."""
        server.healthy = False
        for attempt in range(self.retries):
            await server.wait_until_healthy()
            try:
                version = await self._read_version(server)
                if self._update.in_progress:  # `commit` publishes the new weights
                    self._stale_servers.add(server)
                elif version != self._expected_version:
                    await self._republish(server)
                break
            except ServerLost as error:
                if attempt == self.retries - 1:
                    raise RolloutError(f"{error}, again during its recovery") from error
        server.healthy = True

    async def _read_version(self, server: HttpServer) -> str | None:
        """Returns the weight version of a server; None before the first update.

        Clears `released_tags` if this engine did not publish the version: the server was restarted, and so
        holds all its memory again.
        """
        version = None if self._expected_version is None else await server.weight_version()
        if version is not None and not version.startswith(self._version_prefix):
            server.released_tags = ()
        return version

    async def _republish(self, server: HttpServer) -> None:
        """Publishes the current weights to a server that has lost them."""
        log.info("%s gets the weights of version %d again", server.safe_url, self.version)
        assert self._expected_version is not None
        await self._publish_folder(server, self._expected_version)

    # -- control --------------------------------------------------------------------------------

    async def _backend_pause(self) -> None:
        await self._for_each_server(lambda server: server.pause())

    async def _backend_resume(self) -> None:
        await self._for_each_server(lambda server: server.resume())

    async def _for_each_server(
        self, call: Callable[[HttpServer], Coroutine[None, None, None]]
    ) -> None:
        """Calls a function for every server; if a server is lost, calls it again after the recovery."""

        async def call_with_recovery(server: HttpServer) -> None:
            try:
                await call(server)
            except ServerLost:
                await self._wait_for_recovery(server)
                await call(server)

        await self._gather(call_with_recovery(server) for server in self._servers)

    async def _gather(self, calls: Iterable[Coroutine[None, None, None]]) -> None:
        """Runs the calls concurrently; raises the first error after all have ended."""
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, ServerLost):
                raise RolloutError(str(result)) from result
            if isinstance(result, BaseException):
                raise result

    async def _backend_begin(self) -> None:
        await self._close_group()  # of a weight update that has failed
        for server in self._servers:
            if server.recovery is not None and not server.recovery.done():
                await self._wait_for_recovery(server)
            server.check_updates_supported()
        await self._for_each_server(lambda server: self._resume_memory(server, ("weights",)))
        self._stale_servers.clear()
        self._folder.begin()

    async def _load(self, weights: Weights) -> None:
        for tensors in split_into_buckets(weights, self._bucket_bytes):
            bucket = self._to_checkpoint(tensors)
            if self._keeps_weights:
                self._folder.add(bucket)
            if self._broadcast_device is not None:
                await self._submit(self._broadcast(bucket, self._broadcast_device))
            elif self._sends_tensors:
                await self._submit(self._send_to_servers(bucket))

    async def _broadcast(self, bucket: Mapping[str, Tensor], device: torch.device) -> None:
        """Broadcasts a bucket in the group of this update; after an error, `commit` publishes the folder."""
        if self._stale_servers:  # a server that restarted has left the group
            self._stale_servers |= set(self._servers)
            return
        try:
            if self._group is None:
                self._group = UpdateGroup(self._servers, device)
                await self._group.open()
            await self._group.send(bucket)
        except RolloutError as error:
            if not self._keeps_weights:
                raise
            log.warning("%s; the servers load the weights from the folder instead", error)
            self._stale_servers |= set(self._servers)

    async def _close_group(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            await group.close()

    async def _send_to_servers(self, bucket: Mapping[str, Tensor]) -> None:
        async def send(server: HttpServer) -> None:
            try:
                await server.send_tensors(bucket)
            except ServerLost:
                if not self._keeps_weights:
                    raise
                self._stale_servers.add(server)

        await self._gather(
            send(server) for server in self._servers if server not in self._stale_servers
        )

    async def _backend_commit(self, version: int) -> None:
        await self._close_group()
        if self._loaded_names:
            if self._keeps_weights:
                self._folder.commit()
            new_version = f"{self._version_prefix}-{version}"
            await self._gather(self._publish(server, new_version) for server in self._servers)
            self._expected_version, self._weights_released = new_version, False
        else:  # the weights do not change, and the servers report the same version
            await self._restore_weights()

    async def _publish(self, server: HttpServer, version: str) -> None:
        """Ends the weight update of one server; a server that is lost meanwhile gets all weights again."""
        try:
            if not self._loads_folders and server not in self._stale_servers:
                await server.end_update(version)
                await server.check_weights(version, self._folder if self._keeps_weights else None)
            else:
                await self._publish_folder(server, version)
        except ServerLost:
            if not self._keeps_weights:
                raise
            await server.wait_until_healthy()
            await self._read_version(server)
            await self._publish_folder(server, version)
        server.expected_version, server.healthy = version, True

    async def _publish_folder(self, server: HttpServer, version: str) -> None:
        if self._folder.current_checkpoint is None:
            raise RolloutError(
                f"{server.safe_url} has lost its weights, and the engine has no copy; set "
                "rollout.server.keep_weights=true"
            )
        if self._sends_tensors:
            for shard in self._folder.shards():
                await server.send_tensors(shard)
            await server.end_update(version)
        else:
            await server.load_folder(str(self._folder.current_checkpoint), version)
        await server.check_weights(version, self._folder)
        server.expected_version = version

    async def _backend_sleep(self) -> None:
        """Frees the KV caches, and the weights if the folder can restore them."""
        if any(server.released_tags or not server.can_release_memory for server in self._servers):
            return
        tags = ["kv_cache"]
        if (
            self._expected_version
            and self._folder.current_checkpoint
            and not self.traits.loads_adapters
        ):
            tags.append("weights")
        await self._for_each_server(lambda server: self._release_memory(server, tags))

    async def _release_memory(self, server: HttpServer, tags: Sequence[str]) -> None:
        if self._expected_version is None and not server.started_by_hone:
            return  # a restart of the server could not be detected
        if await server.release_memory(tags):
            server.released_tags = tuple(tags)
            self._weights_released |= "weights" in tags
        else:
            log.warning("%s serves other requests and keeps its memory", server.safe_url)

    async def _resume_memory(self, server: HttpServer, tags: Sequence[str]) -> None:
        """Allocates released memory again; skips a restarted server, which holds all its memory already."""
        if server.released_tags:
            await self._read_version(server)
        if tags_to_resume := [tag for tag in server.released_tags if tag in tags]:
            await server.resume_memory(tags_to_resume)
            server.released_tags = tuple(tag for tag in server.released_tags if tag not in tags)

    @in_engine_loop
    async def wake_up(self) -> None:
        async with self._wake_lock:
            await self._for_each_server(
                lambda server: self._resume_memory(server, server.released_tags)
            )
            if not self._update.in_progress:  # otherwise `commit` publishes the weights
                await self._restore_weights()

    async def _restore_weights(self) -> None:
        """Publishes the current weights again if their memory was released."""
        if self._weights_released:
            await self._for_each_server(self._republish)
            self._weights_released = False

    async def _backend_close(self) -> None:
        async def close_server(server: HttpServer) -> None:
            if server.recovery is not None:
                server.recovery.cancel()
            if self._paused:
                with suppress(ConnectionLost, RolloutError):
                    await server.resume()
            await server.close()

        try:
            await self._gather(close_server(server) for server in self._servers)
        finally:
            self._folder.close()


def _log_failed_recovery(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning(
            "%s; until the next update, this server gets requests only if no server is healthy",
            error,
        )
