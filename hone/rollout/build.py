"""Builds the engine of `rollout.name`: a built-in name, `pkg.mod:Class` or `file.py:Class`."""

from __future__ import annotations

from collections.abc import Callable

from hone.config.rollout import RolloutConfig
from hone.models.load import load_config
from hone.plugins import PluginError, Table
from hone.rollout.contract import RolloutEngine, RolloutError, RolloutSpec

ENGINES: Table[Callable[[RolloutSpec], RolloutEngine]] = Table(
    "rollout engine",
    {
        "native": "hone.rollout.build:build_native",
        "hf": "hone.rollout.build:build_hf",
        "sglang": "hone.rollout.server_build:build_sglang",
        "vllm": "hone.rollout.vllm_build:build_vllm",
        "scripted": "hone.rollout.build:refuse_scripted",
    },
)
_ENGINE_MEMBERS = sorted(name for name in vars(RolloutEngine) if not name.startswith("_"))


def build_rollout(spec: RolloutSpec) -> RolloutEngine:
    """Builds the engine of `rollout.name`; raises if the engine lacks a member of the contract."""
    engine = ENGINES.get(spec.config.name)(spec)
    if missing := [member for member in _ENGINE_MEMBERS if not hasattr(engine, member)]:
        raise PluginError(
            f"rollout.name={spec.config.name} built a {type(engine).__name__} without "
            f"{', '.join(missing)}; an engine needs every member of hone.rollout.contract.RolloutEngine"
        )
    return engine


def build_native(spec: RolloutSpec) -> RolloutEngine:
    """Builds the native engine.

    The engine has a paged cache on a GPU, in exact mode, or if it records routed experts; otherwise it has
    a slot cache.
    """
    from hone.rollout.native.engine import NativeRollout

    if spec.peers is not None:
        from hone.rollout.native.sharding import build_sharded

        return build_sharded(spec, spec.peers)
    config, policy = spec.config, spec.load_policy()
    record_experts = isinstance(config, RolloutConfig) and config.enable_rollout_routing_replay
    if not config.exact and not record_experts and spec.device.type != "cuda":
        from hone.rollout.native.core import NativeCore

        core = NativeCore(
            policy,
            eos_ids=spec.eos_ids,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            tokenizer=spec.tokenizer,
        )
        return NativeRollout(core)
    from hone.rollout.native.exact_decoder import ExactDecoder
    from hone.rollout.native.paged_core import PagedCore

    exact_decoder = ExactDecoder(policy) if config.exact else None
    if exact_decoder is not None:
        policy.exact = exact_decoder
    paged_core = PagedCore(
        policy,
        eos_ids=spec.eos_ids,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_total_tokens,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tokenizer=spec.tokenizer,
        enforce_eager=config.enforce_eager,
        capture_sizes=config.cudagraph_capture_sizes,
        prefix_caching=config.enable_prefix_caching,
        exact=exact_decoder,
        record_experts=record_experts,
    )
    return NativeRollout(paged_core)


def build_hf(spec: RolloutSpec) -> RolloutEngine:
    from hone.rollout.hf import HFRollout

    return HFRollout(spec.load_policy(), eos_ids=spec.eos_ids, tokenizer=spec.tokenizer)


def refuse_scripted(spec: RolloutSpec) -> RolloutEngine:
    raise RolloutError(
        "rollout.name=scripted needs a script, which is not a config value; in a test, build "
        "hone.rollout.scripted.ScriptedRollout and pass it to LoopRunner"
    )


def check_exact_mode(config: RolloutConfig, model_path: str) -> None:
    """Raises if rollout.exact is set for a model that exact mode does not support."""
    if config.exact:
        from hone.rollout.native.exact_decoder import check_exact_supported

        check_exact_supported(load_config(model_path), model_path)
