"""Weights on their way to servers: the checkpoint folder, buckets and payloads."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.models.tiny import save_pretrained
from hone.rollout.server_weights import (
    WeightFolder,
    meta_model,
    serialize_for_sglang,
    split_into_buckets,
)

from .models import TOKENIZER, policy


def test_a_committed_folder_is_a_checkpoint_that_transformers_loads(tmp_path: Path) -> None:
    model = save_pretrained(policy().lm, TOKENIZER, tmp_path / "model")
    folder = WeightFolder(str(tmp_path / "shared"), str(model))
    new = policy(seed=1).lm
    folder.begin()
    for bucket in split_into_buckets(new.named_parameters(), 4096):
        folder.add(bucket)
    path = folder.commit()
    assert len(list(path.glob("*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for name, value in new.named_parameters():
        assert torch.equal(loaded.get_parameter(name), value)
    shards = {name: t for shard in folder.shards() for name, t in shard.items()}
    assert set(shards) == {name for name, _ in new.named_parameters()}
    for name, value in folder.sample_weights(4):
        assert torch.equal(value, new.get_parameter(name))
    folder.close()
    assert not path.exists()


def test_an_update_that_is_begun_again_leaves_the_last_weights(tmp_path: Path) -> None:
    folder = WeightFolder(str(tmp_path), "no-model")
    folder.begin()
    folder.add({"a": torch.ones(2)})
    first = folder.commit()
    folder.begin()
    folder.add({"a": torch.zeros(2)})
    folder.begin()
    assert folder.current_checkpoint == first
    assert [shard["a"].tolist() for shard in folder.shards()] == [[1.0, 1.0]]
    assert [(name, x.tolist()) for name, x in folder.sample_weights(1)] == [("a", [1.0, 1.0])]
    folder.add({"a": torch.full((2,), 3.0)})
    second = folder.commit()
    assert not first.exists()
    assert json.loads((second / "model.safetensors.index.json").read_text())["weight_map"] == {
        "a": "model-00001.safetensors"
    }


def test_buckets_hold_about_their_capacity_in_order() -> None:
    weights = [(f"w{i}", torch.zeros(n)) for i, n in enumerate((10, 10, 500, 10, 10))]
    names = [list(bucket) for bucket in split_into_buckets(weights, 200)]
    assert names == [["w0", "w1"], ["w2"], ["w3", "w4"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_payload_is_a_pickle_of_named_tensors(dtype: torch.dtype) -> None:
    storage = torch.arange(12, dtype=dtype)
    payload = serialize_for_sglang({"a": storage[2:4], "b": storage.reshape(3, 4).T})
    assert len(payload) < 4000, "the payload holds the whole storage of a view"
    (_, a), (_, b) = pickle.loads(base64.b64decode(payload))
    assert torch.equal(a, storage[2:4])
    assert torch.equal(b, storage.reshape(3, 4).T)


def test_the_models_parameters_come_from_its_config_alone(tmp_path: Path) -> None:
    lm = policy().lm
    model = save_pretrained(lm, TOKENIZER, tmp_path / "model")
    for file in model.glob("*.safetensors"):
        file.unlink()
    shapes = {
        name: p.shape for name, p in meta_model(str(model)).named_parameters(remove_duplicate=False)
    }
    assert shapes == {n: p.shape for n, p in lm.named_parameters(remove_duplicate=False)}


def test_the_folder_of_a_killed_run_is_deleted_from_the_shared_folder(tmp_path: Path) -> None:
    """Models are large, and a folder on a file server outlives its run."""
    abandoned = WeightFolder(str(tmp_path), "no-model")
    abandoned.begin()
    abandoned._folder._lock_file.close()  # type: ignore[union-attr] # as the end of the process does
    next_run = WeightFolder(str(tmp_path), "no-model")
    assert list(tmp_path.iterdir()) == [next_run.root]
    assert next_run.root.stat().st_mode & 0o777 == 0o755
