"""Device and dtype of a role."""

from __future__ import annotations

import pytest
import torch

from hone.workers.device import pick_device, pick_dtype

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
    with pytest.raises(RuntimeError, match=r"trainer\.device=cuda.*use trainer\.device=cpu"):
        pick_device("cuda", 0)


def test_ranks_of_a_node_take_its_gpus_in_turn(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert pick_device("auto", 3) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    assert pick_device("cpu", 0) == CPU
