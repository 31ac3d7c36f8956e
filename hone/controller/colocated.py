"""Several roles in one process a rank: they share the device and need no transport between them.

Leaves out time-sharing of memory: workers offload what they do not use.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import ClassVar, TypeVar

from hone.controller.class_with_init_args import ClassWithInitArgs, ColocatedClass
from hone.controller.worker import Worker

K = TypeVar("K", bound=Hashable)  # a role, or its name


def create_colocated_worker_cls(class_dict: Mapping[K, ClassWithInitArgs]) -> ColocatedClass:
    """Roles by name, to be started as one group; `group.spawn(roles)` gives a group for each."""
    return ColocatedClass({str(role): made_of for role, made_of in class_dict.items()})


create_colocated_worker_cls_fused = create_colocated_worker_cls
"""verl has two ways to share a process; here there is one, under both names."""


class FusedWorker(Worker):
    """One worker that holds others as attributes, for methods that use several of them."""

    members: ClassVar[Mapping[str, ClassWithInitArgs]] = {}

    def __init__(self) -> None:
        self.fused_worker_dict = {role: member() for role, member in self.members.items()}
        vars(self).update(self.fused_worker_dict)
        for worker in self.fused_worker_dict.values():
            worker.colocate(self.fused_worker_dict)


def create_colocated_worker_raw_cls(
    class_dict: Mapping[K, ClassWithInitArgs],
) -> type[FusedWorker]:
    """A base class whose workers hold one worker per role; `group.fuse(roles)` calls them directly."""
    members = {str(role): made_of for role, made_of in class_dict.items()}
    return type("FusedWorker", (FusedWorker,), {"members": members})


def fused_members(made_of: ClassWithInitArgs) -> Mapping[str, ClassWithInitArgs]:
    """The roles that a fused worker's class holds; none for any other class."""
    return made_of.cls.members if issubclass(made_of.cls, FusedWorker) else {}
