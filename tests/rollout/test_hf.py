"""The hf engine on a GPU; tests/rollout/test_engine_contract.py tests everything else on a CPU."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from hone.rollout.contract import RolloutError, Sampling
from hone.rollout.hf import HFRollout

from .models import EOS, policy


def test_the_thread_of_the_engine_uses_the_device_of_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new thread uses device 0, and Triton launches its kernels on the device of the thread."""
    model = policy()
    parameter = SimpleNamespace(device=torch.device("cuda:1"))
    monkeypatch.setattr(model, "parameters", lambda: iter([parameter]))

    def report(device: torch.device) -> None:
        raise RolloutError(f"this thread uses {device}")

    monkeypatch.setattr(torch.cuda, "set_device", report)

    async def generate() -> None:
        engine = HFRollout(model, eos_ids=(EOS,), tokenizer=None)
        try:
            await engine.generate([3, 4], Sampling(2, 1.0, 0), "r")
        finally:
            await engine.close()

    with pytest.raises(RolloutError, match="this thread uses cuda:1"):
        asyncio.run(generate())
