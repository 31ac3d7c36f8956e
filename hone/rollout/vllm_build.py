"""Builds the vLLM engine; chooses interpreter, devices, environment and the arguments of `vllm.LLM`."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from hone.config.rollout import RolloutConfig
from hone.event_loop import run_coroutine
from hone.models.load import load_config
from hone.models.lora import is_plain_lora
from hone.models.paths import resolve_model_path
from hone.models.routing import routing_shape
from hone.rollout.contract import RolloutEngine, RolloutError, RolloutSpec
from hone.rollout.requests import RequestRules
from hone.rollout.server_build import bucket_bytes, build_vllm_servers, receives_weights
from hone.rollout.server_weights import UPDATABLE_MODEL_TYPES, AdapterFolder, meta_model
from hone.rollout.vllm import VLLMRollout
from hone.rollout.vllm_process import EngineProcess, LaunchArguments
from hone.types import Fields, Settings

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger(__name__)

_SUPPORTED_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM allows for `max_lora_rank`."""
_INSTALL_HINT = (
    "install it with `pip install 'hone-rl[vllm]'`, or build an interpreter that has it with "
    "`make setup-vllm` and set rollout.vllm.python=.venv-vllm/bin/python"
)
_RESERVED_ARGUMENTS = {
    "model": "actor_rollout_ref.model.path",
    "dtype": "the dtype of the actor",
    "logprobs_mode": "hone, which replaces the log-probs of vLLM's sampler",
    "skip_tokenizer_init": "hone, which sends token ids",
    "worker_extension_cls": "hone, which extends vLLM's workers",
    "weight_transfer_config": "hone, which transfers new weights",
    "async_scheduling": "hone, which needs the exact weight version of every token",
    "data_parallel_size": "rollout.data_parallel_size",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "pipeline_parallel_size": "rollout.pipeline_model_parallel_size",
}
"""Arguments of `vllm.LLM` that hone sets, and what determines them."""


@functools.cache
def has_vllm(python: str | None) -> bool:
    """Whether the interpreter `python` has vLLM; None is the current interpreter."""
    if python is None:
        return find_spec("vllm") is not None
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        return subprocess.run([python, "-c", code], timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RolloutError(
            f"rollout.vllm.python={python} does not run ({error}); {_INSTALL_HINT}"
        ) from error


def build_vllm(spec: RolloutSpec) -> RolloutEngine:
    """Starts vLLM and returns the engine; raises if the interpreter has no vLLM."""
    config = spec.config
    if config.server.urls:
        return build_vllm_servers(spec)
    python = config.vllm.python
    if not has_vllm(python):
        interpreter = f"rollout.vllm.python={python}" if python else "this interpreter"
        raise RolloutError(f"rollout.name=vllm, but {interpreter} has no vLLM; {_INSTALL_HINT}")
    model_config = load_config(spec.model_path)
    model_type, has_experts = model_config.model_type, routing_shape(model_config) is not None
    if has_experts and receives_weights(spec) and model_type not in UPDATABLE_MODEL_TYPES:
        raise RolloutError(
            f"{spec.model_path} is a mixture of experts of the type {model_type}; rollout.name=vllm can load "
            f"new weights only into {', '.join(sorted(UPDATABLE_MODEL_TYPES))}; use rollout.name=native"
        )
    rules = RequestRules.of(model_config, spec.eos_ids, spec.tokenizer)
    lm = None if has_experts else _peft_model_for_adapters(spec)
    lora_arguments = None if lm is None else lora_engine_arguments(lm)
    folder = None if lm is None or lora_arguments is None else AdapterFolder(None, lm)
    launches = [
        make_launch_arguments(spec, rules.max_positions, i, lora_arguments)
        for i in range(config.data_parallel_size)
    ]
    lm_parameters = meta_model(spec.model_path).named_parameters(remove_duplicate=False)
    names = ["vLLM"] if len(launches) == 1 else [f"vLLM {i}" for i in range(len(launches))]
    engine = VLLMRollout(
        [EngineProcess(*arguments) for arguments in zip(launches, names, strict=True)],
        rules,
        folder.parameters if folder is not None else dict(lm_parameters),
        bucket_bytes=bucket_bytes(spec),
        device=spec.device,
        current_weights=spec.current_weights if folder is None else None,
        adapter_folder=folder,
        keep_stale_kv=spec.keeps_stale_kv,
    )

    async def start() -> None:
        await engine.start()
        # The current weights may differ from the model's files.
        if spec.current_weights is not None and folder is None:
            await engine.begin_update()
            await engine.load(spec.current_weights())
            await engine.commit(0)

    try:
        run_coroutine(start())
    except BaseException:
        run_coroutine(engine.close())
        raise
    return engine


def _peft_model_for_adapters(spec: RolloutSpec) -> PeftModel | None:
    """Returns the policy's PEFT model if vLLM should load only its adapter, else None.

    There are two cases in which vLLM gets merged weights instead. If vLLM frees its weights on a GPU that the
    actor uses too, vLLM needs all weights when it wakes up, and merged weights decode faster. If vLLM has
    workers on other machines, these workers cannot read the adapter's folder on this machine.
    """
    config = spec.config
    shares_gpu = spec.device.type == "cuda" and spec.current_weights is not None
    frees_weights = isinstance(config, RolloutConfig) and config.free_cache_engine
    if config.vllm.weights == "distributed" or (shares_gpu and frees_weights):
        return None
    return spec.load_policy().lm if spec.has_adapters else None


def lora_engine_arguments(lm: PeftModel) -> Fields | None:
    """Returns the arguments of `vllm.LLM` for an adapter; None if vLLM does not support the adapter."""
    rank = lm.peft_config[lm.active_adapter].r
    if rank > _SUPPORTED_LORA_RANKS[-1] or not is_plain_lora(lm):
        return None
    max_rank = min(allowed for allowed in _SUPPORTED_LORA_RANKS if allowed >= rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank}


def make_launch_arguments(
    spec: RolloutSpec, max_positions: int | None, index: int, lora_arguments: Fields | None = None
) -> LaunchArguments:
    """Returns the launch arguments of the process with data-parallel rank `index`."""
    config = spec.config
    on_gpu = spec.device.type == "cuda"
    tensor_parallel_size = config.tensor_model_parallel_size
    pipeline_parallel_size = config.pipeline_model_parallel_size
    num_gpus = tensor_parallel_size * pipeline_parallel_size
    devices = _visible_devices(spec.device, num_gpus, index) if on_gpu else None
    if devices is not None and len(devices) < num_gpus:
        sizes = (len(devices), tensor_parallel_size, pipeline_parallel_size, num_gpus)
        log.info(
            "vLLM runs on one device: it can use %d, and rollout.tensor_model_parallel_size=%d times "
            "pipeline_model_parallel_size=%d needs %d",
            *sizes,
        )
        num_gpus = tensor_parallel_size = pipeline_parallel_size = 1
        devices = devices[:1]
    max_total_tokens = config.max_total_tokens
    llm_arguments: Fields = {
        "model": resolve_model_path(spec.model_path),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "max_model_len": min(max_total_tokens, max_positions or max_total_tokens),
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enforce_eager": config.enforce_eager or not on_gpu,
        "enable_prefix_caching": config.enable_prefix_caching,
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "scheduling_policy": "priority",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": 0,
    }
    if on_gpu:
        llm_arguments |= {
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_sleep_mode": isinstance(config, RolloutConfig) and config.free_cache_engine,
        }
        if config.cudagraph_capture_sizes:
            llm_arguments["cudagraph_capture_sizes"] = list(config.cudagraph_capture_sizes)
    if num_gpus == 1:
        llm_arguments["distributed_executor_backend"] = "uni"
    llm_arguments |= (lora_arguments or {}) | _user_arguments(config.engine_kwargs.vllm)
    llm_arguments |= {
        "skip_tokenizer_init": True,
        "logprobs_mode": "raw_logprobs",
        "async_scheduling": False,
    }
    return LaunchArguments(
        config.vllm.python or sys.executable,
        llm_arguments,
        make_environment(on_gpu, devices),
        config.vllm.start_timeout_s,
        config.vllm.stall_timeout_s,
        config.vllm.weights,
    )


def _user_arguments(arguments: Settings) -> Fields:
    """Returns `engine_kwargs.vllm` without values of None; raises for a reserved argument."""
    for name, source in _RESERVED_ARGUMENTS.items():
        if name in arguments:
            raise RolloutError(
                f"rollout.engine_kwargs.vllm.{name} cannot be set: it is determined by {source}"
            )
    return {name: value for name, value in arguments.items() if value is not None}


def _visible_devices(device: torch.device, num_gpus: int, index: int) -> list[str]:
    """Returns the GPUs of data-parallel rank `index`, as CUDA_VISIBLE_DEVICES names them."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if names == [""]:
        names = [str(i) for i in range(torch.cuda.device_count())]
    first = (device.index or 0) + index * num_gpus
    return names[first : first + num_gpus] or names[device.index or 0 :][:1]


def make_environment(on_gpu: bool, devices: list[str] | None) -> dict[str, str]:
    """Returns additional environment variables of one process; its workers connect over loopback."""
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
    if not on_gpu:
        defaults |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",  # a CPU engine is eager (enforce_eager) and compiles nothing
        }
    environment |= {name: value for name, value in defaults.items() if name not in os.environ}
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return environment
