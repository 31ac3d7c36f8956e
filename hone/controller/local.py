"""LocalWorkerGroup: one rank, in this process. The embedded default; ray is not needed.

Calls run at once, in order. Leaves out overlap: a future from here is finished when you get it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hone.controller.class_with_init_args import ClassWithInitArgs
from hone.controller.crew import Call, Crew
from hone.controller.host import WorkerHost
from hone.controller.phase_deadlines import PhaseDeadlines
from hone.controller.resource_pool import ResourcePool
from hone.controller.threads import thread_count
from hone.controller.worker import Placement
from hone.controller.worker_group import W, WorkerGroup


@dataclass
class Done:
    """A finished call: its result, or what it raised, kept until someone asks."""

    result: Any = None
    error: BaseException | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


class LocalCrew(Crew[Done]):
    """One rank in this process."""

    world_size = 1

    def __init__(self, made_of: ClassWithInitArgs, role: str, threads: int) -> None:
        self._host: WorkerHost | None = WorkerHost(made_of, Placement(role=role), threads)
        self._role = role

    @property
    def host(self) -> WorkerHost:
        if self._host is None:
            raise RuntimeError(f"worker group {self._role!r} was shut down; make a new one")
        return self._host

    def submit(self, rank: int, call: Call) -> Done:
        host = self.host
        try:
            return Done(host.call(call))
        except Exception as error:  # raised again by whoever waits, as under every controller
            return Done(error=error)

    def resolver(self, owner: str, method: str) -> Callable[[Sequence[Done]], list[Any]]:
        return finished

    def shutdown(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.close()


class LocalWorkerGroup(WorkerGroup[W]):
    """A worker group of one rank, in this process."""

    def __init__(
        self,
        resource_pool: ResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        name_prefix: str = "",
        start_deadline_s: float | None = None,
        deadlines: PhaseDeadlines | None = None,
        liveness_deadline_s: float | None = None,
        threads: int | None = None,
    ) -> None:
        """Made like a Ray group; the deadlines are moot, as nothing is waited for here."""
        if ray_cls_with_init is None:
            raise ValueError("ray_cls_with_init is missing: ClassWithInitArgs(YourWorker, …)")
        if resource_pool is not None and resource_pool.world_size != 1:
            raise ValueError(
                f"the local controller has 1 rank and the resource pool asks for "
                f"{resource_pool.world_size}; set trainer.controller=ray, or "
                "trainer.n_gpus_per_node=1 trainer.nnodes=1"
            )
        name = name_prefix or ray_cls_with_init.name
        crew = LocalCrew(ray_cls_with_init, name, threads or thread_count())
        super().__init__(crew, ray_cls_with_init, name)


def finished(handles: Sequence[Done]) -> list[Any]:
    """The results of finished calls, or the first error."""
    return [handle.get() for handle in handles]
