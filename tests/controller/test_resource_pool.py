"""Pools of processes, and which role runs on which."""

from __future__ import annotations

import pytest

from hone.controller import (
    ResourcePool,
    ResourcePoolManager,
    Role,
    merge_resource_pool,
    split_resource_pool,
)
from hone.controller.resource_pool import FreeResources, place


def test_ranks_count_through_the_nodes() -> None:
    pool = ResourcePool([2, 3])
    assert pool.world_size == 5
    assert pool.local_rank_list() == [0, 1, 0, 1, 2]
    assert pool.local_world_size_list() == [2, 2, 3, 3, 3]
    assert pool.store == [2, 3]


@pytest.mark.parametrize("nodes", [[], [0], [2, -1]])
def test_a_node_without_processes_is_refused(nodes: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one process"):
        ResourcePool(nodes)


def test_roles_share_the_pool_they_are_mapped_to() -> None:
    manager = ResourcePoolManager(
        {"global_pool": [2], "reward_pool": [1]},
        {
            Role.ActorRollout: "global_pool",
            Role.Critic: "global_pool",
            Role.RewardModel: "reward_pool",
        },
    )
    assert manager.get_resource_pool(Role.Critic) is manager.get_resource_pool(Role.ActorRollout)
    assert manager.get_resource_pool(Role.RewardModel).world_size == 1
    assert manager.create_resource_pool() is manager.create_resource_pool()
    assert manager.get_n_gpus() == 3
    with pytest.raises(ValueError, match=r"role 'ref' has no pool.*'critic'"):
        manager.get_resource_pool(Role.RefPolicy)


def test_a_role_mapped_to_no_pool_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'critic': 'typo_pool'.*global_pool"):
        ResourcePoolManager({"global_pool": [1]}, {Role.Critic: "typo_pool"})


def cpus(*counts: float) -> FreeResources:
    return {name: {"CPU": count} for name, count in zip("abcdef", counts, strict=False)}


def test_the_nodes_of_a_pool_are_different_machines_and_each_must_have_room() -> None:
    pool = ResourcePool([4, 4])
    assert place(pool, cpus(4, 4)) == ["a"] * 4 + ["b"] * 4
    assert place(pool, cpus(1, 4, 9)) == ["b"] * 4 + ["c"] * 4
    for too_few in (cpus(8), cpus(6, 2), cpus()):
        assert place(pool, too_few) is None
    assert place(ResourcePool([4]), cpus(2, 2)) is None
    assert place(ResourcePool([1, 3]), cpus(3, 1)) == ["b", "a", "a", "a"]


def test_the_smallest_node_with_room_is_taken_and_pools_leave_each_other_what_is_left() -> None:
    free = cpus(4, 2, 2)
    assert place(ResourcePool([2]), free) == ["b", "b"]
    assert place(ResourcePool([2, 2]), free) == ["c", "c", "a", "a"]
    assert free == cpus(2, 0, 0)
    assert place(ResourcePool([3]), free) is None


def test_a_process_with_a_gpu_needs_a_cpu_too() -> None:
    pool = ResourcePool([2], use_gpu=True)
    assert place(pool, {"a": {"CPU": 1, "GPU": 8}, "b": {"CPU": 8}}) is None
    assert place(pool, {"a": {"CPU": 2, "GPU": 8}}) == ["a", "a"]


def test_nodes_of_merged_pools_may_be_the_same() -> None:
    merged = merge_resource_pool(ResourcePool([2]), ResourcePool([1]))
    assert place(merged, cpus(3)) == ["a", "a", "a"]


def test_pools_can_be_split_and_merged() -> None:
    pool = ResourcePool([2, 2], name_prefix="all", max_colocate_count=3)
    first, second = split_resource_pool(pool, [3, 1])
    assert (first.process_on_nodes, second.process_on_nodes) == ([2, 1], [1])
    assert first.max_colocate_count == 3
    assert merge_resource_pool(first, second).process_on_nodes == [2, 1, 1]
    with pytest.raises(ValueError, match="do not add up to the 4"):
        split_resource_pool(pool, [3])
    with pytest.raises(ValueError, match="cannot be merged"):
        merge_resource_pool(pool, ResourcePool([1], use_gpu=True))


def test_roles_have_names() -> None:
    assert str(Role.ActorRolloutRef) == "actor_rollout_ref"
    assert Role.from_string("critic") is Role.from_string("Critic") is Role.Critic
    with pytest.raises(ValueError, match="no role 'ghost'"):
        Role.from_string("ghost")
