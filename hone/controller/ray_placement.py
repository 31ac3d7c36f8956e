"""Reserves the processes of resource pools on the nodes of a Ray cluster.

A pool is one placement group, whose bundles name their nodes: it is reserved as a whole or not at all. Ray
lists a lost node as alive for some 12 s, so a group that is not placed soon is placed anew.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from hone.controller.failures import ClusterFailed, WaitTimeout, joined
from hone.controller.ray_liveness import answer_of, look, lost_nodes, raylet_problem
from hone.controller.resource_pool import Free, ResourcePool, place

logger = logging.getLogger(__name__)

PLACED_WITHIN_S = 15.0
GIB = 2**30


@dataclass(frozen=True)
class Node:
    """A node of the cluster with its resources."""

    node_id: str
    ip: str
    free: Mapping[str, float]
    total: Mapping[str, float]

    def __str__(self) -> str:
        parts = [
            f"{self.free.get(kind, 0):g} of {self.total.get(kind, 0):g} {kind}s"
            for kind in ("CPU", "GPU")
        ]
        memory = [each.get("memory", 0) / GIB for each in (self.free, self.total)]
        parts.append(f"{memory[0]:.1f} of {memory[1]:.1f} GiB memory")
        return f"{self.ip} ({self.node_id[:8]}): {joined(parts)}"


def live_nodes() -> list[Node]:
    """Returns the nodes that Ray calls alive and that this process has not seen lost, its own node first."""
    here, lost = ray.get_runtime_context().get_node_id(), lost_nodes()
    entries, free = answer_of(lambda: (ray.nodes(), available_resources_per_node()))
    nodes = [
        Node(id_, entry["NodeManagerAddress"], free.get(id_, {}), entry["Resources"])
        for entry in entries
        if entry["Alive"] and (id_ := entry["NodeID"]) not in lost
    ]
    return sorted(nodes, key=lambda node: (node.node_id != here, node.node_id))


def answering_nodes() -> list[Node]:
    """Returns the live nodes whose raylets accept connections now."""
    nodes = live_nodes()
    with ThreadPoolExecutor(max(1, min(len(nodes), 64))) as threads:
        problems = list(threads.map(lambda node: raylet_problem(node.node_id), nodes))
    return [node for node, problem in zip(nodes, problems, strict=True) if problem is None]


def free_of(nodes: Sequence[Node], *, total: bool = False) -> Free:
    """Returns the free resources (or all) by node, for `place`."""
    return {node.node_id: dict(node.total if total else node.free) for node in nodes}


def require_room(pools: Sequence[ResourcePool]) -> None:
    """Raises unless the nodes have the devices that the pools need together, free or not."""
    nodes = live_nodes()
    free = free_of(nodes, total=True)
    for pool in pools:
        if place(pool, free) is None:
            together = joined([str(each) for each in pools])
            raise ValueError(
                f"{together} {'do' if len(pools) > 1 else 'does'} not fit this Ray cluster: "
                f"{_listed(nodes)} are free; set trainer.n_gpus_per_node and trainer.nnodes to what "
                "there is"
            )


class Reservation:
    """The placement group of one pool; all worker groups of the pool share it."""

    def __init__(self, pool: ResourcePool, deadline_s: float) -> None:
        self._users = 0
        self._pool = pool
        require_room([pool])
        self.group = self._reserved(deadline_s)

    def _reserved(self, deadline_s: float) -> PlacementGroup:
        end_time = time.monotonic() + deadline_s
        has_waited = False
        while True:
            nodes = live_nodes()
            homes = place(self._pool, free_of(nodes))
            if homes is not None and (group := self._placed(homes, end_time)) is not None:
                return group
            if place(self._pool, free_of(nodes, total=True)) is None:  # there was room before
                raise ClusterFailed(
                    f"a node was lost, and those that are left have no room for {self._pool}",
                    self._pool.name_prefix,
                    "its reservation",
                    f"free are {_listed(nodes)}",
                )
            if time.monotonic() > end_time:
                raise WaitTimeout(
                    self._pool.name_prefix,
                    f"Ray to reserve {self._pool.process_on_nodes} processes",
                    deadline_s,
                    f"free are {_listed(nodes)}: other worker groups or another run hold the rest",
                )
            if not has_waited:
                logger.warning("%s waits for resources; free are %s", self._pool, _listed(nodes))
                has_waited = True
            look(self._pool.name_prefix, "its reservation")
            time.sleep(0.5)

    def _placed(self, homes: list[str], end_time: float) -> PlacementGroup | None:
        """Returns a group with one bundle per rank on these nodes, or None if Ray does not place it soon."""
        bundles = [dict(self._pool.bundle) for _ in homes]
        on_nodes = [{"ray.io/node-id": home} for home in homes]
        group = placement_group(bundles, strategy="PACK", bundle_label_selector=on_nodes)
        soon = min(end_time, time.monotonic() + PLACED_WITHIN_S)
        try:
            while not group.wait(timeout_seconds=1):
                look(self._pool.name_prefix, "its reservation")
                if time.monotonic() > soon:
                    remove_placement_group(group)
                    return None
        except BaseException:
            remove_placement_group(group)
            raise
        return group

    def take(self) -> None:
        if self._users >= self._pool.max_colocate_count:
            raise ValueError(
                f"{self._pool} is shared by {self._users} worker groups already; give it a larger "
                "max_colocate_count, or colocate roles with create_colocated_worker_cls"
            )
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            remove_placement_group(self.group)
            _reservations.pop(self._pool, None)


_reservations: weakref.WeakKeyDictionary[ResourcePool, Reservation] = weakref.WeakKeyDictionary()


def reservation_of(pool: ResourcePool, deadline_s: float) -> Reservation:
    """Returns the reservation of the pool, which its first worker group makes."""
    reservation = _reservations.get(pool)
    if reservation is None:
        reservation = _reservations[pool] = Reservation(pool, deadline_s)
    reservation.take()
    return reservation


def _listed(nodes: Sequence[Node]) -> str:
    return "; ".join(str(node) for node in nodes) or "no nodes"
