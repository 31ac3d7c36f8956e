"""Builds the engine of `rollout.name=sglang`, and of servers that already run (`rollout.server.urls`).

If the policy has a LoRA adapter, SGLang servers that can load the adapter get only the adapter; other servers
get merged weights.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hone.config.rollout import RolloutConfig
from hone.event_loop import run_coroutine
from hone.models.load import load_config
from hone.models.lora import is_plain_lora
from hone.models.paths import resolve_model_path
from hone.models.routing import routing_shape
from hone.rollout.contract import RolloutEngine, RolloutError, RolloutSpec, Sampling
from hone.rollout.http_server import HttpServer, ServerLost
from hone.rollout.requests import RequestRules
from hone.rollout.server import ADAPTER_VERSION_PREFIX, ServerRollout
from hone.rollout.server_weights import (
    AdapterFolder,
    WeightFolder,
    checkpoint_tensors,
    meta_model,
)
from hone.rollout.sglang_process import LaunchedSGLang, command_and_environment
from hone.rollout.sglang_server import SGLangServer
from hone.rollout.vllm_openai import VLLMServer
from hone.types import Fields, Settings

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger(__name__)

_LORA_MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""The modules that every SGLang server accepts in `--lora-target-modules`."""


def build_sglang(spec: RolloutSpec) -> RolloutEngine:
    """Connects to running SGLang servers, or starts one."""
    config, lm = spec.config.server, peft_model_for_adapters(spec)
    timeouts = (config.max_start_wait_time, config.timeout)
    if not config.urls:
        lora_arguments = lora_server_arguments(lm) if lm is not None else None
        command, environment = command_and_environment(spec, lora_arguments)
        server = LaunchedSGLang(
            "", *timeouts, eos_ids=spec.eos_ids, command=command, environment=environment
        )
        try:
            server.launch()
            return _build_engine(spec, [server], lm)
        except BaseException:
            server.terminate()
            raise

    def make_servers(spec: RolloutSpec) -> list[SGLangServer]:
        return [
            SGLangServer(url, *timeouts, config.api_key_env, eos_ids=spec.eos_ids)
            for url in server_urls(spec)
        ]

    if lm is not None:
        # All workers get the same tensors, so each worker checks the servers of all workers.
        all_servers = make_servers(replace(spec, rank=0, world_size=1))
        if not run_coroutine(_all_servers_accept(all_servers, lm)):
            lm = None
    return _build_engine(spec, make_servers(spec), lm)


def build_vllm_servers(spec: RolloutSpec) -> RolloutEngine:
    """Connects to running vLLM servers."""
    model_config, config = load_config(spec.model_path), spec.config.server
    if receives_weights(spec) and routing_shape(model_config) is not None:
        raise RolloutError(
            "a running vLLM server cannot load new weights of a mixture of experts, and "
            f"{spec.model_path} is one; use rollout.name=vllm without rollout.server.urls, or "
            "rollout.name=native"
        )
    servers = [
        VLLMServer(
            url,
            config.max_start_wait_time,
            config.timeout,
            config.api_key_env,
            eos_ids=spec.eos_ids,
            tied_embeddings=bool(model_config.tie_word_embeddings),
        )
        for url in server_urls(spec)
    ]
    return _build_engine(spec, servers)


def receives_weights(spec: RolloutSpec) -> bool:
    """Whether the engine loads weights after its start: in training, or to generate with an adapter."""
    return isinstance(spec.config, RolloutConfig) or spec.current_weights is not None


def bucket_bytes(spec: RolloutSpec) -> int:
    """Returns the size of a bucket of new weights; `hone generate` has no key for the size."""
    config = spec.config
    return config.checkpoint_engine.bucket_bytes if isinstance(config, RolloutConfig) else 2**30


def server_urls(spec: RolloutSpec) -> list[str]:
    """Returns the URLs of this rank's servers; if no weights are loaded, all ranks share all servers."""
    urls = [url.rstrip("/").removesuffix("/v1") for url in spec.config.server.urls]
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise RolloutError(f"rollout.server.urls: {url!r} must begin with http:// or https://")
    if not receives_weights(spec):
        return urls
    if len(urls) < spec.world_size:
        raise RolloutError(
            f"rollout.server.urls has {len(urls)} servers for {spec.world_size} rollout workers; each worker "
            "needs at least one"
        )
    return urls[spec.rank :: spec.world_size]


def _build_engine(
    spec: RolloutSpec, servers: Sequence[HttpServer], peft_model: PeftModel | None = None
) -> ServerRollout:
    """Builds the engine; with `peft_model`, the servers get only its adapter."""
    config, path = spec.config, resolve_model_path(spec.model_path)
    transfer, folder_path = config.server.weights, config.server.weights_folder
    if transfer != "disk" and not isinstance(servers[0], SGLangServer):
        raise RolloutError(
            f"rollout.server.weights={transfer} needs SGLang; for vLLM servers use "
            "rollout.server.weights=disk"
        )
    make_engine = partial(
        ServerRollout,
        servers,
        RequestRules.of(load_config(path), spec.eos_ids, spec.tokenizer),
        bucket_bytes=bucket_bytes(spec),
        max_attempts=config.server.max_attempts,
    )
    if peft_model is not None:
        for server in servers:
            assert isinstance(server, SGLangServer)
            server.loads_adapters, server.can_read_weights = True, False
        folder = AdapterFolder(folder_path, peft_model)
        engine = make_engine(folder.parameters, folder, loads_adapters=True)
    else:
        lm = meta_model(path)
        engine = make_engine(
            dict(lm.named_parameters(remove_duplicate=False)),
            WeightFolder(folder_path, path),
            send_tensors=transfer == "tensor",
            broadcast_device=spec.device if transfer == "distributed" else None,
            to_checkpoint=partial(checkpoint_tensors, lm),
            keep_weights=config.server.keep_weights,
        )
    try:
        run_coroutine(_connect(engine, spec))
        if isinstance(config, RolloutConfig) and config.calculate_log_probs:
            temperature = config.temperature if config.do_sample else 0.0
            engine.check_training_log_probs(
                Sampling(1, temperature, 0, config.top_k, config.top_p, config.min_p)
            )
    except BaseException:
        run_coroutine(engine.close())
        raise
    return engine


async def _connect(engine: ServerRollout, spec: RolloutSpec) -> None:
    """Connects to the servers; to generate with an adapter, also loads the current weights into them."""
    await engine.start()
    # The servers' files lack the adapter. A trainer publishes its weights before the first request.
    if spec.current_weights is not None and not isinstance(spec.config, RolloutConfig):
        await engine.begin_update()
        await engine.load(spec.current_weights())
        await engine.commit(0)


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
    return lm if is_plain_lora(lm) and _target_modules(lm) <= _LORA_MODULES else None


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


async def _all_servers_accept(servers: Sequence[SGLangServer], lm: PeftModel) -> bool:
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
