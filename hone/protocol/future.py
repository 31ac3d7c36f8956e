"""DataProtoFuture: the promise of a batch, passed between groups without being fetched.

What waits for the handles is given by whoever made them, so this file knows no transport. Leaves
out deadlines: the given `resolve` owns them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from hone.protocol.errors import ProtocolError
from hone.protocol.padding import split_padded
from hone.types import Function

if TYPE_CHECKING:
    from hone.protocol.data_proto import DataProto


Value: TypeAlias = Any
"""What a worker returned, mostly a batch; or the transport's handle of it."""


def resolve_handles(handles: Sequence[Value]) -> list[Value]:
    """Handles that know their own value: `.get()`, `.result()`, or the value itself."""
    return [_value_of(handle) for handle in handles]


@dataclass
class DataProtoFuture:
    """A result still being computed; `get` waits for it, `chunk` and `concat` do not."""

    collect_fn: Callable[[list[Value]], Value]
    """Joins the results of all handles into one."""
    futures: list[Value]
    """One handle a worker."""
    dispatch_fn: Function | None = None
    """Applied to the joined result: takes this future's part of it."""
    resolve: Callable[[Sequence[Value]], list[Value]] = resolve_handles
    """Waits for the handles; must be picklable, as a future may be resolved in a worker."""

    def get(self) -> Value:
        """Wait, join, and take this future's part."""
        result = self.collect_fn(self.resolve(self.futures))
        return result if self.dispatch_fn is None else self.dispatch_fn(result)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Futures of the parts `get().chunk(chunks)` would give."""
        return [self._then(functools.partial(_chunk, i, chunks)) for i in range(chunks)]

    def split_padded(self, parts: int) -> list[DataProtoFuture]:
        """Futures of equal parts, with rows added and marked where there are too few."""
        return [self._then(functools.partial(_padded_part, i, parts)) for i in range(parts)]

    @staticmethod
    def concat(data: Sequence[Value]) -> DataProtoFuture:
        """A future of the concatenation of futures (or handles) of batches."""
        if not data:
            raise ProtocolError("nothing to concatenate: the list of futures is empty")
        return DataProtoFuture(collect_fn=_concat, futures=list(data))

    def _then(self, step: Function) -> DataProtoFuture:
        whole = (
            step if self.dispatch_fn is None else functools.partial(_both, self.dispatch_fn, step)
        )
        return DataProtoFuture(self.collect_fn, self.futures, whole, self.resolve)


def _value_of(handle: Value) -> Value:
    for name in ("get", "result"):
        wait = getattr(handle, name, None)
        if callable(wait) and not isinstance(handle, dict):
            return wait()
    return handle


def _chunk(index: int, chunks: int, data: DataProto) -> DataProto:
    return data.chunk(chunks)[index]


def _padded_part(index: int, parts: int, data: DataProto) -> DataProto:
    return split_padded(data, parts)[index]


def _concat(pieces: list[DataProto]) -> DataProto:
    return type(pieces[0]).concat(pieces)


def _both(first: Function, second: Function, data: Value) -> Value:
    return second(first(data))
