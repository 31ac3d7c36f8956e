"""Dispatch of a call: its arguments are split over the ranks, its results are joined, and both are counted.

An Executor runs the call on each rank, within the deadline of its phase.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Generic, Protocol, TypeAlias, TypeGuard, TypeVar

import numpy as np
import torch
from tensordict import TensorDict

from hone.protocol import (
    PADDED_ROW,
    DataProto,
    DataProtoFuture,
    real_row_mask,
    split_padded,
    without_padding,
)
from hone.protocol.tensordicts import concat_tensordict
from hone.types import Settings

_S = TypeVar("_S")
_T = TypeVar("_T")
Handle = TypeVar("Handle")
"""The type of the handle that `submit` returns."""

_NUMBER_BYTES = 8
_NUMBER_TYPES = (int, float, np.number, type(None))
_TEXT_TYPES = (str, bytes, bytearray)
_SEQUENCE_TYPES = (list, tuple)
_TYPES_SENT_BY_NAME = (type, ModuleType)


DEFAULT_MESH = ""
"""The name of the default mesh. In a worker without an engine, each rank is a data-parallel slot."""


@dataclass(frozen=True)
class Mesh:
    """The data-parallel slot of each rank on a mesh, and whether the rank's result is collected."""

    dp_ranks: tuple[int, ...]
    """The slot of each rank."""
    is_collect: tuple[bool, ...]
    """Whether the result of each rank is collected."""

    @property
    def dp_size(self) -> int:
        return max(self.dp_ranks) + 1

    @property
    def collect_ranks(self) -> list[int]:
        """The ranks whose results are collected, one per slot, in slot order."""
        ranks = [rank for rank, is_collect in enumerate(self.is_collect) if is_collect]
        return sorted(ranks, key=lambda rank: self.dp_ranks[rank])

    def check(self, name: str) -> None:
        """Raises ValueError unless exactly one rank per slot is collected."""
        slots = [self.dp_ranks[rank] for rank in self.collect_ranks]
        if slots != list(range(self.dp_size)):
            raise ValueError(
                f"mesh {name!r}: each of {self.dp_size} data-parallel slots needs exactly one rank "
                f"that collects; the collecting ranks are in slots {slots}"
            )


class WorkerGroupLike(Protocol):
    """The interface of a worker group for dispatch and collect functions."""

    @property
    def world_size(self) -> int: ...

    def mesh(self, name: str) -> Mesh:
        """Returns the slots of the ranks on the mesh `name`."""


@dataclass(frozen=True)
class GroupView:
    """The picklable part of a worker group, for the collect function of a future."""

    world_size: int
    meshes: dict[str, Mesh] = field(default_factory=dict)

    def mesh(self, name: str) -> Mesh:
        return self.meshes[name]


@dataclass(frozen=True)
class Call:
    """One method call on one rank."""

    role: str
    """The role of the colocated worker; empty if there is only one worker."""
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Settings = field(default_factory=dict)


class Executor(ABC, Generic[Handle]):
    """Runs method calls on the ranks of a worker group."""

    world_size: int

    @abstractmethod
    def submit(self, rank: int, call: Call) -> Handle:
        """Starts a call and returns a handle immediately."""

    @abstractmethod
    def resolver(self, role: str, method: str) -> Callable[[Sequence[Handle]], list[Any]]:
        """Returns a picklable function that waits for handles and returns the results of their calls.

        The messages of its errors contain `role` and `method`.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Stops all ranks and releases their resources; a second call does nothing."""


@dataclass
class PhaseDeadlines:
    """The deadline of each phase: the larger of `floor_s` and `factor` times its longest completed run.

    A phase is a worker's method, or all agent loops of a batch.
    """

    floor_s: float
    """`trainer.phase_deadline_floor_s`."""
    factor: float
    """`trainer.phase_deadline_factor`."""
    longest_run_s: dict[str, float] = field(default_factory=dict)
    """The longest completed run of each phase."""

    def limit_s(self, phase: str) -> float:
        """Returns the deadline of the phase's next run."""
        return max(self.floor_s, self.factor * self.longest_run_s.get(phase, 0.0))

    def record(self, phase: str, seconds: float) -> None:
        """Records the duration of a completed run."""
        self.longest_run_s[phase] = max(seconds, self.longest_run_s.get(phase, 0.0))

    @contextmanager
    def timed(self, phase: str) -> Iterator[float]:
        """Yields the limit of this run and records its duration if it completes."""
        start_time = time.monotonic()
        yield self.limit_s(phase)
        self.record(phase, time.monotonic() - start_time)

    def advice(self, phase: str) -> str:
        """Returns the end of an error message: where the limit comes from and how to raise it."""
        longest_run_s = self.longest_run_s.get(phase)
        if longest_run_s is None or self.factor * longest_run_s <= self.floor_s:
            return "raise trainer.phase_deadline_floor_s if the work is that long"
        return (
            f"raise trainer.phase_deadline_factor (the limit is {self.factor:g} times the longest "
            f"run so far, {longest_run_s:.3g} s) if the work is that long"
        )


@dataclass(frozen=True)
class TensorDictPayload:
    """A TensorDict as an argument or result: pickled as a DataProto, unpickled as a TensorDict."""

    batch: DataProto

    def __reduce__(self) -> tuple[Callable[[DataProto], TensorDict], tuple[DataProto]]:
        return DataProto.to_tensordict, (self.batch,)


Batch: TypeAlias = DataProto | DataProtoFuture | TensorDictPayload
ArgumentsPerRank: TypeAlias = tuple[tuple[list[_T], ...], dict[str, list[_T]]]
"""Positional and keyword arguments, each as a list with one entry per rank."""
DispatchFn = Callable[..., ArgumentsPerRank[Any]]
"""Maps (worker group, *args, **kwargs) to `ArgumentsPerRank`."""
CollectFn = Callable[[WorkerGroupLike, list[Any]], Any]
"""Maps (worker group, results in rank order) to the caller's result."""


def is_tensordict_batch(value: object) -> TypeGuard[TensorDict]:
    """Whether a value is a TensorDict with a batch dimension."""
    return isinstance(value, TensorDict) and bool(value.batch_size)


def _map_arguments(
    split: Callable[[_S], list[_T]], args: tuple[_S, ...], kwargs: dict[str, _S]
) -> ArgumentsPerRank[_T]:
    """Applies `split`, which returns one entry per rank, to every argument."""
    return tuple(split(value) for value in args), {key: split(kwargs[key]) for key in kwargs}


def broadcast(group: WorkerGroupLike, *args: _T, **kwargs: _T) -> ArgumentsPerRank[_T]:
    """Sends the same arguments to every rank."""
    return _map_arguments(lambda value: [value] * group.world_size, args, kwargs)


def scatter(
    group: WorkerGroupLike, *args: Sequence[_T], **kwargs: Sequence[_T]
) -> ArgumentsPerRank[_T]:
    """Sends each rank its own entry; every argument is a list with one entry per rank."""

    for value in (*args, *kwargs.values()):
        is_list = isinstance(value, list | tuple)
        if not is_list or len(value) != group.world_size:
            content = f"{len(value)} entries" if is_list else repr(type(value))
            raise ValueError(
                f"this method takes lists with one entry for each of {group.world_size} ranks; "
                f"got {content}; register it with Dispatch.ONE_TO_ALL to send all ranks the same value"
            )
    return _map_arguments(list, args, kwargs)


def dispatch_nd_compute_dataproto(
    mesh_name: str, group: WorkerGroupLike, *args: _T, **kwargs: _T
) -> ArgumentsPerRank[_T | Batch]:
    """Splits batches over the data-parallel slots of a mesh and sends other arguments to all ranks.

    The ranks of one slot get the same rows. The column `padded_row` marks the rows added as padding.
    """
    mesh = group.mesh(mesh_name)
    if not any(
        isinstance(value, DataProto | DataProtoFuture) or is_tensordict_batch(value)
        for value in (*args, *kwargs.values())
    ):
        raise TypeError(
            "this method splits a DataProto or a TensorDict over its ranks, and no argument is one"
        )

    def split(value: _T) -> list[_T | Batch]:
        parts: Sequence[Batch]
        if isinstance(value, DataProto):
            # A single slot also gets a batch of its own, because the worker may change its columns.
            parts = split_padded(value, mesh.dp_size) if mesh.dp_size > 1 else [value.select()]
        elif is_tensordict_batch(value):
            batch = DataProto.from_tensordict(value)
            parts = [TensorDictPayload(part) for part in split_padded(batch, mesh.dp_size)]
        elif isinstance(value, DataProtoFuture):
            parts = value.split_padded(mesh.dp_size)
        else:
            return [value] * len(mesh.dp_ranks)
        return [parts[slot] for slot in mesh.dp_ranks]

    return _map_arguments(split, args, kwargs)


split_batches = functools.partial(dispatch_nd_compute_dataproto, DEFAULT_MESH)
"""Splits batches over the slots of the default mesh."""


def as_list(group: WorkerGroupLike, results: list[_T]) -> list[_T]:
    """Returns the results in rank order."""
    return list(results)


def concat_batches(group: WorkerGroupLike, results: list[Any]) -> DataProto | TensorDict:
    """Concatenates the results; each must be a batch."""
    if all(is_tensordict_batch(result) for result in results):
        return concat_tensordict(results)
    for rank, result in enumerate(results):
        if not isinstance(result, DataProto):
            raise TypeError(
                f"rank {rank} returned a {type(result).__name__}, which cannot be concatenated; "
                "return a DataProto, or register the method with Dispatch.DP_COMPUTE_METRIC"
            )
    return DataProto.concat(results)


def collect_nd_compute_dataproto(
    mesh_name: str, group: WorkerGroupLike, results: list[DataProto]
) -> DataProto | TensorDict:
    """Concatenates the batches of the collecting ranks in slot order."""
    return concat_batches(group, [results[rank] for rank in group.mesh(mesh_name).collect_ranks])


def as_data_proto(value: Any) -> Any:
    return DataProto.from_tensordict(value) if is_tensordict_batch(value) else value


def materialize(value: Any) -> Any:
    if isinstance(value, TensorDictPayload):
        return value.batch.to_tensordict()
    return value.get() if isinstance(value, DataProtoFuture) else value


def drop_padded_rows(result: DataProto, inputs: Sequence[Any]) -> DataProto:
    """Removes the result rows that belong to padded input rows."""
    batches = [value for value in inputs if isinstance(value, DataProto)]
    padded_inputs = [batch for batch in batches if batch.has_column(PADDED_ROW)]
    if result.has_column(PADDED_ROW):
        real_rows = without_padding(result)
    elif not padded_inputs or len(result) == 0:
        real_rows = result
    else:
        is_real = real_row_mask(padded_inputs[0])
        if len(result) == int(is_real.sum()):
            real_rows = result  # the worker has already dropped the padding
        elif len(result) % len(is_real) == 0 and all(
            real_row_mask(batch).tolist() == is_real.tolist() for batch in batches if len(batch)
        ):
            repeat_count = len(result) // len(is_real)
            real_rows = result.select_idxs(is_real.repeat_interleave(repeat_count))
        else:
            raise ValueError(
                f"a worker got {len(is_real)} rows, {int((~is_real).sum())} of them padding, and returned "
                f"{len(result)}, so the padded rows are unknown; copy the column {PADDED_ROW!r} of one "
                "batch to the result, or drop padded rows first with hone.protocol.without_padding"
            )
    if padded_inputs and not torch.stack([real_row_mask(v).any() for v in padded_inputs]).any():
        real_rows = real_rows.select()
        real_rows.meta_info.pop("metrics", None)  # every input row is padding
    return real_rows


def payload_bytes(value: Any) -> int:
    """Returns the bytes of tensors, arrays, text and lists of numbers in a value.

    Single numbers are not counted. Nothing is pickled; an object that several rows share counts once.
    """
    total_bytes, seen_ids = 0, set()
    parts: list[Any] = [value]  # grows in the loop; keeps the parts alive, so that ids are unique
    for part in parts:
        if isinstance(part, _NUMBER_TYPES + _TYPES_SENT_BY_NAME) or id(part) in seen_ids:
            continue
        seen_ids.add(id(part))
        if isinstance(part, _TEXT_TYPES):
            total_bytes += len(part)
        elif isinstance(part, _SEQUENCE_TYPES):
            # A list of token ids or log-probs is long, so only three entries are checked.
            if part and all(isinstance(part[i], _NUMBER_TYPES) for i in (0, len(part) // 2, -1)):
                total_bytes += _NUMBER_BYTES * len(part)
            else:
                parts += part
        elif isinstance(part, torch.Tensor):
            total_bytes += part.values().nbytes if part.is_nested else part.nbytes
        elif isinstance(part, np.ndarray) and part.dtype != object:
            total_bytes += part.nbytes
        elif isinstance(part, np.ndarray):
            parts += part.flat
        else:
            parts += (part if isinstance(part, Mapping) else getattr(part, "__dict__", {})).values()
    return total_bytes


def count_and_collect(
    traffic: Counter[str], key: str, collect: Callable[[list[Any]], _T], results: list[Any]
) -> _T:
    """Adds the payload bytes of the results to `traffic[key]` and returns `collect(results)`."""
    traffic[key] += sum(map(payload_bytes, results))
    return collect(results)


def traffic_metrics(counters: Iterable[Counter[str]]) -> dict[str, float]:
    """Returns the bytes per method since the last call and their sum; clears the counters."""
    total: Counter[str] = Counter({"weights": 0})  # reported even if it is 0
    for counter in {id(counter): counter for counter in counters}.values():
        total.update(counter)
        counter.clear()
    metrics = {
        f"traffic/{key}_bytes": float(count)
        for key, count in total.items()
        if count or key == "weights"
    }
    return metrics | {"traffic/step_bytes": float(total.total())}
