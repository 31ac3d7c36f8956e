"""RayWorkerGroup, whose ranks are Ray actors on one or several nodes.

Every wait has a deadline, and its error names the rank or the node. Failed workers are not
restarted; the run resumes from its checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

try:
    import ray
except ImportError as error:
    raise ImportError(
        "trainer.controller=ray needs Ray, which is not installed: pip install 'hone-rl[ray]', "
        "or use trainer.controller=local"
    ) from error
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hone.config.trainer import TrainerConfig
from hone.controller.colocated import ClassWithInitArgs, P
from hone.controller.contract import Call, Executor, TensorDictPayload
from hone.controller.dispatch import W, WorkerHost, is_tensordict_batch
from hone.controller.failures import WorkerProcess
from hone.controller.processes import own_log_files
from hone.controller.ray_liveness import cluster_failed, unwatch_workers, watch_workers
from hone.controller.ray_placement import Reservation, acquire_reservation
from hone.controller.ray_start import TOKEN_ENV, start_ray
from hone.controller.ray_wait import RefWait
from hone.controller.resource_pool import ResourcePool
from hone.controller.threads import THREADS_ENV, set_thread_count, thread_count
from hone.controller.worker import LOOPBACK, Placement, free_port
from hone.controller.worker_group import WorkerGroup, build_host
from hone.event_loop import PhaseDeadlines
from hone.logging_level import level_variables
from hone.protocol import DataProto
from hone.text import error_text
from hone.types import Settings

T = TypeVar("T")

START_DEADLINE_S = 300.0
START_ADVICE = "raise trainer.ray_wait_register_center_timeout if the start takes that long"
CLOSE_DEADLINE_S = 5.0
POLL_INTERVAL_S = 1.0
_DEADLINE_FLOOR_S = TrainerConfig.phase_deadline_floor_s
_DEADLINE_FACTOR = TrainerConfig.phase_deadline_factor


class RayResourcePool(ResourcePool):
    """A ResourcePool under verl's name; a plain ResourcePool works too."""


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class with its arguments and its Ray actor options."""

    def __init__(self, cls: Callable[P, W], *args: P.args, **kwargs: P.kwargs) -> None:
        super().__init__(cls, *args, **kwargs)
        self.options: dict[str, Any] = {}

    def update_options(self, options: Settings) -> None:
        """Adds options for `Actor.options(…)`."""
        self.options.update(options)

    def set_additional_resource(self, resources: Mapping[str, float]) -> None:
        """Sets the Ray resources that each rank needs besides its device."""
        self.options["resources"] = dict(resources)


class _WorkerActor:
    """The actor of one rank: creates the workers and runs calls."""

    def __init__(self, import_path: list[str], folder: str) -> None:
        os.environ.pop(TOKEN_ENV, None)  # child processes do not need the token
        # Workers import user modules from the same folders as the trainer process.
        sys.path += [entry for entry in import_path if entry not in sys.path]
        if os.path.isdir(folder):
            os.chdir(folder)  # relative paths resolve as in the trainer process
        self._host: WorkerHost | None = None
        threading.Thread(target=_exit_with_raylet, name="end-with-raylet", daemon=True).start()

    def start_info(self, rank: int) -> tuple[WorkerProcess, int]:
        """Returns the location of this process and a free port of its node."""
        ip, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        return WorkerProcess(rank, os.getpid(), ip, node_id, own_log_files()), free_port()

    def build(self, cls_with_init: ClassWithInitArgs, placement: Placement, threads: int) -> None:
        """Creates the workers of this rank."""
        os.environ.update(placement.environment())
        with picklable_errors():
            self._host = build_host(cls_with_init, placement, threads)

    def call(self, call: Call) -> Any:
        assert self._host is not None, "build must be called before call"
        with picklable_errors():
            result = self._host.call(call)
        if is_tensordict_batch(result):
            return TensorDictPayload(DataProto.from_tensordict(result))
        return result

    def close(self) -> None:
        if self._host is not None:
            self._host.close()


@contextlib.contextmanager
def picklable_errors() -> Iterator[None]:
    """Raises a RuntimeError for an exception that cannot be unpickled; Ray would report a dead worker."""
    try:
        yield
    except Exception as error:
        try:
            cloudpickle.loads(cloudpickle.dumps(error))
        except Exception:  # the `__init__` or `__reduce__` of a user's exception may raise anything
            raise RuntimeError(error_text(error)) from error
        raise


def _exit_with_raylet() -> None:
    """Exits once the raylet has ended; Ray's own check misses this in a container that reaps no zombies."""
    raylet = os.getppid()
    while os.getppid() == raylet:
        time.sleep(POLL_INTERVAL_S)
    os._exit(1)


class RayExecutor(Executor[ray.ObjectRef]):
    """The ranks of one pool; each rank is an actor in its own process."""

    def __init__(
        self,
        pool: ResourcePool,
        cls_with_init: ClassWithInitArgs,
        name: str,
        start_deadline_s: float,
        deadlines: PhaseDeadlines,
        liveness_deadline_s: float,
        worker_env: Mapping[str, str],
        threads: int | None,
    ) -> None:
        if reserved_names := sorted(worker_env.keys() & Placement().environment().keys()):
            raise ValueError(
                f"worker_env of {name!r} sets {', '.join(reserved_names)}, which the controller sets for "
                "each rank; remove them"
            )
        self.world_size = pool.world_size
        self.name = name
        self._threads = threads
        self._deadlines = deadlines
        self._liveness_deadline_s = liveness_deadline_s
        self._processes: tuple[WorkerProcess, ...] = ()
        self._actors: list[ActorHandle] = []
        self._reservation: Reservation | None = acquire_reservation(pool, start_deadline_s)
        try:
            self._start(pool, cls_with_init, start_deadline_s, worker_env)
        except BaseException:
            self.shutdown()
            raise

    def _start(
        self,
        pool: ResourcePool,
        cls_with_init: ClassWithInitArgs,
        deadline_s: float,
        env: Mapping[str, str],
    ) -> None:
        local_sizes = pool.local_world_size_list()
        thread_counts = [self._threads or thread_count(size) for size in local_sizes]
        self._actors = self._make_actors(pool, cls_with_init, thread_counts, env)
        wait = RefWait(self.name, "start", (), deadline_s, START_ADVICE)
        refs = [actor.start_info.remote(rank) for rank, actor in enumerate(self._actors)]
        self._processes, free_ports = zip(*wait(refs), strict=True)
        watch_workers(self.name, self._processes, self._liveness_deadline_s)
        is_one_node = len({process.node_id for process in self._processes}) == 1
        master_addr = LOOPBACK if is_one_node else self._processes[0].node_ip
        build_refs = []
        for rank, actor in enumerate(self._actors):
            placement = Placement(
                rank=rank,
                world_size=self.world_size,
                # Ray makes only one GPU visible to each process; its index is 0.
                local_rank=0 if pool.use_gpu else pool.local_rank_list()[rank],
                local_world_size=local_sizes[rank],
                master_addr=master_addr,
                master_port=free_ports[0],
                role=self.name,
            )
            build_refs.append(actor.build.remote(cls_with_init, placement, thread_counts[rank]))
        RefWait(self.name, "__init__", self._processes, deadline_s, START_ADVICE)(build_refs)

    def _make_actors(
        self,
        pool: ResourcePool,
        cls_with_init: ClassWithInitArgs,
        thread_counts: list[int],
        env: Mapping[str, str],
    ) -> list[ActorHandle]:
        assert self._reservation is not None
        # Each actor takes its share of a CPU and of a GPU; Ray's resolution is 1/10,000.
        share = int(10_000 / pool.max_colocate_count) / 10_000
        actor_class = ray.remote(_WorkerActor)
        actors = []
        for rank, threads in enumerate(thread_counts):
            thread_env = {name: str(threads) for name in (THREADS_ENV, "MKL_NUM_THREADS")}
            options = {
                "num_cpus": share,
                "num_gpus": share if pool.use_gpu else 0,
                "max_restarts": 0,
                "runtime_env": {"env_vars": {**thread_env, **level_variables(), **env}},
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    self._reservation.group, placement_group_bundle_index=rank
                ),
                **getattr(cls_with_init, "options", {}),
            }
            actors.append(actor_class.options(**options).remote(list(sys.path), os.getcwd()))
        return actors

    def submit(self, rank: int, call: Call) -> ray.ObjectRef:
        if not self._actors:
            raise RuntimeError(f"worker group {self.name!r} was shut down; create a new one")
        try:
            return self._actors[rank].call.remote(call)
        except TypeError as error:
            for name, value in (*enumerate(call.args), *call.kwargs.items()):
                try:
                    cloudpickle.dumps(value)
                except Exception as reason:
                    raise TypeError(
                        f"argument {name!r} of {call.role or self.name}.{call.method} cannot be sent to "
                        f"another process: {reason}; create it in the worker"
                    ) from error
            raise

    def resolver(self, role: str, method: str) -> RefWait:
        deadlines = self._deadlines
        deadline_s, advice = deadlines.limit_s(method), deadlines.advice(method)
        return RefWait(role, method, self._processes, deadline_s, advice, deadlines.record)

    def shutdown(self) -> None:
        actors, self._actors = self._actors, []
        if ray.is_initialized() and not cluster_failed():
            close_refs = [actor.close.remote() for actor in actors if self._processes]
            if close_refs:
                ray.wait(close_refs, num_returns=len(close_refs), timeout=CLOSE_DEADLINE_S)
            unwatch_workers(self._processes)
            for actor in actors:
                ray.kill(actor, no_restart=True)
            if self._reservation is not None:
                self._reservation.release()
        self._reservation = None


class RayWorkerGroup(WorkerGroup[W]):
    """A worker group whose ranks are Ray actors."""

    def __init__(
        self,
        resource_pool: ResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        name_prefix: str = "",
        start_deadline_s: float = START_DEADLINE_S,
        deadlines: PhaseDeadlines | None = None,
        liveness_deadline_s: float = TrainerConfig.liveness_deadline_s,
        worker_env: Mapping[str, str] | None = None,
        threads: int | None = None,
    ) -> None:
        """Starts the ranks; `threads` is the number per process, by default a share of the cores."""
        if ray_cls_with_init is None:
            raise ValueError("ray_cls_with_init is missing: ClassWithInitArgs(YourWorker, …)")
        start_ray({})
        # The trainer process computes with the same number of threads as under the local controller.
        set_thread_count(threads or thread_count())
        name = name_prefix or ray_cls_with_init.name
        executor = RayExecutor(
            resource_pool or ResourcePool([1]),
            ray_cls_with_init,
            name,
            start_deadline_s,
            deadlines or PhaseDeadlines(_DEADLINE_FLOOR_S, _DEADLINE_FACTOR),
            liveness_deadline_s,
            worker_env or {},
            threads,
        )
        super().__init__(executor, ray_cls_with_init, name)


def ray_task(function: Callable[P, T]) -> Any:
    """Returns a Ray task: `task.remote(…)` runs the function in another process, on one core."""
    return ray.remote(num_cpus=1)(function)


def parallel_put(data_list: Sequence[T], max_workers: int | None = None) -> list[ray.ObjectRef[T]]:
    """Puts values into Ray's object store from several threads; returns references in order."""
    if not data_list:
        raise AssertionError("parallel_put got an empty list; there is nothing to put")
    with ThreadPoolExecutor(max_workers or min(len(data_list), 16)) as executor:
        return list(executor.map(ray.put, data_list))
