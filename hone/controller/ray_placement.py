"""Reserves the processes of resource pools on the nodes of a Ray cluster.

A pool is one placement group; each bundle names its node. Ray lists a lost node as alive
for about 12 s, so a placement group that is not placed within PLACEMENT_DEADLINE_S is created again.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from hone.controller.failures import ClusterFailed, WaitTimeout, join_words
from hone.controller.ray_liveness import (
    call_control_plane,
    check_alive,
    lost_node_ids,
    raylet_problem,
)
from hone.controller.resource_pool import FreeResources, ResourcePool, place
from hone.launch.ray_private import available_resources_per_node

logger = logging.getLogger(__name__)

PLACEMENT_DEADLINE_S = 15.0
GIB = 2**30
_AWAITED = "the reservation of its processes"
"""What a pool waits for here, in the messages of failures."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster with its resources."""

    node_id: str
    ip: str
    free_resources: Mapping[str, float]
    total_resources: Mapping[str, float]

    def __str__(self) -> str:
        parts = [
            f"{self.free_resources.get(kind, 0):g} of {self.total_resources.get(kind, 0):g} {kind}s"
            for kind in ("CPU", "GPU")
        ]
        free_gib = self.free_resources.get("memory", 0) / GIB
        total_gib = self.total_resources.get("memory", 0) / GIB
        parts.append(f"{free_gib:.1f} of {total_gib:.1f} GiB memory")
        return f"{self.ip} ({self.node_id[:8]}): {join_words(parts)}"


def live_nodes() -> list[Node]:
    """Returns the nodes that Ray lists as alive and that are not lost, the local node first."""
    local_node_id = ray.get_runtime_context().get_node_id()
    entries, free_by_id = call_control_plane(lambda: (ray.nodes(), available_resources_per_node()))
    nodes = [
        Node(
            entry["NodeID"],
            entry["NodeManagerAddress"],
            free_by_id.get(entry["NodeID"], {}),
            entry["Resources"],
        )
        for entry in entries
        if entry["Alive"] and entry["NodeID"] not in lost_node_ids
    ]
    return sorted(nodes, key=lambda node: (node.node_id != local_node_id, node.node_id))


def reachable_nodes() -> list[Node]:
    """Returns the live nodes whose raylets accept connections now."""
    nodes = live_nodes()
    with ThreadPoolExecutor(max(1, min(len(nodes), 64))) as executor:
        problems = list(executor.map(lambda node: raylet_problem(node.node_id), nodes))
    return [node for node, problem in zip(nodes, problems, strict=True) if problem is None]


def resources_by_node(nodes: Sequence[Node], *, total: bool = False) -> FreeResources:
    """Returns the free resources by node, or with `total` all resources, for `place`."""
    return {
        node.node_id: dict(node.total_resources if total else node.free_resources) for node in nodes
    }


def check_pools_fit(pools: Sequence[ResourcePool]) -> None:
    """Raises ValueError if the nodes are too small for the pools, even with all resources free."""
    nodes = live_nodes()
    remaining = resources_by_node(nodes, total=True)
    for pool in pools:
        if place(pool, remaining) is None:
            verb = "does" if len(pools) == 1 else "do"
            raise ValueError(
                f"{join_words([str(pool) for pool in pools])} {verb} not fit this Ray cluster: "
                f"{_format_nodes(nodes)} are free; lower trainer.n_gpus_per_node or trainer.nnodes"
            )


class Reservation:
    """The placement group of one pool; all worker groups of the pool share it."""

    def __init__(self, pool: ResourcePool, deadline_s: float) -> None:
        self._num_worker_groups = 0
        self._pool = pool
        check_pools_fit([pool])
        self.group = self._reserve(deadline_s)

    def _reserve(self, deadline_s: float) -> PlacementGroup:
        end_time = time.monotonic() + deadline_s
        has_warned = False
        while True:
            nodes = live_nodes()
            node_ids = place(self._pool, resources_by_node(nodes))
            if node_ids is not None:
                group = self._create_group(node_ids, end_time)
                if group is not None:
                    return group
            total_resources = resources_by_node(nodes, total=True)
            if place(self._pool, total_resources) is None:  # it fitted in `check_pools_fit`
                event = f"a node was lost, and {self._pool} does not fit on the remaining nodes"
                hint = f"free are {_format_nodes(nodes)}"
                raise ClusterFailed(event, self._pool.name_prefix, _AWAITED, hint)
            free = f"free are {_format_nodes(nodes)}"
            if not has_warned:
                logger.warning("%s waits for resources; %s", self._pool, free)
                has_warned = True
            if time.monotonic() > end_time:
                awaited = f"Ray to reserve {self._pool.process_on_nodes} processes"
                hint = f"other worker groups or runs hold resources; {free}"
                raise WaitTimeout(self._pool.name_prefix, awaited, deadline_s, hint)
            check_alive(self._pool.name_prefix, _AWAITED)
            time.sleep(0.5)

    def _create_group(self, node_ids: list[str], end_time: float) -> PlacementGroup | None:
        """Returns a placement group with one bundle per rank, or None if Ray does not place it."""
        bundles = [dict(self._pool.bundle) for _ in node_ids]
        selectors = [{"ray.io/node-id": node_id} for node_id in node_ids]
        group = placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)
        placement_end_time = min(end_time, time.monotonic() + PLACEMENT_DEADLINE_S)
        try:
            while not group.wait(timeout_seconds=1):
                check_alive(self._pool.name_prefix, _AWAITED)
                if time.monotonic() > placement_end_time:
                    remove_placement_group(group)
                    return None
        except BaseException:
            remove_placement_group(group)
            raise
        return group

    def acquire(self) -> None:
        """Counts one more worker group on these processes."""
        if self._num_worker_groups >= self._pool.max_colocate_count:
            raise ValueError(
                f"{self._pool} is already shared by {self._num_worker_groups} worker groups; raise its "
                "max_colocate_count, or colocate roles with create_colocated_worker_cls"
            )
        self._num_worker_groups += 1

    def release(self) -> None:
        """Counts one worker group less; removes the placement group after the last one."""
        self._num_worker_groups -= 1
        if self._num_worker_groups == 0:
            remove_placement_group(self.group)
            _reservations.pop(self._pool, None)


_reservations: weakref.WeakKeyDictionary[ResourcePool, Reservation] = weakref.WeakKeyDictionary()


def acquire_reservation(pool: ResourcePool, deadline_s: float) -> Reservation:
    """Counts a worker group on the pool's reservation; creates the reservation for the first."""
    reservation = _reservations.get(pool)
    if reservation is None:
        reservation = _reservations[pool] = Reservation(pool, deadline_s)
    reservation.acquire()
    return reservation


def _format_nodes(nodes: Sequence[Node]) -> str:
    return "; ".join(str(node) for node in nodes) or "no nodes"
