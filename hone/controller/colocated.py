"""Several roles in one process a rank: they share the device and need no transport between them.

Leaves out time-sharing of memory: workers offload what they do not use.
"""

from __future__ import annotations

from collections.abc import Mapping

from hone.controller.class_with_init_args import ClassWithInitArgs, ColocatedClass
from hone.controller.resource_pool import Role


def create_colocated_worker_cls(
    class_dict: Mapping[str, ClassWithInitArgs] | Mapping[Role, ClassWithInitArgs],
) -> ColocatedClass:
    """Roles by name, to be started as one group; `group.spawn(roles)` gives a group for each."""
    return ColocatedClass({str(role): made_of for role, made_of in class_dict.items()})


create_colocated_worker_cls_fused = create_colocated_worker_cls
"""The family has two ways to share a process; here there is one, under both names."""
