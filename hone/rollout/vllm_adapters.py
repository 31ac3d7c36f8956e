"""vLLM with a LoRA adapter: an update loads only the adapter; vLLM reads the base weights from files."""

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

_SUPPORTED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM allows for `max_lora_rank`."""


def lora_engine_arguments(lm: PeftModel) -> Fields | None:
    """Returns the arguments of `vllm.LLM` for an adapter; None if vLLM does not support the adapter."""
    rank = lm.peft_config[lm.active_adapter].r
    if rank > _SUPPORTED_RANKS[-1] or not is_plain_lora(lm):
        return None
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(r for r in _SUPPORTED_RANKS if r >= rank),
    }


class AdapterVLLM(VLLMRollout):
    """A `VLLMRollout` whose requests use the adapter of the last update, from a folder in shared memory."""

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
        self.traits = replace(self.traits, loads_adapters=True)
        self._folder = AdapterFolder(None, lm)

    async def _load(self, weights: Weights) -> None:
        for _ in self._check_and_copy(weights):  # `commit` writes the copy into the folder
            pass

    async def _remote_commit(self, version: int, has_new_weights: bool) -> None:
        if has_new_weights:
            await asyncio.to_thread(self._write_folder)
            for process in self._processes:
                process.stale = True
        await super()._remote_commit(version, has_new_weights)

    def _write_folder(self) -> None:
        self._folder.begin()
        self._folder.add(self._host_copy)
        self._folder.commit()

    async def _restore(self, process: EngineProcess) -> None:
        if self._must_restore:
            await process.call("adapter", folder=str(self._folder.current_checkpoint))
        process.stale = process.missed_bucket = process.has_new_buckets = False

    def _choose_sleep_level(self) -> int:
        return 1 if self._device.type == "cuda" else 0

    async def _remote_close(self) -> None:
        await super()._remote_close()
        self._folder.close()
