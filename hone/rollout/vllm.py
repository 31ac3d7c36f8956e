"""vLLM as a rollout engine (`rollout.name=vllm`), in processes with their own Python interpreter.

Requests go to one of `data_parallel_size` processes by trajectory, prompt and load. Weights are sent in
buckets of shared memory: a memory file, or GPU memory by CUDA IPC. vLLM's first worker broadcasts them to
workers on other machines. A process that dies is restarted with the current weights, and its requests
continue after the tokens received so far.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from itertools import count

import torch
from torch import Tensor

from hone.rollout.contract import RolloutError, Sampling, Traits
from hone.rollout.remote_requests import RemoteEngine
from hone.rollout.requests import Chunk, ConnectionLost, Request, RequestRules
from hone.rollout.vllm_buckets import fill_buckets
from hone.rollout.vllm_experts import by_expert
from hone.rollout.vllm_process import EngineProcess
from hone.rollout.weights import check_name_and_shape
from hone.types import Fields

log = logging.getLogger(__name__)

Weights = Iterable[tuple[str, Tensor]]
_MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one."""
_MAX_STARTS = 3
"""Consecutive starts of a process that samples no token."""
_MAX_ROUTES = 4096
"""Recent trajectories and prompts whose process is stored."""
_MAX_IMBALANCE = 8
"""Requests that a process may have above the least loaded one before its prompts go elsewhere."""


class VLLMRollout(RemoteEngine):
    """A `RolloutEngine` over vLLM processes."""

    name = "vllm"
    retries = 2**31  # `_restart` counts the starts without a token

    def __init__(
        self,
        processes: Sequence[EngineProcess],
        rules: RequestRules,
        parameters: Mapping[str, Tensor],
        *,
        bucket_bytes: int,
        device: torch.device,
        current_weights: Callable[[], Weights] | None = None,
    ) -> None:
        """`parameters` are those of the model by name. Without `current_weights`, the engine keeps a copy of
        the weights in host memory for restarted processes."""
        self.traits = Traits(decodes_with_module=False, batch_invariant=device.type == "cpu")
        self._processes, self._device = list(processes), device
        self._parameters = parameters
        name_of = {id(p): name for name, p in reversed(list(parameters.items()))}
        self._required = set(name_of.values())  # tied parameters have one name
        self._bucket_bytes = bucket_bytes
        self._current_weights = current_weights
        self._host_copy: dict[str, Tensor] = {}
        self._updated = (
            False  # whether an update has ended; before, the weights are those of the files
        )
        self._names: set[str] = set()  # of the current update
        self._closing = False
        self._current_sleep_level: int | None = None  # level of the current sleep
        self._keys = count()
        self._process_of: OrderedDict[object, int] = OrderedDict()
        self._requests_of = [0] * len(self._processes)
        self._restart_lock, self._wake_lock = asyncio.Lock(), asyncio.Lock()
        super().__init__(rules)

    async def start(self) -> None:
        """Starts the processes and waits until all can decode."""
        await self._submit(self._start())

    async def _start(self) -> None:
        try:
            await asyncio.gather(*(process.start() for process in self._processes))
        except ConnectionLost as error:
            raise RolloutError(f"vLLM did not start: {error}") from error
        for process in self._processes:
            process.serving = process.alive  # one may have died while another started
            await self._restart(process)

    def _check_sampling(self, sampling: Sampling, request_id: str) -> None:
        if 0 < sampling.temperature < _MIN_TEMPERATURE:
            raise RolloutError(
                f"request {request_id}: vLLM samples at temperature {_MIN_TEMPERATURE} or above, not at "
                f"{sampling.temperature}; 0 is greedy"
            )

    # -- requests -------------------------------------------------------------------------------

    async def _remote_stream(
        self, request: Request, sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        if self._current_sleep_level is not None:
            await self._remote_wake_up()
        process = self._processes[self._route(request)]
        key = str(next(self._keys))
        queue = process.open_stream(key)
        finished = False
        try:
            prompt = request.prompt_ids + request.token_ids
            process.send("add", key=key, prompt=prompt, sampling=self._sampling_params(sampling))
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

    def _sampling_params(self, sampling: Sampling) -> Fields:
        """Returns the arguments of vLLM's SamplingParams."""
        eos_ids = () if sampling.ignore_eos else self._rules.eos_ids
        return {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            # vLLM's own seed creates a generator, which on a CPU fails with chunked prefill.
            "extra_args": {"hone_seed": sampling.seed},
            "stop_token_ids": [*eos_ids, *sampling.stop_token_ids],
        }

    def _route(self, request: Request) -> int:
        """Returns the process of the trajectory, else of the prompt if not overloaded, else the least loaded
        one; of equally loaded ones that with the fewest requests so far."""
        loads = [process.load for process in self._processes]
        prompt = hash(tuple(request.prompt_ids))
        least = min(range(len(loads)), key=lambda index: (loads[index], self._requests_of[index]))
        index = self._process_of.get(request.request_id)
        if index is None:
            index = self._process_of.get(prompt, least)
            if loads[index] > loads[least] + _MAX_IMBALANCE:
                index = least
        self._requests_of[index] += 1
        for key in (request.request_id, prompt):
            self._process_of[key] = index
            self._process_of.move_to_end(key)
        while len(self._process_of) > _MAX_ROUTES:
            self._process_of.popitem(last=False)
        return index

    # -- control --------------------------------------------------------------------------------

    async def _pause(self, keep: bool) -> None:
        """Pauses; with `keep`, requests stay in vLLM and continue there."""
        if not keep:
            await super()._pause(keep)
            return
        self._raise_failure()
        self._not_paused.clear()
        self._paused = True
        await self._remote_pause()

    async def _remote_pause(self) -> None:
        await self._call_all("pause")
        for process in self._processes:
            await process.wait_until_delivered()

    async def _remote_resume(self) -> None:
        async with self._restart_lock:  # a process that restarts meanwhile would stay paused
            await self._call_all("resume")

    async def _call_all(self, verb: str, **arguments: object) -> None:
        """Runs a command in every live process; a restart gives a dead one the current state."""
        calls = [p.call(verb, **arguments) for p in self._processes if p.alive]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, ConnectionLost):
                raise result

    async def _remote_recover(self, error: ConnectionLost) -> None:
        for process in self._processes:
            # Shielded, because other requests wait for the same restart.
            restart = asyncio.ensure_future(self._restart(process))
            restart.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(restart)

    async def _restart(self, process: EngineProcess) -> None:
        """Restarts a dead process with the current weights; during an update, `commit` loads them."""
        async with self._restart_lock:
            while not process.serving:
                if self._closing:
                    raise RolloutError("the engine was closed while this request waited")
                if process.starts_without_tokens >= _MAX_STARTS:
                    raise RolloutError(
                        f"vLLM ended {_MAX_STARTS} times without a token; the log has its last errors"
                    )
                log.warning("vLLM has ended and is restarted with the current weights")
                try:
                    await process.start()
                    if self._paused:
                        await process.call("pause")
                    process.stale, process.missed_bucket = True, self._update.in_progress
                    if not self._update.in_progress:
                        await self._restore(process)
                    process.serving = process.alive
                except ConnectionLost as error:
                    log.warning("%s", error)

    async def _restore(self, process: EngineProcess) -> None:
        """Loads the current weights into a process that does not have them."""
        if self._updated:
            process.loading = False
            for bucket in self._buckets(self._published_weights()):
                await self._load_bucket(bucket, [process])
            await process.call("finish")
        process.stale = process.missed_bucket = process.loading = False

    def _published_weights(self) -> Weights:
        return self._current_weights() if self._current_weights else self._host_copy.items()

    async def _remote_sleep(self) -> None:
        """Frees GPU memory, also of the weights if `wake_up` can restore them."""
        self._current_sleep_level = self._choose_sleep_level()
        start, used_before = time.monotonic(), self._gpu_memory_used_gib()
        await self._call_all("sleep", level=self._current_sleep_level)
        log.info(
            "vLLM sleeps at level %d after %.2f s: %.1f GiB of the GPU in use, %.1f GiB before",
            self._current_sleep_level,
            time.monotonic() - start,
            self._gpu_memory_used_gib(),
            used_before,
        )
        for process in self._processes:
            process.stale |= self._current_sleep_level == 2
        self._updated |= self._current_sleep_level == 2

    def _gpu_memory_used_gib(self) -> float:
        """Returns the GPU memory in use by all processes."""
        if not torch.cuda.is_available():
            return 0.0
        free, total = torch.cuda.mem_get_info(self._device)
        return (total - free) / 2**30

    def _choose_sleep_level(self) -> int:
        if self._device.type != "cuda":
            return 0
        return 2 if self._updated or self._current_weights else 1

    async def _remote_wake_up(self) -> None:
        async with self._wake_lock:
            if self._current_sleep_level:
                await self._call_all("wake_up")
            for process in self._processes:
                while True:
                    await self._restart(process)
                    if not process.stale or self._update.in_progress:
                        break
                    try:
                        await self._restore(process)
                    except ConnectionLost as error:
                        log.warning("%s", error)
            self._current_sleep_level = None

    async def _close(self) -> None:
        self._closing = True
        await super()._close()

    async def _remote_close(self) -> None:
        await asyncio.gather(*(process.close() for process in self._processes))
        async with self._restart_lock:  # waits for a running restart, which fails now
            pass

    # -- weights --------------------------------------------------------------------------------

    async def _remote_begin(self) -> None:
        await self._remote_wake_up()
        self._names = set()
        for process in self._processes:
            process.loading = process.missed_bucket = False

    async def _load(self, weights: Weights) -> None:
        for bucket in self._buckets(self._check_names(weights)):
            await self._submit(self._load_bucket(bucket, self._processes))

    def _buckets(self, weights: Weights) -> Iterator[Fields]:
        return fill_buckets(by_expert(weights), self._device, self._bucket_bytes)

    def _check_names(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            check_name_and_shape(name, tensor, self._parameters)
            self._names.add(name)
            if self._current_weights is None:
                self._host_copy[name] = tensor.detach().to("cpu", copy=True)
            yield name, tensor

    async def _load_bucket(self, bucket: Fields, processes: Sequence[EngineProcess]) -> None:
        """Loads one bucket; if a process dies meanwhile, `commit` loads all buckets into it."""

        async def load(process: EngineProcess) -> None:
            first, process.loading = not process.loading, True
            await process.call("load", first=first, bucket=bucket)

        live = [p for p in processes if p.alive]
        results = await asyncio.gather(*map(load, live), return_exceptions=True)
        for process, result in zip(live, results, strict=True):
            if isinstance(result, ConnectionLost):
                process.missed_bucket = True
                if len(processes) == 1 and not self._update.in_progress:
                    raise result
            elif isinstance(result, BaseException):
                raise result

    async def _remote_commit(self, version: int, loaded: bool) -> None:
        if loaded and (missing := sorted(self._required - self._names)):
            raise RolloutError(
                f"the update has {len(self._names)} tensors but lacks {len(missing)}, the first "
                f"{missing[0]!r}; vLLM needs all of them"
            )
        self._updated |= loaded
        # Repeated, because a process may die while another commits.
        while outdated := [p for p in self._processes if p.lacks_update]:
            for process in outdated:
                await self._restart(process)
                try:
                    if process.loading and not process.missed_bucket:
                        await process.call("finish")
                        process.stale = process.loading = False
                    elif process.stale or process.missed_bucket:
                        await self._restore(process)
                except ConnectionLost as error:
                    log.warning("%s", error)
