"""Worker, the base class of the code on one rank, and Placement, its position in its worker group.

A worker class marks methods with `@register`; its worker group calls them.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from hone.controller import profiling
from hone.controller.contract import DEFAULT_MESH
from hone.controller.decorator import Dispatch, register
from hone.launch.free_ports import free_ports

LOOPBACK = "127.0.0.1"
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Placement:
    """The position of a worker among the ranks of its worker group."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = LOOPBACK
    master_port: int = 0
    role: str = "worker"

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of torch.distributed and of verl's workers."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "RAY_LOCAL_RANK": str(self.local_rank),
            "RAY_LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Placement:
        """Returns the placement that a launcher such as torchrun has set; the default is rank 0 of 1."""
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return cls()
        return cls(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", 0)),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", 1)),
            master_addr=environment.get("MASTER_ADDR", LOOPBACK),
            master_port=int(environment.get("MASTER_PORT", 0)),
        )


_current_placement: contextvars.ContextVar[Placement | None] = contextvars.ContextVar(
    "placement", default=None
)


@contextlib.contextmanager
def use_placement(placement: Placement) -> Iterator[None]:
    """Sets the placement of workers that are created inside the block."""
    token = _current_placement.set(placement)
    try:
        yield
    finally:
        _current_placement.reset(token)


class Worker:
    """Base class of all workers of a worker group."""

    takes_role: ClassVar[bool] = False
    """Whether the constructor has an argument `role`, the name of the worker's role."""
    _placement: Placement
    _meshes: dict[str, tuple[int, bool]]
    """The slot of this rank on each mesh, and whether its results are collected."""
    _colocated: Mapping[str, Worker]

    def __new__(cls, *args: Any, **kwargs: Any) -> Worker:
        # A subclass may read its rank before it calls super().__init__().
        worker = super().__new__(cls)
        worker._placement = _current_placement.get() or Placement.from_environment(os.environ)
        worker._meshes = {}
        worker._colocated = {}
        return worker

    @property
    def rank(self) -> int:
        return self._placement.rank

    @property
    def world_size(self) -> int:
        return self._placement.world_size

    @property
    def local_rank(self) -> int:
        return self._placement.local_rank

    @property
    def local_world_size(self) -> int:
        return self._placement.local_world_size

    @property
    def role(self) -> str:
        return self._placement.role

    @property
    def colocated(self) -> Mapping[str, Worker]:
        """All workers of this process by role, including this one."""
        return self._colocated

    def set_colocated(self, workers: Mapping[str, Worker]) -> None:
        """Sets the workers that share this process."""
        self._colocated = workers

    def get_master_addr_port(self) -> tuple[str, int]:
        """Returns the address and port of rank 0, for torch.distributed."""
        return self._placement.master_addr, self._placement.master_port

    def register_mesh(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Registers this rank's slot on a named mesh, and whether its results are collected."""
        registered = self._meshes.get(mesh_name)
        if registered is not None and registered != (dp_rank, is_collect):
            raise ValueError(
                f"rank {self.rank} is already registered as {registered} on mesh {mesh_name!r}; it "
                f"cannot change to {(dp_rank, is_collect)}, because batches may have been split by this "
                "mesh: call register_mesh before the first call"
            )
        if dp_rank < 0:
            raise ValueError(f"data-parallel rank {dp_rank} on mesh {mesh_name!r} is negative")
        self._meshes[mesh_name] = (dp_rank, is_collect)

    _register_dispatch_collect_info = register_mesh

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mesh_slot(self, mesh_name: str) -> tuple[int, bool]:
        """Returns this rank's slot on a mesh, and whether its results are collected."""
        if mesh_name == DEFAULT_MESH:  # by default every rank is one slot
            self._meshes.setdefault(mesh_name, (self.rank, True))
        if mesh_name not in self._meshes:
            raise ValueError(
                f"rank {self.rank} is not registered on mesh {mesh_name!r}, only on "
                f"{sorted(self._meshes)}; call register_mesh in the worker before the first call"
            )
        return self._meshes[mesh_name]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(
        self, tool: str, step: int, role: str, ranks: Sequence[int] | None = None
    ) -> None:
        """Starts to profile this process with `tool`, if its rank is one of `ranks`."""
        if ranks is None or self.rank in ranks:
            profiling.start(tool, step, role)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self, folder: str) -> None:
        """Stops profiling and writes the profile."""
        profiling.stop(folder, self.rank)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(
        self, func: Callable[Concatenate[Worker, _P], _R], *args: _P.args, **kwargs: _P.kwargs
    ) -> _R:
        """Runs `func(worker, …)` on each rank's part of the batch."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def execute_func_rank_zero(
        self, func: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
    ) -> _R:
        """Runs `func(…)` on rank 0."""
        return func(*args, **kwargs)


def free_port() -> int:
    """Returns a free port outside the ephemeral range."""
    return free_ports(1)[0]
