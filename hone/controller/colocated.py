"""Worker classes with their arguments, and the colocation of several roles in one process."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, ParamSpec, TypeVar

from hone.controller.worker import Worker

K = TypeVar("K", bound=Hashable)  # a role, or its name
P = ParamSpec("P")
W = TypeVar("W")


class ClassWithInitArgs:
    """A class and its arguments, to be instantiated later in another process."""

    def __init__(self, cls: Callable[P, W], *args: P.args, **kwargs: P.kwargs) -> None:
        self.cls = unwrap_ray_class(cls)
        self.args = args
        self.kwargs = kwargs
        self.members: Mapping[str, ClassWithInitArgs] = {}
        """The member class of each role, in a colocated class or a fused worker; else empty."""
        if issubclass(self.cls, FusedWorker):
            self.members = self.cls.members

    def __call__(self) -> Any:
        """Instantiates the class in this process."""
        return self.cls(*self.args, **self.kwargs)

    @property
    def name(self) -> str:
        return str(self.cls.__name__)


class ColocatedClass(ClassWithInitArgs):
    """Several roles that share one process per rank."""

    def __init__(self, members: Mapping[str, ClassWithInitArgs]) -> None:
        if not members:
            raise ValueError("no role to colocate; give at least one")
        if any(isinstance(member, ColocatedClass) for member in members.values()):
            raise ValueError("a colocated class cannot be a role of another colocated class")
        # `dict` is a placeholder: worker_group.build_host instantiates only the members, on each rank.
        super().__init__(dict)
        self.members = dict(members)

    @property
    def name(self) -> str:
        return "+".join(self.members)


def unwrap_ray_class(cls: Callable[P, W]) -> type:
    """Returns the class, unwrapped if it was decorated with `ray.remote`."""
    ray_metadata = getattr(cls, "__ray_metadata__", None)
    unwrapped = ray_metadata.modified_class if ray_metadata is not None else cls
    if not isinstance(unwrapped, type):
        raise TypeError(f"a worker is created from a class, not from {cls!r}")
    return unwrapped


def create_colocated_worker_cls(class_dict: Mapping[K, ClassWithInitArgs]) -> ColocatedClass:
    """Combines the classes of roles into one, for a worker group that runs all roles in the same processes.

    `spawn(roles)` of that worker group returns a worker group per role.
    """
    return ColocatedClass({str(role): member for role, member in class_dict.items()})


create_colocated_worker_cls_fused = create_colocated_worker_cls
"""verl has two ways to share a process; both names mean the same here."""


class FusedWorker(Worker):
    """A worker whose attributes are other workers, for use in its methods."""

    members: ClassVar[Mapping[str, ClassWithInitArgs]] = {}

    def __init__(self) -> None:
        self.fused_worker_dict = {role: member() for role, member in self.members.items()}
        vars(self).update(self.fused_worker_dict)
        for worker in self.fused_worker_dict.values():
            worker.set_colocated(self.fused_worker_dict)


def create_colocated_worker_raw_cls(
    class_dict: Mapping[K, ClassWithInitArgs],
) -> type[FusedWorker]:
    """Returns a base class whose instances have each role's worker as attribute; see `WorkerGroup.fuse`."""
    members = {str(role): member for role, member in class_dict.items()}
    return type("FusedWorker", (FusedWorker,), {"members": members})
