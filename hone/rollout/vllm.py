"""vLLM as a rollout engine (`rollout.name=vllm`), in processes with their own Python interpreter.

Requests go to one of `data_parallel_size` processes by trajectory, prefix and load. Weights are sent in
buckets of shared memory: a memory file, or GPU memory by CUDA IPC. vLLM's first worker broadcasts buckets to
workers on other machines. A process that dies is restarted with the current weights, and its requests
continue after the tokens that were received.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from itertools import count

import torch
from torch import Tensor

from hone.rollout.contract import RolloutError, Sampling, Traits, Weights
from hone.rollout.requests import Chunk, ConnectionLost, Request, RequestRules
from hone.rollout.routing import Router
from hone.rollout.server_weights import AdapterFolder, fill_buckets, split_experts
from hone.rollout.streaming_engine import StreamingEngine, in_engine_loop
from hone.rollout.vllm_openai import vllm_sampling_params
from hone.rollout.vllm_process import EngineProcess
from hone.types import Fields

log = logging.getLogger(__name__)

_MAX_STARTS = 3
"""Maximum number of consecutive starts of a process that samples no token."""


class VLLMRollout(StreamingEngine):
    """A `RolloutEngine` over vLLM processes."""

    name = "vllm"
    retries = 2**31  # `_ensure_serving` limits the starts without a token instead

    def __init__(
        self,
        processes: Sequence[EngineProcess],
        rules: RequestRules,
        parameters: Mapping[str, Tensor],
        *,
        bucket_bytes: int,
        device: torch.device,
        current_weights: Callable[[], Weights] | None = None,
        adapter_folder: AdapterFolder | None = None,
        keep_stale_kv: bool = False,
    ) -> None:
        """`parameters` has the parameters of the model, or with `adapter_folder` those of a LoRA adapter.

        Without `current_weights`, the engine keeps a copy of the weights for restarted processes: in host
        memory, or in `adapter_folder`.
        """
        super().__init__(rules, parameters)
        self.traits = Traits(
            uses_policy_module=False,
            batch_invariant=device.type == "cpu",
            loads_adapters=adapter_folder is not None,
        )
        self._processes, self._device = list(processes), device
        self._bucket_bytes = bucket_bytes
        self._num_buckets = 0  # sent in the current weight update
        self._current_weights, self._adapter_folder = current_weights, adapter_folder
        self._host_copy: dict[str, Tensor] = {}
        self._must_restore = False
        """Whether a restarted process must load weights, because the model's files have old weights."""
        self._current_sleep_level: int | None = None  # None while awake
        self._request_keys = count()
        self._keep_stale_kv = keep_stale_kv
        self._num_commits = 0
        """The salt of the prefix cache if keys are kept: vLLM clears the cache only if no request runs."""
        self._router = Router(self._processes)
        self._route = self._router.route
        self._restart_lock, self._wake_lock = asyncio.Lock(), asyncio.Lock()

    @in_engine_loop
    async def start(self) -> None:
        """Starts the processes and waits until all of them can decode."""
        try:
            await asyncio.gather(*(process.start() for process in self._processes))
        except ConnectionLost as error:
            raise RolloutError(f"vLLM did not start: {error}") from error
        for process in self._processes:
            process.serving = process.alive  # a process may have died while another started
            await self._ensure_serving(process)

    # -- requests -------------------------------------------------------------------------------

    async def _backend_stream(
        self, request: Request, sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        if self._current_sleep_level is not None:
            await self.wake_up()
        params = vllm_sampling_params(request.request_id, sampling, self._rules.eos_ids)
        # vLLM's own seed creates a generator, which on a CPU fails with chunked prefill.
        params["extra_args"] = {"hone_seed": sampling.seed}
        process = self._route(request)
        key = str(next(self._request_keys))
        queue = process.open_stream(key)
        finished = False
        try:
            prompt = request.all_ids
            process.send(
                "add",
                key=key,
                prompt=prompt,
                sampling=params,
                priority=request.priority,
                cache_salt=str(self._num_commits) if self._keep_stale_kv else None,
            )
            while not finished:
                item = await queue.get()
                try:
                    if isinstance(item, Exception):
                        raise item
                    finished = item.finished
                    yield item
                finally:
                    queue.task_done()
        finally:
            process.close_stream(key)
            if not finished:
                process.send("abort", keys=[key])

    # -- control --------------------------------------------------------------------------------

    @in_engine_loop
    async def pause(self, keep: bool = False) -> None:
        """Pauses; with `keep`, requests stay in vLLM and continue there after `resume`."""
        if not keep:
            await super().pause()
            return
        self._raise_if_failed()
        self._not_paused.clear()
        self._paused = True
        await self._backend_pause()

    async def _backend_pause(self) -> None:
        await self._call_all("pause")
        for process in self._processes:
            await process.wait_until_delivered()

    async def _backend_resume(self) -> None:
        async with self._restart_lock:  # a process that restarts meanwhile would stay paused
            await self._call_all("resume")

    async def _call_all(self, verb: str, **arguments: object) -> None:
        """Runs a command in every live process; a dead process gets the current state when it restarts."""
        calls = [process.call(verb, **arguments) for process in self._processes if process.alive]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, ConnectionLost):
                raise result

    async def _backend_recover(self, error: ConnectionLost) -> None:
        for process in self._processes:
            # A cancelled request must not cancel the restart, for which other requests wait.
            restart = asyncio.ensure_future(self._ensure_serving(process))
            # Reads the task's exception; asyncio would log it if this request were cancelled.
            restart.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(restart)

    async def _ensure_serving(self, process: EngineProcess) -> None:
        """Restarts a process that does not serve, and loads the current weights.

        During a weight update, `commit` loads the weights instead.
        """
        async with self._restart_lock:
            while not process.serving:
                if self._closed:
                    raise RolloutError("the engine was closed while this request waited")
                if process.starts_without_tokens >= _MAX_STARTS:
                    raise RolloutError(
                        f"vLLM ended {_MAX_STARTS} times without a token; its last errors are in the log"
                    )
                log.warning("vLLM has ended and is restarted with the current weights")
                try:
                    await process.start()
                    if self._paused:
                        await process.call("pause")
                    process.needs_weights = True
                    if not self._update.in_progress:
                        await self._restore(process)
                    process.serving = process.alive
                except ConnectionLost as error:
                    log.warning("%s", error)

    async def _restore(self, process: EngineProcess) -> None:
        """Loads the current weights into a process that does not have them."""
        if self._must_restore and self._adapter_folder is not None:
            folder = str(self._adapter_folder.current_checkpoint)
            await process.call("adapter", folder=folder, keep_kv=self._keep_stale_kv)
        elif self._must_restore:
            weights: Weights = self._host_copy.items()
            if self._current_weights is not None:
                weights = self._current_weights()
            for index, bucket in enumerate(self._fill_buckets(weights)):
                await process.call("load", first=index == 0, bucket=bucket)
            await process.call("finish", keep_kv=self._keep_stale_kv)
        process.needs_weights, process.num_loaded_buckets = False, 0

    async def _backend_sleep(self) -> None:
        """Frees GPU memory; `wake_up` restores the weights."""
        level, start_time = self._choose_sleep_level(), time.monotonic()
        self._current_sleep_level = level
        await self._call_all("sleep", level=level)
        log.info("vLLM sleeps at level %d after %.2f s", level, time.monotonic() - start_time)
        for process in self._processes:
            process.needs_weights |= level == 2
        self._must_restore |= level == 2

    def _choose_sleep_level(self) -> int:
        """Returns vLLM's sleep level: 1 keeps the weights in host memory, 2 drops them, 0 frees nothing."""
        if self._device.type != "cuda":
            return 0
        drops_weights = self._must_restore or self._current_weights is not None
        return 2 if drops_weights and self._adapter_folder is None else 1

    @in_engine_loop
    async def wake_up(self) -> None:
        async with self._wake_lock:
            if self._current_sleep_level:
                await self._call_all("wake_up")
            for process in self._processes:
                while True:
                    await self._ensure_serving(process)
                    if not process.needs_weights or self._update.in_progress:
                        break
                    try:
                        await self._restore(process)
                    except ConnectionLost as error:
                        log.warning("%s", error)
            self._current_sleep_level = None

    async def _backend_close(self) -> None:
        await asyncio.gather(*(process.close() for process in self._processes))
        async with self._restart_lock:  # waits until a restart in progress has failed
            pass
        if self._adapter_folder is not None:
            self._adapter_folder.close()

    # -- weights --------------------------------------------------------------------------------

    async def _backend_begin(self) -> None:
        await self.wake_up()
        self._num_buckets = 0
        for process in self._processes:
            process.num_loaded_buckets = 0
        if self._adapter_folder is not None:
            self._adapter_folder.begin()

    async def _load(self, weights: Weights) -> None:
        if self._adapter_folder is not None:
            self._adapter_folder.add(dict(weights))
            return
        for bucket in self._fill_buckets(self._copy_to_host(weights)):
            await self._submit(self._load_bucket(bucket))

    def _fill_buckets(self, weights: Weights) -> Iterator[Fields]:
        return fill_buckets(split_experts(weights), self._device, self._bucket_bytes)

    def _copy_to_host(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights; copies them to host memory if restarts need a copy."""
        for name, tensor in weights:
            if self._current_weights is None:
                self._host_copy[name] = tensor.detach().to("cpu", copy=True)
            yield name, tensor

    async def _load_bucket(self, bucket: Fields) -> None:
        """Loads a bucket into each process that has all earlier buckets; `commit` restores the others."""
        index = self._num_buckets
        processes = [
            process
            for process in self._processes
            if process.alive and process.num_loaded_buckets == index
        ]
        self._num_buckets += 1
        calls = (process.call("load", first=index == 0, bucket=bucket) for process in processes)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for process, result in zip(processes, results, strict=True):
            if not isinstance(result, BaseException):
                process.num_loaded_buckets += 1
            elif not isinstance(result, ConnectionLost):
                raise result

    async def _backend_commit(self, version: int) -> None:
        self._num_commits += 1
        self._must_restore |= bool(self._loaded_names)
        if self._loaded_names and self._adapter_folder is not None:
            await asyncio.to_thread(self._adapter_folder.commit)
            for process in self._processes:
                process.needs_weights = True
        # A process may die while another finishes the weight update.
        while outdated_processes := [
            process
            for process in self._processes
            if process.needs_weights or process.num_loaded_buckets or not process.serving
        ]:
            for process in outdated_processes:
                await self._ensure_serving(process)
                try:
                    has_all_buckets = 0 < process.num_loaded_buckets == self._num_buckets
                    if has_all_buckets:
                        await process.call("finish", keep_kv=self._keep_stale_kv)
                        process.needs_weights, process.num_loaded_buckets = False, 0
                    else:
                        await self._restore(process)
                except ConnectionLost as error:
                    log.warning("%s", error)
