"""Resource pools, and the pool of each role.

A pool has a number of processes on each of several nodes. The Ray controller reserves it as a
placement group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TypeAlias

FreeResources: TypeAlias = dict[str, dict[str, float]]
"""Amount of each free resource ("CPU", "GPU") by node."""


class Role(Enum):
    """The role of a worker in the training loop."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    ActorRolloutRef = "actor_rollout_ref"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"
    ProcessRewardModel = "prm"
    Env = "env"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def from_string(cls, name: str) -> Role:
        """Returns the role with this value ("critic") or member name ("Critic")."""
        for role in cls:
            if name in (role.value, role.name):
                return role
        raise ValueError(f"no role {name!r}; there are {[role.value for role in cls]}")


class ResourcePool:
    """A pool with `process_on_nodes[i]` processes on node i; ranks are numbered node by node."""

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = False,
        name_prefix: str = "pool",
        max_colocate_count: int = 10,
        spread: bool = True,
    ) -> None:
        counts = [int(count) for count in process_on_nodes]
        if not counts or min(counts) < 1:
            raise ValueError(
                f"process_on_nodes={counts}: give each node at least one process, as in [1] or [8, 8]"
            )
        if max_colocate_count < 1:
            raise ValueError(f"max_colocate_count={max_colocate_count}: use at least 1")
        self.process_on_nodes = counts
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix
        self.max_colocate_count = max_colocate_count
        """The number of worker groups that may share each process slot of this pool."""
        self.spread = spread
        """Whether the nodes of this pool must be different machines."""

    @property
    def bundle(self) -> dict[str, float]:
        """The Ray resources of one process."""
        return {"CPU": 1.0, **({"GPU": 1.0} if self.use_gpu else {})}

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    @property
    def store(self) -> list[int]:
        """The number of processes of each node, under verl's name."""
        return list(self.process_on_nodes)

    def local_world_size_list(self) -> list[int]:
        """Returns the number of ranks on the node of each rank."""
        return [count for count in self.process_on_nodes for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """Returns the local rank of each rank."""
        return [local for count in self.process_on_nodes for local in range(count)]

    def __repr__(self) -> str:
        kind = "GPU" if self.use_gpu else "CPU"
        return (
            f"{type(self).__name__}({self.name_prefix!r}, {self.process_on_nodes} {kind} processes)"
        )


def place(pool: ResourcePool, free: FreeResources) -> list[str] | None:
    """Returns each rank's node, or None if the pool does not fit; subtracts its resources from `free`."""
    counts = pool.process_on_nodes
    nodes: dict[int, str] = {}  # by index in `process_on_nodes`
    for index in sorted(range(len(counts)), key=counts.__getitem__, reverse=True):
        capacity = {  # in processes
            name: min(int(resources.get(kind, 0.0)) for kind in pool.bundle)
            for name, resources in free.items()
            if not (pool.spread and name in nodes.values())
        }
        candidates = [name for name in capacity if capacity[name] >= counts[index]]
        if not candidates:
            return None
        nodes[index] = min(candidates, key=capacity.__getitem__)
        for kind in pool.bundle:
            free[nodes[index]][kind] -= counts[index]
    return [nodes[index] for index, count in enumerate(counts) for _ in range(count)]


class ResourcePoolManager:
    """Creates the pools and returns the pool of each role."""

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[Role, str],
        use_gpu: bool = False,
        max_colocate_count: int = 10,
    ) -> None:
        unknown = {
            str(role): name for role, name in mapping.items() if name not in resource_pool_spec
        }
        if unknown:
            raise ValueError(
                f"roles mapped to pools that do not exist: {unknown}; pools are "
                f"{sorted(resource_pool_spec)}"
            )
        self.resource_pool_spec = {name: list(nodes) for name, nodes in resource_pool_spec.items()}
        self.mapping = dict(mapping)
        self.use_gpu = use_gpu
        self.max_colocate_count = max_colocate_count
        self.resource_pool_dict: dict[str, ResourcePool] = {}

    def create_resource_pool(self) -> dict[str, ResourcePool]:
        """Creates all pools; a second call returns the same pools."""
        for name, nodes in self.resource_pool_spec.items():
            if name not in self.resource_pool_dict:
                self.resource_pool_dict[name] = ResourcePool(
                    nodes,
                    use_gpu=self.use_gpu,
                    name_prefix=name,
                    max_colocate_count=self.max_colocate_count,
                )
        return self.resource_pool_dict

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """Returns the pool of this role."""
        if role not in self.mapping:
            roles = sorted(map(str, self.mapping))
            raise ValueError(f"role {str(role)!r} has no pool; the mapping has {roles}")
        return self.create_resource_pool()[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Returns the number of processes of all pools; each has one GPU if GPUs are used."""
        return sum(sum(nodes) for nodes in self.resource_pool_spec.values())


def split_resource_pool(pool: ResourcePool, sizes: Sequence[int]) -> list[ResourcePool]:
    """Splits a pool into pools of `sizes` processes, in rank order."""
    if sum(sizes) != pool.world_size or any(size < 1 for size in sizes):
        raise ValueError(
            f"the sizes {list(sizes)} do not add up to the {pool.world_size} processes of {pool}"
        )
    nodes = [node for node, count in enumerate(pool.process_on_nodes) for _ in range(count)]
    pools: list[ResourcePool] = []
    start = 0
    for index, size in enumerate(sizes):
        counts = list(Counter(nodes[start : start + size]).values())
        pools.append(_pool_like(pool, counts, f"{pool.name_prefix}_{index}"))
        start += size
    return pools


def merge_resource_pool(first: ResourcePool, second: ResourcePool) -> ResourcePool:
    """Returns one pool with the nodes of both."""
    if (first.use_gpu, first.max_colocate_count) != (second.use_gpu, second.max_colocate_count):
        raise ValueError(
            f"{first} and {second} differ in use_gpu or max_colocate_count; they cannot be merged"
        )
    counts = [*first.process_on_nodes, *second.process_on_nodes]
    merged = _pool_like(first, counts, f"{first.name_prefix}_{second.name_prefix}")
    merged.spread = False  # both pools may have processes on the same node
    return merged


def _pool_like(pool: ResourcePool, counts: list[int], name: str) -> ResourcePool:
    return type(pool)(counts, pool.use_gpu, name, pool.max_colocate_count, pool.spread)
