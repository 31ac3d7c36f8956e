"""The coordinates of ranks: tensor varies fastest, then sequence, then data."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from hone.config import ConfigError
from hone.engine.contract import Mesh
from hone.engine.mesh import check_sequence_parallel, mesh_for_rank
from hone.models.families import UnsupportedModel
from hone.verl.dialect import load_config


@pytest.mark.parametrize(("world", "sequence", "tensor"), [(1, 1, 1), (4, 2, 1), (8, 2, 2)])
def test_every_coordinate_is_taken_once_and_one_rank_per_slot_collects(world, sequence, tensor):
    meshes = [mesh_for_rank(rank, world, sequence=sequence, tensor=tensor) for rank in range(world)]
    assert len(set(meshes)) == world
    slots = Counter(mesh.data_parallel_rank for mesh in meshes if mesh.is_collector)
    assert slots == dict.fromkeys(range(world // (sequence * tensor)), 1)
    assert [mesh.is_writer for mesh in meshes] == [True] + [False] * (world - 1)
    assert {mesh.ranks_per_slot for mesh in meshes} == {sequence * tensor}


def test_the_tensor_coordinate_varies_fastest_then_the_sequence():
    meshes = [mesh_for_rank(rank, 8, sequence=2, tensor=2) for rank in range(8)]
    actual = [(m.data_parallel_rank, m.sequence_rank, m.tensor_rank) for m in meshes]
    assert actual == [(d, s, t) for d in range(2) for s in range(2) for t in range(2)]
    assert mesh_for_rank(1, 2) == Mesh(1, 2)


def test_sizes_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ValueError, match=r"size=2 times tensor_parallel_size=2 does not divide 6"):
        mesh_for_rank(0, 6, sequence=2, tensor=2)


ACTOR = "actor_rollout_ref.actor"
KEYS = {
    f"{ACTOR}.ulysses_sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size=4",
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_",
    f"{ACTOR}.fsdp_config.tensor_parallel_size": f"{ACTOR}.fsdp_config.tensor_parallel_size=4",
}


@pytest.mark.parametrize("key", list(KEYS))
def test_the_config_refuses_such_sizes_by_key(key):
    settings = ["trainer.n_gpus_per_node=2", "data.train_batch_size=4"]
    with pytest.raises(ConfigError, match=f"{KEYS[key]}.*does not divide 2 ranks; use 2"):
        load_config([*settings, f"{key}=4"])


def test_rows_must_divide_over_the_slots_not_over_the_ranks():
    settings = [
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.rollout.n=1",
        "data.train_batch_size=2",
    ]
    with pytest.raises(ConfigError, match="4 data-parallel ranks"):
        load_config(settings)
    config = load_config([*settings, f"{ACTOR}.ulysses_sequence_parallel_size=2"])
    assert config.actor_rollout_ref.ref.ulysses_sequence_parallel_size == 2
    assert config.critic.ulysses_sequence_parallel_size == 1


def test_heads_that_the_ranks_do_not_divide_are_refused_from_the_config(tmp_path):
    shape = {"model_type": "qwen2", "num_attention_heads": 6, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    check_sequence_parallel(str(tmp_path), 3)  # more ranks than key heads
    with pytest.raises(UnsupportedModel, match=r"size=4 does not divide the 6 attention heads"):
        check_sequence_parallel(str(tmp_path), 4)
