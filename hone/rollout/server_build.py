"""Builds the engine of `rollout.name=sglang`, and of servers that already run (`rollout.server.urls`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hone.config.rollout import RolloutConfig
from hone.event_loop import run_coroutine
from hone.models.load import load_config, resolve_model_path
from hone.models.lora import adapter_weights
from hone.models.routing import routing_shape
from hone.rollout.contract import RolloutEngine, RolloutError, RolloutSpec, Sampling
from hone.rollout.http_server import HttpServer, Timeouts
from hone.rollout.requests import RequestRules
from hone.rollout.server import ServerRollout
from hone.rollout.server_weights import (
    AdapterFolder,
    WeightFolder,
    checkpoint_tensors,
    meta_model,
)
from hone.rollout.sglang_adapters import all_accept, lora_server_arguments, published_adapter
from hone.rollout.sglang_process import LaunchedSGLang, server_command
from hone.rollout.sglang_server import SGLangServer
from hone.rollout.vllm_openai import VLLMServer

if TYPE_CHECKING:
    from peft import PeftModel

    from hone.rollout.server_group import UpdateGroup


def build_sglang(spec: RolloutSpec) -> RolloutEngine:
    """Connects to running SGLang servers, or starts one."""
    server, adapter = spec.config.server, published_adapter(spec)
    timeouts = Timeouts(server.max_start_wait_time, server.timeout)
    if server.urls:

        def servers_of(spec: RolloutSpec) -> list[SGLangServer]:
            return [
                SGLangServer(url, timeouts, server.api_key_env, eos_ids=spec.eos_ids)
                for url in urls_of(spec)
            ]

        # All workers get the same tensors, so each checks the servers of all workers.
        all_workers = replace(spec, rank=0, world_size=1)
        if adapter is not None and not run_coroutine(all_accept(servers_of(all_workers), adapter)):
            adapter = None
        return _engine(spec, servers_of(spec), adapter)
    command, environment = server_command(spec, adapter and lora_server_arguments(adapter))
    launched = LaunchedSGLang(
        "", timeouts, eos_ids=spec.eos_ids, command=command, environment=environment
    )
    try:
        launched.launch()
        return _engine(spec, [launched], adapter)
    except BaseException:
        launched.terminate()
        raise


def build_vllm_servers(spec: RolloutSpec) -> RolloutEngine:
    """Connects to running vLLM servers."""
    _check_no_experts(spec)
    server = spec.config.server
    timeouts = Timeouts(server.max_start_wait_time, server.timeout)
    tied = bool(load_config(spec.model_path).tie_word_embeddings)
    return _engine(
        spec,
        [
            VLLMServer(url, timeouts, server.api_key_env, eos_ids=spec.eos_ids, tied=tied)
            for url in urls_of(spec)
        ],
    )


def takes_updates(spec: RolloutSpec) -> bool:
    """Whether an engine of this spec loads weights: of training, or of an adapter to generate with."""
    return isinstance(spec.config, RolloutConfig) or spec.current_weights is not None


def _check_no_experts(spec: RolloutSpec) -> None:
    """Raises for updates of a mixture of experts, which are not tested with vLLM servers."""
    if takes_updates(spec) and routing_shape(load_config(spec.model_path)) is not None:
        raise RolloutError(
            "a running vLLM server cannot load new weights of a mixture of experts, and "
            f"{spec.model_path} is one; use rollout.name=vllm without rollout.server.urls, or "
            "rollout.name=native"
        )


def urls_of(spec: RolloutSpec) -> list[str]:
    """Returns the servers of this rank; ranks share no server, because each updates its own."""
    urls = [url.rstrip("/").removesuffix("/v1") for url in spec.config.server.urls]
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise RolloutError(f"rollout.server.urls: {url!r} must begin with http:// or https://")
    if len(urls) < spec.world_size:
        raise RolloutError(
            f"rollout.server.urls has {len(urls)} servers for {spec.world_size} rollout workers; give each "
            "worker one or more"
        )
    return urls[spec.rank :: spec.world_size]


def _group_of(spec: RolloutSpec, servers: Sequence[HttpServer]) -> Callable[[], UpdateGroup]:
    from hone.rollout.server_group import UpdateGroup

    sglang = [server for server in servers if isinstance(server, SGLangServer)]
    return lambda: UpdateGroup(sglang, spec.device)


def _check_weight_transfer(spec: RolloutSpec, servers: Sequence[HttpServer]) -> None:
    if spec.config.server.weights != "disk" and not isinstance(servers[0], SGLangServer):
        raise RolloutError(
            f"rollout.server.weights={spec.config.server.weights} needs SGLang; for vLLM servers use "
            "rollout.server.weights=disk"
        )


def _engine(
    spec: RolloutSpec, servers: Sequence[HttpServer], adapter: PeftModel | None = None
) -> ServerRollout:
    config = spec.config
    _check_weight_transfer(spec, servers)
    path = resolve_model_path(spec.model_path)
    bucket_bytes = 2**30
    if isinstance(config, RolloutConfig):
        bucket_bytes = config.checkpoint_engine.bucket_bytes
    rules = RequestRules.of(load_config(path), spec.eos_ids, spec.tokenizer)
    if adapter is not None:
        for server in servers:
            assert isinstance(server, SGLangServer)
            server.takes_adapters, server.can_read_weights = True, False
        engine = ServerRollout(
            servers,
            rules,
            {name: tensor.to("meta") for name, tensor in adapter_weights(adapter)},
            AdapterFolder(config.server.weights_folder, adapter),
            adapters=True,
            bucket_bytes=bucket_bytes,
            max_attempts=config.server.max_attempts,
        )
    else:
        lm = meta_model(path)
        engine = ServerRollout(
            servers,
            rules,
            dict(lm.named_parameters(remove_duplicate=False)),
            WeightFolder(config.server.weights_folder, path),
            direct=config.server.weights == "tensor",
            group=_group_of(spec, servers) if config.server.weights == "distributed" else None,
            to_checkpoint=partial(checkpoint_tensors, lm),
            keep_weights=config.server.keep_weights,
            bucket_bytes=bucket_bytes,
            max_attempts=config.server.max_attempts,
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
    """Connects to the servers, and loads an adapter to generate with, which is not in their files."""
    await engine.start()
    # A trainer publishes its weights before the first request.
    if spec.current_weights is not None and not isinstance(spec.config, RolloutConfig):
        await engine.begin_update()
        await engine.load(spec.current_weights())
        await engine.commit(0)
