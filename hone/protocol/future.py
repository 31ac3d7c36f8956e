"""DataProtoFuture, a batch that workers still compute, and an all-gather of batches.

The controller that creates the handles provides `resolve`, which waits for them up to a deadline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from hone.protocol.padding import split_padded
from hone.protocol.rows import ProtocolError
from hone.types import Function

if TYPE_CHECKING:
    from hone.protocol.data_proto import DataProto

Value: TypeAlias = Any
"""The result of a worker, usually a batch, or the controller's handle for it."""


def resolve_handles(handles: Sequence[Value]) -> list[Value]:
    """Resolves handles by `.get()` or `.result()`; other values are returned unchanged."""
    values = []
    for handle in handles:
        wait = getattr(handle, "get", None) or getattr(handle, "result", None)
        values.append(wait() if callable(wait) and not isinstance(handle, dict) else handle)
    return values


@dataclass
class DataProtoFuture:
    """A pending result; `get` waits for it, `chunk` and `concat` do not."""

    collect_fn: Callable[[list[Value]], Value]
    """Joins the results of all handles into one."""
    futures: list[Value]
    """One handle per worker."""
    dispatch_fn: Function | None = None
    """Selects this future's part of the joined result."""
    resolve: Callable[[Sequence[Value]], list[Value]] = resolve_handles
    """Waits for the handles; must be picklable, because a worker may resolve the future."""

    def get(self) -> Value:
        """Waits for the handles, joins their results and returns this future's part."""
        result = self.collect_fn(self.resolve(self.futures))
        return result if self.dispatch_fn is None else self.dispatch_fn(result)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Returns futures of the parts of `get().chunk(chunks)`."""
        return [self._then(functools.partial(_chunk, i, chunks)) for i in range(chunks)]

    def split_padded(self, parts: int) -> list[DataProtoFuture]:
        """Returns futures of equal parts; added rows are marked."""
        return [self._then(functools.partial(_padded_part, i, parts)) for i in range(parts)]

    @staticmethod
    def concat(data: Sequence[Value]) -> DataProtoFuture:
        """Returns a future of the concatenation of futures or handles."""
        if not data:
            raise ProtocolError("nothing to concatenate: the list of futures is empty")
        return DataProtoFuture(collect_fn=_concat, futures=list(data))

    def _then(self, step: Function) -> DataProtoFuture:
        """Returns a future that also applies `step` to the result."""
        if self.dispatch_fn is not None:
            step = functools.partial(_compose, self.dispatch_fn, step)
        return DataProtoFuture(self.collect_fn, self.futures, step, self.resolve)


def _chunk(index: int, chunks: int, data: DataProto) -> DataProto:
    return data.chunk(chunks)[index]


def _padded_part(index: int, parts: int, data: DataProto) -> DataProto:
    return split_padded(data, parts)[index]


def _concat(pieces: list[DataProto]) -> DataProto:
    return type(pieces[0]).concat(pieces)


def _compose(first: Function, second: Function, data: Value) -> Value:
    return second(first(data))


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup | None = None) -> None:
    """Gathers the rows of all ranks into the batch, in place and in rank order."""
    world = dist.get_world_size(process_group)
    if world == 1:
        return
    cls = type(data)
    without_tensors = cls(None, data.non_tensor_batch, data.meta_info)
    tensors = {} if data.batch is None else dict(data.batch.items())
    shapes = {name: tuple(tensor.shape[1:]) for name, tensor in tensors.items()}
    ranks = [(without_tensors, len(data), shapes)] * world
    dist.all_gather_object(ranks, ranks[0], group=process_group)
    if any(rank_shapes != shapes for _, _, rank_shapes in ranks):
        raise ProtocolError(f"ranks have different tensor columns: {[rank[2] for rank in ranks]}")
    counts = [count for _, count, _ in ranks]
    gathered = cls.concat([batch for batch, _, _ in ranks])
    columns = {}
    for name in sorted(tensors):
        # Collectives need equal shapes: pad to the largest number of rows of any rank.
        sent = tensors[name].new_zeros((max(counts), *shapes[name]))
        sent[: len(data)] = tensors[name]
        received = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(received, sent, group=process_group)
        pieces = zip(received, counts, strict=True)
        columns[name] = torch.cat([piece[:count] for piece, count in pieces])
    if columns:
        gathered = cls.from_dict(columns, gathered.non_tensor_batch, gathered.meta_info)
    data.batch, data.non_tensor_batch = gathered.batch, gathered.non_tensor_batch
    data.meta_info = gathered.meta_info
