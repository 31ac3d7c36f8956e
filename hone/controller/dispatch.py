"""The call of a worker's method from the training loop, on all ranks of its worker group.

`WorkerGroupBase` splits the arguments over the ranks, an executor runs the method on each rank, and
`WorkerGroupBase` joins the results. `LocalExecutor` runs the single rank of this process; `RayExecutor`
(ray.py) runs each rank in a Ray actor. On a rank, `WorkerHost` calls the worker.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import ModuleType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeGuard, TypeVar

import numpy as np
import torch
from tensordict import TensorDict

from hone.controller.background_loop import BackgroundLoop
from hone.controller.contract import (
    DEFAULT_MESH,
    SPEC_ATTRIBUTE,
    ArgumentsPerRank,
    Batch,
    Call,
    Execute,
    Executor,
    GroupView,
    Mesh,
    MethodSpec,
    TensorDictPayload,
    WorkerGroupLike,
)
from hone.protocol import PADDED_ROW, DataProto, DataProtoFuture, split_padded
from hone.protocol.padding import drop_padded_rows
from hone.protocol.tensordicts import concat_tensordict
from hone.suggestions import suggestion
from hone.types import Function

if TYPE_CHECKING:
    from hone.controller.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
W = TypeVar("W", covariant=True)
"""The worker's class."""

_NUMBER_BYTES = 8
_NUMBER_TYPES = (int, float, np.number, type(None))
_TEXT_TYPES = (str, bytes, bytearray)
_SEQUENCE_TYPES = (list, tuple)
_TYPES_SENT_BY_NAME = (type, ModuleType)


def is_tensordict_batch(value: object) -> TypeGuard[TensorDict]:
    """Whether a value is a TensorDict with a batch dimension."""
    return isinstance(value, TensorDict) and bool(value.batch_size)


def _map_arguments(
    split: Callable[[S], list[T]], args: tuple[S, ...], kwargs: dict[str, S]
) -> ArgumentsPerRank[T]:
    """Applies `split`, which returns one entry per rank, to every argument."""
    return tuple(split(value) for value in args), {key: split(kwargs[key]) for key in kwargs}


def broadcast(group: WorkerGroupLike, *args: T, **kwargs: T) -> ArgumentsPerRank[T]:
    """Sends the same arguments to every rank."""
    return _map_arguments(lambda value: [value] * group.world_size, args, kwargs)


def scatter(
    group: WorkerGroupLike, *args: Sequence[T], **kwargs: Sequence[T]
) -> ArgumentsPerRank[T]:
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
    mesh_name: str, group: WorkerGroupLike, *args: T, **kwargs: T
) -> ArgumentsPerRank[T | Batch]:
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

    def split(value: T) -> list[T | Batch]:
        batch_by_slot: Sequence[Batch]
        if isinstance(value, DataProto) and mesh.dp_size == 1:
            # The slot gets a DataProto of its own, because the worker may change the columns.
            batch_by_slot = [value.select()]
        elif isinstance(value, DataProto):
            batch_by_slot = split_padded(value, mesh.dp_size)
        elif is_tensordict_batch(value):
            batches = split_padded(DataProto.from_tensordict(value), mesh.dp_size)
            batch_by_slot = [TensorDictPayload(batch) for batch in batches]
        elif isinstance(value, DataProtoFuture):
            batch_by_slot = value.split_padded(mesh.dp_size)
        else:
            return [value] * len(mesh.dp_ranks)
        return [batch_by_slot[slot] for slot in mesh.dp_ranks]

    return _map_arguments(split, args, kwargs)


def as_list(group: WorkerGroupLike, results: list[T]) -> list[T]:
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


def as_data_proto(value: Any) -> Any:
    """Converts a TensorDict to a DataProto; returns other values unchanged."""
    return DataProto.from_tensordict(value) if is_tensordict_batch(value) else value


def materialize(value: Any) -> Any:
    """Returns the batch of a future or of a payload; returns other values unchanged."""
    if isinstance(value, TensorDictPayload):
        return value.batch.to_tensordict()
    return value.get() if isinstance(value, DataProtoFuture) else value


def payload_bytes(value: Any) -> int:
    """Returns the bytes of tensors, arrays, text and lists of numbers in a value.

    Single numbers are not counted. An object that several rows share counts once.
    """
    total_bytes, seen_ids = 0, set()
    values: list[Any] = [value]  # grows in the loop; keeps all values alive, so that ids are unique
    for item in values:
        if isinstance(item, _NUMBER_TYPES + _TYPES_SENT_BY_NAME) or id(item) in seen_ids:
            continue
        seen_ids.add(id(item))
        if isinstance(item, _TEXT_TYPES):
            total_bytes += len(item)
        elif isinstance(item, _SEQUENCE_TYPES):
            # A list of token ids or log-probs is long, so only three entries are checked.
            if item and all(isinstance(item[i], _NUMBER_TYPES) for i in (0, len(item) // 2, -1)):
                total_bytes += _NUMBER_BYTES * len(item)
            else:
                values += item
        elif isinstance(item, torch.Tensor):
            total_bytes += item.values().nbytes if item.is_nested else item.nbytes
        elif isinstance(item, np.ndarray) and item.dtype == object:
            values += item.flat
        elif isinstance(item, np.ndarray):
            total_bytes += item.nbytes
        elif isinstance(item, Mapping):
            values += item.values()
        else:
            values += getattr(item, "__dict__", {}).values()
    return total_bytes


def count_and_collect(
    traffic: Counter[str], key: str, collect: Callable[[list[Any]], T], results: list[Any]
) -> T:
    """Adds the payload bytes of the results to `traffic[key]` and returns `collect(results)`."""
    traffic[key] += sum(map(payload_bytes, results))
    return collect(results)


class WorkerGroupBase(Generic[W]):
    """The base class of `WorkerGroup`: calls the ranks of one role.

    `group.method(…)` calls any registered method by its name. `call`, `call_all` and `call_each`
    take the method itself, so that type checkers check its arguments and result.
    """

    def __init__(self, executor: Executor[Any], name: str, role: str) -> None:
        self._executor = executor
        self._role = role
        """The role of the colocated worker; empty if there is only one worker."""
        self._meshes: dict[str, Mesh] = {}
        self._specs: dict[str, MethodSpec] = {}
        self._methods: dict[str, Function] = {}
        self.name = name
        self.traffic: Counter[str] = Counter()
        """Payload bytes of arguments and results, by `name/method`; `name` is that of the group."""

    @property
    def world_size(self) -> int:
        return self._executor.world_size

    def __getattr__(self, name: str) -> Function:
        methods = self.__dict__.get("_methods", {})
        if name in methods:
            return methods[name]
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"worker group {self.__dict__.get('name', '')!r} has no method "
            f"{name!r}.{suggestion(name, methods)} Registered are {sorted(methods)}"
        )

    @property
    def data_parallel_size(self) -> int:
        """The number of data-parallel slots over which rows are split."""
        return self.mesh(DEFAULT_MESH).dp_size

    def mesh(self, name: str) -> Mesh:
        """Returns the slots of the ranks on the mesh `name`; the first call asks the ranks."""
        if name not in self._meshes:
            self._meshes[name] = self._request_mesh(name)
        return self._meshes[name]

    def _request_mesh(self, name: str) -> Mesh:
        """Asks the ranks for their slots on the mesh `name`."""
        raise NotImplementedError

    def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a method and returns what its dispatch mode collects from the ranks."""
        result: R = self.__getattr__(method.__name__)(*args, **kwargs)
        return result

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        spec = self._specs[name]
        mode = spec.dispatch_mode
        split_args, split_kwargs = mode.dispatch_fn(self, *args, **kwargs)
        is_rank_zero_call = mode.rank_zero_only or spec.execute_mode is Execute.RANK_ZERO
        num_ranks = 1 if is_rank_zero_call else self.world_size
        for values in (*split_args, *split_kwargs.values()):
            if len(values) not in (num_ranks, self.world_size):
                raise ValueError(
                    f"{mode!r} split an argument of {self.name}.{name} into {len(values)} entries "
                    f"for {self.world_size} ranks; its dispatch function must return one per rank"
                )
        handles = []
        for rank in range(num_ranks):
            rank_args = tuple(values[rank] for values in split_args)
            rank_kwargs = {key: values[rank] for key, values in split_kwargs.items()}
            handles.append(self._submit(rank, Call(self._role, name, rank_args, rank_kwargs)))
        # A future may be resolved in another process, which has no worker group.
        group = self if spec.blocking else GroupView(self.world_size, dict(self._meshes))
        collect: Function = functools.partial(mode.collect_fn, group)
        if is_rank_zero_call:
            collect = operator.itemgetter(0)
        elif mode.collects_per_slot:
            collect = functools.partial(_collect_slots, collect, self.mesh(DEFAULT_MESH))
        collect = self._count_results(name, collect)
        resolve = self._executor.resolver(self.name, name)
        if spec.blocking:
            return collect(resolve(handles))
        return DataProtoFuture(collect, handles, resolve=resolve)

    def _submit(self, rank: int, call: Call) -> Any:
        """Counts the payload bytes of a call and starts it."""
        arguments = (*call.args, *call.kwargs.values())
        self.traffic[f"{self.name}/{call.method}"] += sum(map(payload_bytes, arguments))
        return self._executor.submit(rank, call)

    def _count_results(self, method: str, collect: Function) -> Function:
        """Returns a function that counts the payload bytes of the results, then collects them."""
        return functools.partial(count_and_collect, self.traffic, f"{self.name}/{method}", collect)

    def call_all(
        self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Calls a method that all ranks run with the same arguments; returns results in rank order."""
        return self.call(method, *args, **kwargs)  # type: ignore[arg-type]

    def call_each(self, method: Callable[[W, T], R], values: Sequence[T]) -> list[R]:
        """Calls a method that gives each rank its entry of `values`; returns results in rank order."""
        return self.call(method, values)  # type: ignore[arg-type]


def _collect_slots(collect: Callable[[list[T]], R], mesh: Mesh, results: list[T]) -> R:
    """Collects one result per data-parallel slot."""
    return collect([results[rank] for rank in mesh.collect_ranks])


class WorkerHost:
    """The workers of one rank: a single worker, or one worker per colocated role."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        """The workers by role; the role of a single worker is the empty string."""
        self._background_loop = BackgroundLoop()

    def call(self, call: Call) -> Any:
        """Resolves the futures among the arguments and runs the method.

        If the result is a batch, it is moved to the CPU, and its padded rows are dropped.
        """
        method = getattr(self.worker(call.role), call.method)
        args, kwargs = call.args, call.kwargs
        spec: MethodSpec | None = getattr(method, SPEC_ATTRIBUTE, None)
        if spec is None or spec.materialize_futures:
            args = tuple(materialize(value) for value in args)
            kwargs = {key: materialize(value) for key, value in kwargs.items()}
        result = method(*args, **kwargs)
        if inspect.iscoroutine(result):
            result = self._background_loop.run(result)
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise TypeError(
                f"{call.method!r} returned a generator, which stays in its process; return a list"
            )
        is_tensordict = is_tensordict_batch(result)
        if not is_tensordict and not isinstance(result, DataProto):
            return result
        batch = as_data_proto(result)
        arguments = map(as_data_proto, (*args, *kwargs.values()))
        inputs = [value for value in arguments if isinstance(value, DataProto)]
        if any(value.has_column(PADDED_ROW) for value in (batch, *inputs)):
            batch = drop_padded_rows(batch, inputs)
        batch = batch.to("cpu")
        return batch.to_tensordict() if is_tensordict else batch

    def worker(self, role: str = "") -> Worker:
        fused_workers = getattr(self.workers.get(""), "fused_worker_dict", {})
        if role in fused_workers:
            return fused_workers[role]
        if role not in self.workers:
            raise ValueError(
                f"this process has the roles {sorted(self.workers)}, not {role!r}; call one of the "
                "groups that spawn(roles) returns"
            )
        return self.workers[role]

    def close(self) -> None:
        """Closes the workers that have `close`, in the order of creation, and stops the event loop."""
        with contextlib.ExitStack() as stack:  # an error in one `close` does not skip the others
            stack.callback(self._background_loop.close)
            for worker in reversed(self.workers.values()):
                fused_workers = getattr(worker, "fused_worker_dict", {}).values()
                members = [worker] if hasattr(worker, "close") else reversed(fused_workers)
                for member in members:
                    close = getattr(member, "close", None)
                    if callable(close):
                        stack.callback(close)


class LocalExecutor(Executor[Future[Any]]):
    """A single rank in this process; `submit` returns after the call has finished."""

    world_size = 1

    def __init__(self, host: WorkerHost, group_name: str) -> None:
        self._host: WorkerHost | None = host
        self._group_name = group_name

    def submit(self, rank: int, call: Call) -> Future[Any]:
        if self._host is None:
            raise RuntimeError(f"worker group {self._group_name!r} was shut down; create a new one")
        future: Future[Any] = Future()
        try:
            future.set_result(self._host.call(call))
        except Exception as error:  # the resolver raises it, as under Ray
            future.set_exception(error)
        return future

    def resolver(self, role: str, method: str) -> Callable[[Sequence[Future[Any]]], list[Any]]:
        return get_results

    def shutdown(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.close()


def get_results(futures: Sequence[Future[T]]) -> list[T]:
    """Returns the results of finished calls, or raises the first error."""
    return [future.result() for future in futures]
