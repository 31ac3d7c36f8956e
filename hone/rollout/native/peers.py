"""The tensor-parallel ranks of one model: their collectives, commands and causes of failure.

Rank 0 sends commands, and every rank executes them in the same order: each change of a core (a new
request, a step, an abort, a new weight version) is a command. So all ranks run the same sequences and
sample the same tokens. Every wait ends at the timeout of the process group, or at once if a rank exits.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from hone.rollout.contract import RolloutError, Sampling, Traits
from hone.rollout.requests import Request

if TYPE_CHECKING:
    from hone.rollout.native.engine import Core

Command: TypeAlias = dict[str, Any]
"""A JSON object with the key `do`."""
_FIRST_MESSAGE_BYTES = 1024
"""Size of the first message; longer commands continue in a second message."""
_LENGTH_BYTES = 8
"""The first message begins with the length of the commands, in this many bytes."""
_CAUSE_KEY = "cause"
_CAUSE_TIMEOUT_S = 3.0
"""The longest wait for the recorded cause after another rank was lost."""


class PeerLost(RolloutError):
    """Another rank exited or did not answer."""


@dataclass
class Peers:
    """The process groups of the ranks that share one model."""

    rank: int
    size: int
    compute_group: dist.ProcessGroup | None
    """The group for tensors on the engine's device; None after a failure."""
    control_group: dist.ProcessGroup | None
    """The group for commands, in host memory; None after a failure."""
    store: dist.Store
    """The ranks record the cause of the first failure here."""
    timeout_s: float
    failed: bool = False
    """Whether `fail` has closed the groups."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of `x` over the ranks, the same bits on all ranks; overwrites a contiguous `x`."""
        x = x.contiguous()
        with self._wrap_errors():
            _require_open(self.compute_group).allreduce([x]).wait()
        return x

    def gather_columns(self, x: Tensor) -> Tensor:  # [M, n] -> [M, size · n]
        """Concatenates the columns of all ranks."""
        rows, columns = x.shape
        out = x.new_empty(self.size * rows, columns)
        with self._wrap_errors():
            _require_open(self.compute_group)._allgather_base(out, x.contiguous()).wait()
        return out.view(self.size, rows, columns).transpose(0, 1).reshape(rows, -1)

    def min_over_ranks(self, value: int) -> int:
        """Returns the smallest value of all ranks."""
        tensor = torch.tensor([value])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        with self._wrap_errors():
            _require_open(self.control_group).allreduce([tensor], options).wait()
        return int(tensor)

    def send(self, commands: list[Command]) -> None:
        """Sends commands to every other rank and waits until all ranks have received them."""
        text = json.dumps(commands).encode()
        message = len(text).to_bytes(_LENGTH_BYTES, "big") + text
        message = message.ljust(_FIRST_MESSAGE_BYTES, b"\0")
        for content in (message[:_FIRST_MESSAGE_BYTES], message[_FIRST_MESSAGE_BYTES:]):
            if content:
                self._broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def receive(self) -> list[Command]:
        """Returns the next commands of rank 0."""
        content = self._receive_bytes(_FIRST_MESSAGE_BYTES)
        end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "big")
        if end > _FIRST_MESSAGE_BYTES:
            content += self._receive_bytes(end - _FIRST_MESSAGE_BYTES)
        commands: list[Command] = json.loads(content[_LENGTH_BYTES:end])
        return commands

    def _receive_bytes(self, size: int) -> bytes:
        return self._broadcast(torch.empty(size, dtype=torch.uint8)).numpy().tobytes()

    def fail(self, error: BaseException) -> BaseException:
        """Closes the groups after an error and returns the error to raise.

        A rank that fails by itself records its error as the cause. A rank that has lost another rank
        returns the recorded cause, if there is one.
        """
        self.failed = True
        with suppress(RuntimeError, dist.DistError):  # the rank with the store may have exited
            if isinstance(error, PeerLost):
                timeout = timedelta(seconds=min(_CAUSE_TIMEOUT_S, self.timeout_s))
                self.store.wait([_CAUSE_KEY], timeout)
                error = RolloutError(self.store.get(_CAUSE_KEY).decode())
            else:
                name = f"rank {self.rank} of {self.size} tensor-parallel ranks"
                cause = f"{name} failed: {type(error).__name__}: {error}"
                self.store.compare_set(_CAUSE_KEY, "", cause)
        self.close()
        return error

    @contextmanager
    def close_on_error(self) -> Iterator[None]:
        """Closes the groups if the block raises; raises the recorded cause if another rank was lost."""
        try:
            yield
        except BaseException as error:
            if self.failed:
                raise
            cause = self.fail(error)
            if cause is error:
                raise
            raise cause from error

    def close(self) -> None:
        """Closes the process groups, so that a rank that waits gets an error at once."""
        groups = self.compute_group, self.control_group
        self.compute_group = self.control_group = None
        for group in groups:
            if group is not None:
                # A group that torch.distributed has not registered closes with its last reference.
                with suppress(AssertionError, RuntimeError, ValueError):
                    dist.destroy_process_group(group)

    def _broadcast(self, message: Tensor) -> Tensor:
        with self._wrap_errors():
            _require_open(self.control_group).broadcast(message, 0).wait()
        return message

    @contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            first_line, _, _ = str(error).partition("\n")
            raise PeerLost(
                f"another of {self.size} tensor-parallel ranks has exited, or did not answer "
                f"within {self.timeout_s:g} s (actor_rollout_ref.nccl_timeout): {first_line}"
            ) from error


def _require_open(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        raise RuntimeError("the process group was closed after a failure")
    return group


def connect(rank: int, world_size: int, size: int, device: torch.device, timeout_s: float) -> Peers:
    """Returns the peers of this rank; all ranks call this together.

    `size` consecutive ranks share one model.
    """
    timeout = timedelta(seconds=timeout_s)
    groups: dict[str, dist.ProcessGroup] = {}
    for first_rank in range(0, world_size, size):
        ranks = list(range(first_rank, first_rank + size))
        for purpose, backend in (("control", "gloo"), ("compute", "nccl")):
            if purpose == "compute" and device.type != "cuda":
                continue
            group = dist.new_group(ranks, timeout=timeout, backend=backend)
            if rank in ranks:
                groups[purpose] = group
    store = dist.PrefixStore(f"rollout/{rank // size}", dist.distributed_c10d._get_default_store())
    compute_group = groups.get("compute", groups["control"])
    return Peers(rank % size, size, compute_group, groups["control"], store, timeout_s)


SHARDED_TRAITS = Traits(uses_policy_module=False)
"""The traits of the engine of every tensor-parallel rank, which decodes with a shard of its own."""


class Replica:
    """A core, and the requests of the core by number."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.requests: dict[int, Request] = {}

    def checksum(self) -> int:
        """Returns a checksum of each request's newest token, to compare between ranks."""
        tokens = (
            request.token_ids[-1] if request.token_ids else -1 for request in self.requests.values()
        )
        return zlib.crc32(array("q", tokens).tobytes())

    def execute(self, command: Command) -> list[int]:
        """Executes a command and returns the numbers of the requests that have finished."""
        kind, core = command["do"], self.core
        if kind == "add":
            number, sampling = command["number"], Sampling(**command["sampling"])
            request = Request(command["prompt"], sampling, str(number), command["priority"])
            self.add(number, request)
        elif kind == "step":
            return self._step(command["cancelled"], command["checksum"])
        elif kind == "abort":
            return self._remove(core.abort({str(number) for number in command["numbers"]}))
        elif kind == "free_cache":
            core.free_cache()
        elif kind == "invalidate":
            core.invalidate()
        elif kind == "park":
            core.park()
        elif kind == "version":
            core.version = command["version"]
        return []

    def add(self, number: int, request: Request) -> None:
        self.requests[number] = request
        self.core.add(request)

    def _step(self, cancelled: Iterable[int], checksum: int) -> list[int]:
        if checksum != self.checksum():
            raise RolloutError(
                "the tensor-parallel ranks have sampled different tokens; this is a defect"
            )
        for number in cancelled:
            self.requests[number].cancelled = True
        return self._remove(self.core.step(lambda: True))

    def _remove(self, requests: Iterable[Request]) -> list[int]:
        numbers = [int(request.request_id) for request in requests]
        for number in numbers:
            del self.requests[number]
        return numbers
