"""Decides whether SGLang servers get a LoRA adapter or merged weights, which every server accepts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hone.models.lora import is_plain_lora
from hone.rollout.contract import RolloutError, RolloutSpec
from hone.rollout.http_server import Event, ServerLost
from hone.rollout.server import ADAPTER_VERSION
from hone.rollout.sglang_server import SGLangServer
from hone.types import Settings

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger(__name__)

_MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""Modules that every SGLang server with LoRA accepts in `--lora-target-modules`."""


def published_adapter(spec: RolloutSpec) -> PeftModel | None:
    """Returns the policy's PEFT model if SGLang can load its adapter from a folder."""
    config = spec.config
    replicas = config.engine_kwargs.sglang.get("dp_size", config.data_parallel_size)
    if not spec.adapters or config.server.weights != "disk" or replicas > 1:
        return None
    lm: PeftModel = spec.load_policy().lm
    adapter = lm.peft_config[lm.active_adapter]
    if isinstance(adapter.target_modules, str) or adapter.use_rslora:  # it scales by alpha / r
        return None
    return lm if is_plain_lora(lm) and _targets(lm) <= _MODULES else None


def _targets(lm: PeftModel) -> set[str]:
    """Returns the names of the adapter's modules without their paths."""
    return {name.rpartition(".")[2] for name in lm.peft_config[lm.active_adapter].target_modules}


def lora_server_arguments(lm: PeftModel) -> Settings:
    """Returns the server arguments that an adapter needs."""
    return {
        "enable_lora": True,
        "max_lora_rank": lm.peft_config[lm.active_adapter].r,
        "lora_target_modules": sorted(_targets(lm)),
    }


async def all_accept(servers: Sequence[SGLangServer], lm: PeftModel) -> bool:
    """Whether every running server can load this adapter over the base weights of its files."""
    for server in servers:
        try:
            await server.wait_until_healthy()
            info, version = await server.server_info(), await server.weight_version()
        except ServerLost as error:
            raise RolloutError(str(error)) from error
        finally:
            await server.close()  # its connections belong to this event loop
        if reason := _refusal(info, str(version), lm):
            log.info("%s %s: merged weights are published", server.safe_url, reason)
            return False
    return True


def _refusal(info: Event, version: str, lm: PeftModel) -> str | None:
    """Returns why a server cannot load an adapter, or None."""
    rank, limit = lm.peft_config[lm.active_adapter].r, info.get("max_lora_rank") or 0
    targets = set(info.get("lora_target_modules") or ())
    if not info.get("enable_lora"):
        return "runs without --enable-lora"
    if (info.get("dp_size") or 1) > 1:
        return "has replicas (--dp-size), which cannot load adapters"
    if rank > limit:
        return f"has --max-lora-rank {limit}, and the adapter has rank {rank}"
    if "all" not in targets and (others := _targets(lm) - targets):
        return f"runs without {min(others)} in --lora-target-modules"
    if version != "default" and not version.startswith(ADAPTER_VERSION):
        return f"has weights {version!r} instead of those of its files"
    return None
