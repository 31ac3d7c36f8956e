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
from hone.rollout.sglang_adapters import (
    all_servers_accept,
    lora_server_arguments,
    peft_model_for_adapters,
)
from hone.rollout.sglang_process import LaunchedSGLang, command_and_environment
from hone.rollout.sglang_server import SGLangServer
from hone.rollout.vllm_openai import VLLMServer

if TYPE_CHECKING:
    from peft import PeftModel

    from hone.rollout.server_group import UpdateGroup


def build_sglang(spec: RolloutSpec) -> RolloutEngine:
    """Connects to running SGLang servers, or starts one."""
    server_config, lm = spec.config.server, peft_model_for_adapters(spec)
    timeouts = Timeouts(server_config.max_start_wait_time, server_config.timeout)
    if server_config.urls:

        def make_servers(spec: RolloutSpec) -> list[SGLangServer]:
            return [
                SGLangServer(url, timeouts, server_config.api_key_env, eos_ids=spec.eos_ids)
                for url in server_urls(spec)
            ]

        # All workers get the same tensors, so each worker checks the servers of all workers.
        all_workers_spec = replace(spec, rank=0, world_size=1)
        if lm is not None and not run_coroutine(
            all_servers_accept(make_servers(all_workers_spec), lm)
        ):
            lm = None
        return _build_engine(spec, make_servers(spec), lm)
    command, environment = command_and_environment(spec, lm and lora_server_arguments(lm))
    server = LaunchedSGLang(
        "", timeouts, eos_ids=spec.eos_ids, command=command, environment=environment
    )
    try:
        server.launch()
        return _build_engine(spec, [server], lm)
    except BaseException:
        server.terminate()
        raise


def build_vllm_servers(spec: RolloutSpec) -> RolloutEngine:
    """Connects to running vLLM servers."""
    _check_no_experts(spec)
    config = spec.config.server
    timeouts = Timeouts(config.max_start_wait_time, config.timeout)
    tied_embeddings = bool(load_config(spec.model_path).tie_word_embeddings)
    servers = [
        VLLMServer(
            url,
            timeouts,
            config.api_key_env,
            eos_ids=spec.eos_ids,
            tied_embeddings=tied_embeddings,
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


def _check_no_experts(spec: RolloutSpec) -> None:
    """Raises if the engine would update a mixture of experts, which is not tested with vLLM servers."""
    if receives_weights(spec) and routing_shape(load_config(spec.model_path)) is not None:
        raise RolloutError(
            "a running vLLM server cannot load new weights of a mixture of experts, and "
            f"{spec.model_path} is one; use rollout.name=vllm without rollout.server.urls, or "
            "rollout.name=native"
        )


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


def _group_factory(spec: RolloutSpec, servers: Sequence[HttpServer]) -> Callable[[], UpdateGroup]:
    from hone.rollout.server_group import UpdateGroup

    sglang_servers = [server for server in servers if isinstance(server, SGLangServer)]
    return lambda: UpdateGroup(sglang_servers, spec.device)


def _check_weight_transfer(spec: RolloutSpec, servers: Sequence[HttpServer]) -> None:
    if spec.config.server.weights != "disk" and not isinstance(servers[0], SGLangServer):
        raise RolloutError(
            f"rollout.server.weights={spec.config.server.weights} needs SGLang; for vLLM servers use "
            "rollout.server.weights=disk"
        )


def _build_engine(
    spec: RolloutSpec, servers: Sequence[HttpServer], peft_model: PeftModel | None = None
) -> ServerRollout:
    """Builds the engine; with `peft_model`, the servers get only its adapter."""
    config = spec.config
    _check_weight_transfer(spec, servers)
    path = resolve_model_path(spec.model_path)
    rules = RequestRules.of(load_config(path), spec.eos_ids, spec.tokenizer)
    if peft_model is not None:
        for server in servers:
            assert isinstance(server, SGLangServer)
            server.loads_adapters, server.can_read_weights = True, False
        engine = ServerRollout(
            servers,
            rules,
            {name: tensor.to("meta") for name, tensor in adapter_weights(peft_model)},
            AdapterFolder(config.server.weights_folder, peft_model),
            adapters=True,
            bucket_bytes=bucket_bytes(spec),
            max_attempts=config.server.max_attempts,
        )
    else:
        lm = meta_model(path)
        engine = ServerRollout(
            servers,
            rules,
            dict(lm.named_parameters(remove_duplicate=False)),
            WeightFolder(config.server.weights_folder, path),
            send_tensors=config.server.weights == "tensor",
            make_group=(
                _group_factory(spec, servers) if config.server.weights == "distributed" else None
            ),
            to_checkpoint=partial(checkpoint_tensors, lm),
            keep_weights=config.server.keep_weights,
            bucket_bytes=bucket_bytes(spec),
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
    """Connects to the servers; to generate with an adapter, also loads the current weights into them."""
    await engine.start()
    # The servers' files lack the adapter. A trainer publishes its weights before the first request.
    if spec.current_weights is not None and not isinstance(spec.config, RolloutConfig):
        await engine.begin_update()
        await engine.load(spec.current_weights())
        await engine.commit(0)
