"""vLLM with a LoRA adapter: updates load only the adapter, over the base weights of the model's files."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hone.models.lora import adapter_weights, is_plain_lora
from hone.rollout.requests import RequestRules
from hone.rollout.server_weights import AdapterFolder
from hone.rollout.vllm import VLLMRollout, Weights
from hone.rollout.vllm_process import EngineProcess
from hone.types import Fields

if TYPE_CHECKING:
    from peft import PeftModel

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`."""


def engine_arguments(lm: PeftModel) -> Fields | None:
    """Returns the arguments of `vllm.LLM` for an adapter; None if vLLM does not support it."""
    rank = lm.peft_config[lm.active_adapter].r
    if rank > _RANKS[-1] or not is_plain_lora(lm):
        return None
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(r for r in _RANKS if r >= rank),
    }


class AdapterVLLM(VLLMRollout):
    """A `VLLMRollout` whose requests use the adapter of the last update, stored in a folder in memory."""

    def __init__(
        self,
        processes: Sequence[EngineProcess],
        rules: RequestRules,
        lm: PeftModel,
        *,
        device: torch.device,
    ) -> None:
        parameters = {name: tensor.to("meta") for name, tensor in adapter_weights(lm)}
        super().__init__(processes, rules, parameters, bucket_bytes=0, device=device)
        self.traits = replace(self.traits, adapters=True)
        self._folder = AdapterFolder(None, lm)

    async def _load(self, weights: Weights) -> None:
        for _ in self._check_names(weights):
            pass

    async def _remote_commit(self, version: int, loaded: bool) -> None:
        if loaded:
            await asyncio.to_thread(self._write_folder)
            for process in self._processes:
                process.stale = True
        await super()._remote_commit(version, loaded)

    def _write_folder(self) -> None:
        self._folder.begin()
        self._folder.add(self._host_copy)
        self._folder.commit()

    async def _restore(self, process: EngineProcess) -> None:
        if self._updated:
            await process.call("adapter", folder=str(self._folder.current))
        process.stale = process.missed_bucket = process.loading = False

    def _choose_sleep_level(self) -> int:
        return int(self._device.type == "cuda")

    async def _remote_close(self) -> None:
        await super()._remote_close()
        self._folder.close()
