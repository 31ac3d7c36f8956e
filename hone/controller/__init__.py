"""The single controller: one training loop drives workers in many processes.

Ray is imported when one of its names is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hone.controller.colocated import (
    ClassWithInitArgs,
    FusedWorker,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
)
from hone.controller.contract import Execute
from hone.controller.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from hone.controller.resource_pool import (
    ResourcePool,
    ResourcePoolManager,
    Role,
    merge_resource_pool,
    split_resource_pool,
)
from hone.controller.worker import Worker
from hone.controller.worker_group import LocalWorkerGroup, WorkerGroup

if TYPE_CHECKING:
    from hone.controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

_RAY_NAMES = {"RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup"}

__all__ = [
    "ClassWithInitArgs",
    "Dispatch",
    "Execute",
    "FusedWorker",
    "LocalWorkerGroup",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "Role",
    "Worker",
    "WorkerGroup",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "register",
    "register_dispatch_mode",
    "split_resource_pool",
    "update_dispatch_mode",
]


def __getattr__(name: str) -> type:
    if name in _RAY_NAMES:
        return getattr(importlib.import_module("hone.controller.ray"), name)
    raise AttributeError(f"module 'hone.controller' has no attribute {name!r}")
