"""Defines DataProtoFuture, a batch that workers are still computing, and an all-gather of batches.

The controller that creates a future gives it `resolve`, which waits for the workers up to a deadline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from tensordict import TensorDict

from hone.protocol.data_proto import DataProto
from hone.protocol.padding import split_padded
from hone.protocol.rows import ProtocolError
from hone.protocol.tensordicts import BatchData
from hone.types import Function

Result: TypeAlias = Any
"""The result of a worker, usually a batch."""
Handle: TypeAlias = Any
"""The controller's handle for a pending result, or the result itself."""


def resolve_handles(handles: Sequence[Handle]) -> list[Result]:
    """Returns the results of handles with `.get()` or `.result()`; returns results unchanged."""
    results = []
    for handle in handles:
        wait = getattr(handle, "get", None) or getattr(handle, "result", None)
        is_result = isinstance(handle, dict | TensorDict)  # their `get` looks up a key
        results.append(wait() if callable(wait) and not is_result else handle)
    return results


@dataclass
class DataProtoFuture:
    """A pending result; `get` waits for it, `chunk` and `concat` do not."""

    collect_fn: Callable[[list[Result]], Result]
    """Joins the results of all handles into one."""
    futures: list[Handle]
    """One handle per worker."""
    dispatch_fn: Function | None = None
    """Selects this future's part of the joined result."""
    resolve: Callable[[Sequence[Handle]], list[Result]] = resolve_handles
    """Waits for the handles; must be picklable, because a worker may resolve the future."""

    def get(self) -> Result:
        """Waits for the handles, joins their results and returns this future's part."""
        result = self.collect_fn(self.resolve(self.futures))
        return result if self.dispatch_fn is None else self.dispatch_fn(result)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Returns futures of the parts of `get().chunk(chunks)`."""
        return [self._then(functools.partial(_chunk, i, chunks)) for i in range(chunks)]

    def split_padded(self, parts: int) -> list[DataProtoFuture]:
        """Returns futures of the parts of `split_padded(get(), parts)`."""
        return [self._then(functools.partial(_padded_part, i, parts)) for i in range(parts)]

    @staticmethod
    def concat(data: Sequence[Handle]) -> DataProtoFuture:
        """Returns a future of the concatenation of futures or handles."""
        if not data:
            raise ProtocolError("nothing to concatenate: the list of futures is empty")
        return DataProtoFuture(collect_fn=_concat, futures=list(data))

    def _then(self, function: Function) -> DataProtoFuture:
        """Returns a future that applies `function` to the result of this one."""
        if self.dispatch_fn is not None:
            function = functools.partial(_compose, self.dispatch_fn, function)
        return DataProtoFuture(self.collect_fn, self.futures, function, self.resolve)


def _chunk(index: int, chunks: int, data: DataProto) -> DataProto:
    return data.chunk(chunks)[index]


def _padded_part(index: int, parts: int, data: DataProto | TensorDict) -> DataProto | TensorDict:
    if isinstance(data, TensorDict):
        return split_padded(DataProto.from_tensordict(data), parts)[index].to_tensordict()
    return split_padded(data, parts)[index]


def _concat(batches: list[DataProto | TensorDict]) -> Result:
    return BatchData(batches).concat()


def _compose(first: Function, second: Function, data: Result) -> Result:
    return second(first(data))


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup | None = None) -> None:
    """Gathers the rows of all ranks into the batch, in place and in rank order."""
    world_size = dist.get_world_size(process_group)
    if world_size == 1:
        return
    cls = type(data)
    without_tensors = cls(None, data.non_tensor_batch, data.meta_info)
    tensors = {} if data.batch is None else dict(data.batch.items())
    shapes = {name: tuple(tensor.shape[1:]) for name, tensor in tensors.items()}
    state = (without_tensors, len(data), shapes)
    states = [state] * world_size  # all_gather_object replaces the entries
    dist.all_gather_object(states, state, group=process_group)
    all_shapes = [rank_shapes for _, _, rank_shapes in states]
    if any(rank_shapes != shapes for rank_shapes in all_shapes):
        raise ProtocolError(f"ranks have different tensor columns: {all_shapes}")
    num_rows = [rank_rows for _, rank_rows, _ in states]
    gathered = cls.concat([batch for batch, _, _ in states])
    columns = {}
    for name in sorted(tensors):
        # Collectives need equal shapes: every rank pads to the largest number of rows.
        padded = tensors[name].new_zeros((max(num_rows), *shapes[name]))
        padded[: len(data)] = tensors[name]
        outputs = [torch.empty_like(padded) for _ in num_rows]
        dist.all_gather(outputs, padded, group=process_group)
        columns[name] = torch.cat(
            [output[:rows] for output, rows in zip(outputs, num_rows, strict=True)]
        )
    if columns:
        gathered = cls.from_dict(columns, gathered.non_tensor_batch, gathered.meta_info)
    data.batch, data.non_tensor_batch = gathered.batch, gathered.non_tensor_batch
    data.meta_info = gathered.meta_info
