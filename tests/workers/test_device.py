"""Device and dtype of a role."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hone.config import ConfigError
from hone.config.engine import FSDPConfig
from hone.engine import sharding
from hone.workers import actor, critic, train_worker
from hone.workers.device import pick_device, pick_dtype, prepare_process

from .tasks import config_of, write_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_auto_is_float32_on_a_cpu_and_bfloat16_on_a_gpu():
    assert pick_dtype("auto", CPU) == torch.float32
    assert pick_dtype("auto", CUDA) == torch.bfloat16
    assert pick_dtype("bf16", CPU) == pick_dtype("bfloat16", CPU) == torch.bfloat16
    assert pick_dtype("fp32", CUDA) == pick_dtype("float32", CUDA) == torch.float32


def test_auto_without_a_gpu_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto", 3) == CPU
    assert pick_device("cpu", 0) == CPU
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda.*use trainer\.device=cpu"):
        pick_device("cuda", 0)


def test_local_ranks_wrap_around_the_gpus(monkeypatch):
    devices = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    assert pick_device("auto", 3) == torch.device("cuda", 1)
    assert devices == [torch.device("cuda", 1)]
    assert pick_device("cpu", 0) == CPU


@pytest.fixture
def joined(monkeypatch):
    calls = []
    monkeypatch.setattr(sharding, "join_group", lambda device, timeout: calls.append(timeout))
    return calls


def test_several_ranks_join_with_the_configured_timeout(joined):
    prepare_process(CPU, 2, 77.0, [FSDPConfig()])
    prepare_process(CPU, 1, 77.0, [FSDPConfig()])
    assert joined == [77.0]


@pytest.mark.parametrize(
    "worker_class", [actor.ActorWorker, actor.ReferenceWorker, critic.CriticWorker]
)
def test_every_role_takes_its_timeout_from_nccl_timeout(worker_class, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(train_worker, "prepare_process", lambda *arguments: calls.append(arguments))
    config = config_of(write_model(tmp_path), "actor_rollout_ref.nccl_timeout=77")
    worker_class(config).init_model()
    assert [(device, ranks, timeout) for device, ranks, timeout, _ in calls] == [(CPU, 1, 77)]


@pytest.fixture
def restored():
    yield
    torch.use_deterministic_algorithms(False)


def test_full_determinism_enables_deterministic_kernels_and_seeds_all_generators(restored):
    def samples():
        prepare_process(CPU, 1, 1.0, [FSDPConfig(), FSDPConfig(full_determinism=True, seed=9)])
        return random.random(), np.random.rand(), torch.rand(()).item()

    assert samples() == samples()
    assert torch.are_deterministic_algorithms_enabled()


def test_without_it_generators_are_not_seeded(restored):
    before = torch.get_rng_state()
    prepare_process(CPU, 1, 1.0, [FSDPConfig()])
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()
