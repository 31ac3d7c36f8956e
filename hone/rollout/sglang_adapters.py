"""Decides whether SGLang servers get only a LoRA adapter; otherwise they get merged weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hone.models.lora import is_plain_lora
from hone.rollout.contract import RolloutError, RolloutSpec
from hone.rollout.http_server import ServerLost
from hone.rollout.server import ADAPTER_VERSION_PREFIX
from hone.rollout.sglang_server import SGLangServer
from hone.types import Fields, Settings

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger(__name__)

_ACCEPTED_MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""The modules that every SGLang server accepts in `--lora-target-modules`."""


def peft_model_for_adapters(spec: RolloutSpec) -> PeftModel | None:
    """Returns the policy's PEFT model if SGLang can load its adapter from a folder, else None."""
    config = spec.config
    num_replicas = config.engine_kwargs.sglang.get("dp_size", config.data_parallel_size)
    if not spec.has_adapters or config.server.weights != "disk" or num_replicas > 1:
        return None
    lm: PeftModel = spec.load_policy().lm
    adapter = lm.peft_config[lm.active_adapter]
    # SGLang scales every adapter by alpha / r, unlike rsLoRA.
    if isinstance(adapter.target_modules, str) or adapter.use_rslora:
        return None
    return lm if is_plain_lora(lm) and _target_modules(lm) <= _ACCEPTED_MODULES else None


def _target_modules(lm: PeftModel) -> set[str]:
    """Returns the names of the modules that have adapters, without their paths."""
    return {name.rpartition(".")[2] for name in lm.peft_config[lm.active_adapter].target_modules}


def lora_server_arguments(lm: PeftModel) -> Settings:
    """Returns the server arguments that an adapter needs."""
    return {
        "enable_lora": True,
        "max_lora_rank": lm.peft_config[lm.active_adapter].r,
        "lora_target_modules": sorted(_target_modules(lm)),
    }


async def all_servers_accept(servers: Sequence[SGLangServer], lm: PeftModel) -> bool:
    """Whether every running server can load this adapter over the base weights of its files.

    Closes the connections, which belong to the current event loop.
    """
    for server in servers:
        try:
            await server.wait_until_healthy()
            info, version = await server.server_info(), await server.weight_version()
        except ServerLost as error:
            raise RolloutError(str(error)) from error
        finally:
            await server.close()
        if reason := _refusal_reason(info, str(version), lm):
            log.info("%s %s, so merged weights are published", server.safe_url, reason)
            return False
    return True


def _refusal_reason(info: Fields, version: str, lm: PeftModel) -> str | None:
    """Returns the reason why a server cannot load the adapter, or None if it can load the adapter."""
    rank, max_rank = lm.peft_config[lm.active_adapter].r, info.get("max_lora_rank") or 0
    server_modules = set(info.get("lora_target_modules") or ())
    if not info.get("enable_lora"):
        return "runs without --enable-lora"
    if (info.get("dp_size") or 1) > 1:
        return "has replicas (--dp-size), which cannot load adapters"
    if rank > max_rank:
        return f"has --max-lora-rank {max_rank}, and the adapter has rank {rank}"
    if "all" not in server_modules and (missing := _target_modules(lm) - server_modules):
        return f"runs without {min(missing)} in --lora-target-modules"
    if version != "default" and not version.startswith(ADAPTER_VERSION_PREFIX):
        return f"has weights {version!r} instead of those of its files"
    return None
