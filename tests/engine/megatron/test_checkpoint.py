"""Names in a checkpoint; tests/engine/megatron/test_engine.py resumes checkpoints under other layouts."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hone.config.engine import OptimConfig
from hone.engine.megatron.checkpoint import _aliases, _load_moments, _optimizer_key, save_stage
from hone.engine.optimizer import build_optimizer
from tests.engine.megatron.test_optimizer import make_optimizer


def test_names_are_those_of_the_checkpoints_of_fsdp2():
    assert _optimizer_key("model.norm.weight") == "lm/model/norm/weight"
    assert _optimizer_key("value_head.bias") == "value_head/bias"
    tied, untied = SimpleNamespace(is_tied=True), SimpleNamespace(is_tied=False)
    embedding = "model.embed_tokens.weight"
    assert _aliases(tied, embedding) == ["lm.model.embed_tokens.weight", "lm.lm_head.weight"]
    assert _aliases(untied, embedding) == ["lm.model.embed_tokens.weight"]


KINDS = {
    "fused": ("AdamW", {"fused": True}),
    "foreach": ("AdamW", {"foreach": True}),
    "momentum": ("SGD", {"momentum": 0.9, "foreach": False}),
    "products": ("NAdam", {"foreach": False}),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])  # meta: a device other than the host's
@pytest.mark.parametrize("kind", KINDS)
def test_loaded_state_is_on_the_device_where_an_update_would_create_it(kind, device, monkeypatch):
    name, overrides = KINDS[kind]
    module = sys.modules["torch.optim.optimizer"]  # torch.optim deletes its name
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: ["cpu", "meta"])
    config = OptimConfig(optimizer=name, override_optimizer_config=overrides)
    fresh = nn.Parameter(torch.zeros(6, device=device))
    fresh.grad = torch.zeros_like(fresh)
    inner = build_optimizer([fresh], config)
    inner.step()
    saved = {
        key: torch.zeros(x.shape) if isinstance(x, torch.Tensor) else x
        for key, x in inner.state[fresh].items()
    }
    optimizer = make_optimizer(0, optimizer=name, override_optimizer_config=overrides)
    master = nn.Parameter(torch.zeros(6, device=device))
    optimizer.masters, optimizer.torch_optimizer = (
        nn.ParameterDict({"shard0": master}),
        build_optimizer([master], config),
    )
    optimizer.scatter = lambda tensors, flats: None  # tested in test_optimizer.py
    _load_moments(
        SimpleNamespace(entries=[], local_shards=lambda full: []), optimizer, {"x": saved}
    )
    loaded = optimizer.torch_optimizer.state[master]
    devices = {k: x.device for k, x in inner.state[fresh].items() if isinstance(x, torch.Tensor)}
    assert {k: x.device for k, x in loaded.items() if isinstance(x, torch.Tensor)} == devices


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_every_rank_writes_the_checksums_of_its_shards(one_rank, tmp_path):
    tensors = SimpleNamespace(
        groups=SimpleNamespace(data=one_rank, tensor=one_rank),
        parameters={"norm": torch.ones(3)},
        gather_stage=lambda tensor_of: [("model.norm.weight", tensor_of("norm"))],
        is_tied=False,
    )
    save_stage(tmp_path, tensors, None, ("model",))
    (sums,) = tmp_path.glob("*0.json")
    assert list(json.loads(sums.read_text())) == ["__0_0.distcp"]
