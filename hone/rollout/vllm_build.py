"""Builds the vLLM engine: interpreter, arguments of `vllm.LLM`, devices and environment."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import torch

from hone.config.rollout import RolloutConfig
from hone.event_loop import run_coroutine
from hone.models.load import load_config, resolve_model_path
from hone.models.routing import routing_shape
from hone.rollout.contract import RolloutEngine, RolloutError, RolloutSpec
from hone.rollout.requests import RequestRules
from hone.rollout.server_build import build_vllm_servers, takes_updates
from hone.rollout.server_weights import meta_parameters
from hone.rollout.vllm import VLLMRollout
from hone.rollout.vllm_adapters import AdapterVLLM, engine_arguments
from hone.rollout.vllm_experts import FAMILIES as EXPERT_FAMILIES
from hone.rollout.vllm_process import EngineProcess, Launch
from hone.types import Fields, Settings

log = logging.getLogger(__name__)

INSTALL = (
    "install it with `pip install 'hone-rl[vllm]'`, or build an interpreter that has it with "
    "`make setup-vllm` and set rollout.vllm.python=.venv-vllm/bin/python"
)
_RESERVED_ARGUMENTS = {
    "model": "actor_rollout_ref.model.path",
    "dtype": "the dtype of the actor",
    "logprobs_mode": "the log-probs of the contract",
    "skip_tokenizer_init": "token ids",
    "worker_extension_cls": "hone's extension",
    "weight_transfer_config": "hone's transfer of weights",
    "async_scheduling": "exact weight versions",
    "data_parallel_size": "rollout.data_parallel_size",
}
"""Arguments of `vllm.LLM` that hone sets, and what determines them."""


@functools.cache
def has_vllm(python: str | None) -> bool:
    """Whether an interpreter has vLLM; None is this one."""
    if python is None:
        return find_spec("vllm") is not None
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        return subprocess.run([python, "-c", code], timeout=60, check=False).returncode == 0
    except OSError as error:
        raise RolloutError(
            f"rollout.vllm.python={python} does not run ({error}); {INSTALL}"
        ) from error


def build_vllm(spec: RolloutSpec) -> RolloutEngine:
    """Starts vLLM and returns the engine; raises if the interpreter has no vLLM."""
    config = spec.config
    if config.server.urls:
        return build_vllm_servers(spec)
    python = config.vllm.python
    if not has_vllm(python):
        place = f"rollout.vllm.python={python}" if python else "this interpreter"
        raise RolloutError(f"rollout.name=vllm, but {place} has no vLLM; {INSTALL}")
    model = load_config(spec.model_path)
    experts = routing_shape(model) is not None
    if experts and takes_updates(spec) and model.model_type not in EXPERT_FAMILIES:
        raise RolloutError(
            f"rollout.name=vllm loads new weights of {', '.join(sorted(EXPERT_FAMILIES))} among mixtures of "
            f"experts, and {spec.model_path} is {model.model_type}; use rollout.name=native"
        )
    rules = RequestRules.of(model, spec.eos_ids, spec.tokenizer)
    lm = None if experts else _published_adapters(spec)
    lora_arguments = (engine_arguments(lm) if lm is not None else None) or {}
    launches = [
        make_launch(spec, rules.max_positions, i, lora_arguments)
        for i in range(config.data_parallel_size)
    ]
    bucket_bytes = 2**30
    if isinstance(config, RolloutConfig):
        bucket_bytes = config.checkpoint_engine.bucket_bytes
    names = ["vLLM"] if len(launches) == 1 else [f"vLLM {i}" for i in range(len(launches))]
    processes = [EngineProcess(*pair) for pair in zip(launches, names, strict=True)]
    if lm is not None and lora_arguments:
        engine: VLLMRollout = AdapterVLLM(processes, rules, lm, device=spec.device)
    else:
        engine = VLLMRollout(
            processes,
            rules,
            meta_parameters(spec.model_path),
            bucket_bytes=bucket_bytes,
            device=spec.device,
            current_weights=spec.current_weights,
        )
    try:
        run_coroutine(_start(engine, spec))
    except BaseException:
        run_coroutine(engine.close())
        raise
    return engine


async def _start(engine: VLLMRollout, spec: RolloutSpec) -> None:
    """Starts the processes and loads the current weights, which may differ from the model's files."""
    await engine.start()
    if spec.current_weights is not None and not engine.traits.adapters:
        await engine.begin_update()
        await engine.load(spec.current_weights())
        await engine.commit(0)


def _published_adapters(spec: RolloutSpec) -> Any:
    """Returns the policy's PEFT model if only its adapters are published.

    On a GPU shared with the actor, vLLM frees its weights while the actor trains, and all weights are
    published on waking: then merged weights decode faster. Adapters are files on this machine, which
    workers on another machine cannot read.
    """
    config = spec.config
    if config.vllm.weights == "distributed":
        return None
    shares_gpu = spec.device.type == "cuda" and spec.current_weights is not None
    if shares_gpu and isinstance(config, RolloutConfig) and config.free_cache_engine:
        return None
    return spec.load_policy().lm if spec.adapters else None


def make_launch(
    spec: RolloutSpec, max_positions: int | None, index: int, extra_arguments: Fields | None = None
) -> Launch:
    """Returns the launch arguments of data-parallel engine `index`."""
    config = spec.config
    cuda = spec.device.type == "cuda"
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    devices = _visible_devices(spec.device, tensor * pipeline, index) if cuda else None
    if devices is not None and len(devices) < tensor * pipeline:
        log.info(
            "vLLM runs on %d device(s), fewer than rollout.tensor_model_parallel_size=%d times "
            "pipeline_model_parallel_size=%d",
            len(devices),
            tensor,
            pipeline,
        )
        tensor = pipeline = 1
        devices = devices[:1]
    max_total_tokens = config.max_total_tokens
    engine: Fields = {
        "model": resolve_model_path(spec.model_path),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "max_model_len": min(max_total_tokens, max_positions or max_total_tokens),
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enforce_eager": config.enforce_eager or not cuda,
        "enable_prefix_caching": config.enable_prefix_caching,
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": 0,
    }
    if cuda:
        engine |= {
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_sleep_mode": isinstance(config, RolloutConfig) and config.free_cache_engine,
        }
        if config.cudagraph_capture_sizes:
            engine["cudagraph_capture_sizes"] = list(config.cudagraph_capture_sizes)
    if tensor * pipeline == 1:
        engine["distributed_executor_backend"] = "uni"
    engine |= (extra_arguments or {}) | _user_arguments(config.engine_kwargs.vllm)
    engine |= {
        "skip_tokenizer_init": True,
        "logprobs_mode": "raw_logprobs",
        "async_scheduling": False,
    }
    return Launch(
        config.vllm.python or sys.executable,
        engine,
        make_environment(cuda, devices),
        config.vllm.start_timeout_s,
        config.vllm.stall_timeout_s,
        config.vllm.weights,
    )


def _user_arguments(arguments: Settings) -> Fields:
    """Returns `engine_kwargs.vllm` without None; raises for reserved arguments."""
    for name, source in _RESERVED_ARGUMENTS.items():
        if name in arguments:
            raise RolloutError(
                f"rollout.engine_kwargs.vllm.{name} cannot be set: it is determined by {source}"
            )
    return {name: value for name, value in arguments.items() if value is not None}


def _visible_devices(device: torch.device, size: int, index: int) -> list[str]:
    """Returns the GPUs of engine `index`, for CUDA_VISIBLE_DEVICES."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if names == [""]:
        names = [str(i) for i in range(torch.cuda.device_count())]
    first = (device.index or 0) + index * size
    return names[first : first + size] or names[device.index or 0 :][:1]


def make_environment(cuda: bool, devices: list[str] | None) -> dict[str, str]:
    """Returns the environment variables of one engine, whose processes connect over loopback."""
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    defaults = {
        "VLLM_HOST_IP": "127.0.0.1",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
    }
    if not cuda:
        defaults |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled with enforce_eager
        }
    environment |= {name: value for name, value in defaults.items() if name not in os.environ}
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return environment
