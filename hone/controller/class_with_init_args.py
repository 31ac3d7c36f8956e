"""A worker's class with the arguments it will be made with, on whichever rank that happens.

Leaves out making it: a worker's host does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
W = TypeVar("W")


class ClassWithInitArgs:
    """`cls(*args, **kwargs)`, later and elsewhere."""

    def __init__(self, cls: Callable[P, W], *args: P.args, **kwargs: P.kwargs) -> None:
        self.cls = plain_class(cls)
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        """Make one here."""
        return self.cls(*self.args, **self.kwargs)

    @property
    def name(self) -> str:
        return str(self.cls.__name__)


class ColocatedClass(ClassWithInitArgs):
    """Several roles that share one process a rank."""

    def __init__(self, members: dict[str, ClassWithInitArgs]) -> None:
        if not members:
            raise ValueError("no role to colocate; give at least one")
        self.members = {str(role): member for role, member in members.items()}
        if any(isinstance(member, ColocatedClass) for member in members.values()):
            raise ValueError("a colocated class cannot be a role of another")
        super().__init__(dict)

    @property
    def name(self) -> str:
        return "+".join(self.members)


def plain_class(cls: Callable[P, W]) -> type:
    """The class itself, also where it went through `ray.remote`."""
    remote = getattr(cls, "__ray_metadata__", None)
    found = remote.modified_class if remote is not None else cls
    if not isinstance(found, type):
        raise TypeError(f"a worker is made from a class, not from {cls!r}")
    return found
