"""Builds the engine of `rollout.name=sglang`, and of servers that already run (`rollout.server.urls`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hone.config.rollout import RolloutConfig
from hone.event_loop import run_coroutine
from hone.models.load import load_config, resolve_model_path
from hone.models.routing import routing_shape
from hone.rollout.contract import RolloutEngine, RolloutError, RolloutSpec, Sampling
from hone.rollout.http_server import HttpServer, Limits
from hone.rollout.requests import RequestRules
from hone.rollout.server import ServerRollout
from hone.rollout.server_weights import WeightFolder, checkpoint_tensors, meta_model
from hone.rollout.sglang_process import LaunchedSGLang, launch_arguments
from hone.rollout.sglang_server import SGLangServer
from hone.rollout.vllm_openai import VLLMServer

if TYPE_CHECKING:
    from hone.rollout.server_group import UpdateGroup


def build_sglang(spec: RolloutSpec) -> RolloutEngine:
    """Connects to running SGLang servers, or starts one."""
    server = spec.config.server
    limits = Limits(server.max_start_wait_time, server.timeout)
    if server.urls:
        return _engine(
            spec,
            [
                SGLangServer(url, limits, server.api_key_env, eos_ids=spec.eos_ids)
                for url in urls_of(spec)
            ],
        )
    command, environment = launch_arguments(spec)
    launched = LaunchedSGLang(
        "", limits, eos_ids=spec.eos_ids, command=command, environment=environment
    )
    try:
        launched.launch()
        return _engine(spec, [launched])
    except BaseException:
        launched.end()
        raise


def build_vllm_servers(spec: RolloutSpec) -> RolloutEngine:
    """Connects to running vLLM servers."""
    refuse_experts(spec)
    server = spec.config.server
    limits = Limits(server.max_start_wait_time, server.timeout)
    tied = bool(load_config(spec.model_path).tie_word_embeddings)
    return _engine(
        spec,
        [
            VLLMServer(url, limits, server.api_key_env, eos_ids=spec.eos_ids, tied=tied)
            for url in urls_of(spec)
        ],
    )


def refuse_experts(spec: RolloutSpec) -> None:
    """Raises for a mixture of experts: no update of its weights was shown to be right in vLLM."""
    if routing_shape(load_config(spec.model_path)) is not None:
        raise RolloutError(
            f"rollout.name={spec.config.name} takes no new weights of mixtures of experts, and "
            f"{spec.model_path} is one; use rollout.name=native"
        )


def urls_of(spec: RolloutSpec) -> list[str]:
    """Returns the servers of this rank; no server has two ranks, because each rank updates its own."""
    urls = [url.rstrip("/").removesuffix("/v1") for url in spec.config.server.urls]
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise RolloutError(
                f"rollout.server.urls: {url!r} does not begin with http:// or https://"
            )
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


def _refuse_transfer(spec: RolloutSpec, servers: Sequence[HttpServer]) -> None:
    if spec.config.server.weights != "disk" and not isinstance(servers[0], SGLangServer):
        raise RolloutError(
            f"rollout.server.weights={spec.config.server.weights} is SGLang's; a vLLM server loads weights "
            "with rollout.server.weights=disk"
        )


def _engine(spec: RolloutSpec, servers: Sequence[HttpServer]) -> ServerRollout:
    config = spec.config
    _refuse_transfer(spec, servers)
    path = resolve_model_path(spec.model_path)
    lm = meta_model(path)
    bucket = 2**30
    if isinstance(config, RolloutConfig):
        bucket = config.checkpoint_engine.bucket_bytes
    engine = ServerRollout(
        servers,
        RequestRules.of(load_config(path), spec.eos_ids, spec.tokenizer),
        dict(lm.named_parameters(remove_duplicate=False)),
        WeightFolder(config.server.weights_folder, path),
        direct=config.server.weights == "tensor",
        group=_group_of(spec, servers) if config.server.weights == "distributed" else None,
        renamed=partial(checkpoint_tensors, lm),
        keep_weights=config.server.keep_weights,
        bucket_bytes=bucket,
        max_attempts=config.server.max_attempts,
    )
    try:
        run_coroutine(engine.start())
        if isinstance(config, RolloutConfig) and config.calculate_log_probs:
            temperature = config.temperature if config.do_sample else 0.0
            engine.refuse_training(
                Sampling(1, temperature, 0, config.top_k, config.top_p, config.min_p)
            )
    except BaseException:
        run_coroutine(engine.close())
        raise
    return engine
