"""DataProtoFuture, a batch that is still being computed, and an all-gather of batches.

The controller that creates the handles provides `resolve`, which waits for them and sets the deadlines.
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
"""A worker's result, mostly a batch, or the controller's handle of it."""


def resolve_handles(handles: Sequence[Value]) -> list[Value]:
    """Resolves handles by `.get()` or `.result()`; other values are returned unchanged."""
    values = []
    for handle in handles:
        waits = [getattr(handle, name, None) for name in ("get", "result")]
        wait = next((w for w in waits if callable(w) and not isinstance(handle, dict)), None)
        values.append(handle if wait is None else wait())
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
        whole = (
            step if self.dispatch_fn is None else functools.partial(_both, self.dispatch_fn, step)
        )
        return DataProtoFuture(self.collect_fn, self.futures, whole, self.resolve)


def _chunk(index: int, chunks: int, data: DataProto) -> DataProto:
    return data.chunk(chunks)[index]


def _padded_part(index: int, parts: int, data: DataProto) -> DataProto:
    return split_padded(data, parts)[index]


def _concat(pieces: list[DataProto]) -> DataProto:
    return type(pieces[0]).concat(pieces)


def _both(first: Function, second: Function, data: Value) -> Value:
    return second(first(data))


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup | None = None) -> None:
    """Gathers the rows of all ranks into the batch, in place and in rank order."""
    world = dist.get_world_size(process_group)
    if world == 1:
        return
    kind = type(data)
    light = kind(None, data.non_tensor_batch, data.meta_info)
    tensors = {} if data.batch is None else dict(data.batch.items())
    widths = {name: tuple(tensor.shape[1:]) for name, tensor in tensors.items()}
    ranks = [(light, len(data), widths)] * world
    dist.all_gather_object(ranks, ranks[0], group=process_group)
    if any(theirs != widths for _, _, theirs in ranks):
        raise ProtocolError(f"ranks hold different tensor columns: {[rank[2] for rank in ranks]}")
    counts = [count for _, count, _ in ranks]
    whole = kind.concat([batch for batch, _, _ in ranks])
    columns = {}
    for name in sorted(tensors):
        # Collectives need equal shapes: pad to the largest number of rows of any rank.
        sent = tensors[name].new_zeros((max(counts), *widths[name]))
        sent[: len(data)] = tensors[name]
        received = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(received, sent, group=process_group)
        pieces = zip(received, counts, strict=True)
        columns[name] = torch.cat([piece[:count] for piece, count in pieces])
    if columns:
        whole = kind.from_dict(columns, whole.non_tensor_batch, whole.meta_info)
    data.batch, data.non_tensor_batch = whole.batch, whole.non_tensor_batch
    data.meta_info = whole.meta_info
