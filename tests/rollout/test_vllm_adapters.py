"""vLLM with LoRA adapters, with a fake of vLLM: an update loads only the adapter, also after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

from hone.rollout.contract import RolloutError, Sampling
from hone.rollout.requests import RequestRules
from hone.rollout.server_weights import AdapterFolder
from hone.rollout.vllm import VLLMRollout
from hone.rollout.vllm_build import lora_engine_arguments
from hone.rollout.vllm_process import EngineProcess, LaunchArguments

from .test_vllm_process import fake_python

LONG = Sampling(max_tokens=80, temperature=1.0, seed=7, ignore_eos=True)
A, B = (f"base_model.model.q_proj.lora_{side}.default.weight" for side in "AB")


def peft_model(rank: int = 4, *more: str, **settings: Any) -> Any:
    shapes = {A: (rank, 6), B: (5, rank)} | dict.fromkeys(more, (3,))
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    config = LoraConfig(r=rank, target_modules=["q_proj"], **settings)
    return SimpleNamespace(
        active_adapter="default",
        peft_config={"default": config},
        named_parameters=lambda: parameters.items(),
    )


def adapter(shift: int) -> list[tuple[str, Tensor]]:
    return [(B, torch.zeros(5, 4)), (A, torch.full((4, 6), float(shift)))]


def expected_tokens(shift: int) -> list[int]:
    return [(1 + i + shift) % 90 for i in range(80)]


def test_an_adapter_is_published_alone_and_restored_after_a_death(tmp_path: Path) -> None:
    launch = LaunchArguments(fake_python(tmp_path), {"model": "m"}, {})
    rules = RequestRules(frozenset({89}), vocab_size=90)
    folder = AdapterFolder(None, peft_model())
    engine = VLLMRollout(
        [EngineProcess(launch)],
        rules,
        folder.parameters,
        bucket_bytes=0,
        device=torch.device("cpu"),
        adapter_folder=folder,
    )

    async def work() -> None:
        await engine.start()
        assert engine.traits.loads_adapters
        for version, shift in enumerate((4, 9), 1):
            await engine.begin_update()
            await engine.load(adapter(shift))
            await engine.commit(version)
            assert (await engine.generate([1], LONG, "r")).token_ids == expected_tokens(shift)
        engine._processes[0].kill()
        assert (await engine.generate([1], LONG, "s")).token_ids == expected_tokens(9)
        await engine.begin_update()
        with pytest.raises(RolloutError, match="which the model does not have"):
            await engine.load([("model.q_proj.weight", torch.zeros(5, 6))])
        await engine.close()
        assert not folder.root.exists()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("model", "rank"),
    [
        (peft_model(4), 8),
        (peft_model(300), 320),
        (peft_model(600), None),
        (peft_model(4, "base_model.model.embed.modules_to_save.default.weight"), None),
        (peft_model(4, use_rslora=True), 8),
        (peft_model(4, rank_pattern={"q_proj": 2}), None),
        (peft_model(4, alpha_pattern={"q_proj": 2}), None),
        (peft_model(4, init_lora_weights="pissa"), None),
    ],
)
def test_what_vllm_cannot_take_is_published_merged(model: Any, rank: int | None) -> None:
    arguments = lora_engine_arguments(model)
    assert (arguments and arguments["max_lora_rank"]) == rank
