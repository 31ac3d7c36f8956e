"""Builds the engine of `rollout.name`: a built-in name, `pkg.mod:Class` or `file.py:Class`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from hone.config.rollout import RolloutConfig
from hone.models.load import load_config
from hone.plugins import PluginError, Table
from hone.rollout.contract import RolloutEngine, RolloutError, RolloutSpec

if TYPE_CHECKING:
    from hone.models.policy import PolicyModel
    from hone.rollout.native.core import NativeCore
    from hone.rollout.native.decoder import PrepackedDecoder
    from hone.rollout.native.paged_core import PagedCore

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

    The engine has the core of paged_core.py on a GPU, in exact mode, or if it records routed experts;
    otherwise it has the core of core.py.
    """
    from hone.rollout.native.engine import NativeRollout

    if spec.peers is not None:
        from hone.rollout.native.sharding import build_sharded

        return build_sharded(spec, spec.peers)
    config, policy = spec.config, spec.load_policy()
    record_experts = isinstance(config, RolloutConfig) and config.enable_rollout_routing_replay
    if not config.exact and not record_experts and spec.device.type != "cuda":
        return NativeRollout(build_cpu_core(spec, policy), keep_stale_kv=spec.keeps_stale_kv)
    exact_decoder = None
    if config.exact:
        from hone.rollout.native.exact_decoder import ExactDecoder

        policy.exact = exact_decoder = ExactDecoder(policy)
    build_core = paged_core_factory(spec, policy)
    core = build_core(
        enforce_eager=config.enforce_eager, exact=exact_decoder, record_experts=record_experts
    )
    return NativeRollout(core, keep_stale_kv=spec.keeps_stale_kv)


def build_cpu_core(
    spec: RolloutSpec, policy: PolicyModel, forward: PrepackedDecoder | None = None
) -> NativeCore:
    """Builds the core for a CPU; `forward` replaces the default forward of the policy."""
    from hone.rollout.native.core import NativeCore

    return NativeCore(
        policy,
        eos_ids=spec.eos_ids,
        max_num_seqs=spec.config.max_num_seqs,
        max_num_batched_tokens=spec.config.max_num_batched_tokens,
        tokenizer=spec.tokenizer,
        forward=forward,
    )


def paged_core_factory(spec: RolloutSpec, policy: PolicyModel) -> partial[PagedCore]:
    """Returns `PagedCore` with the arguments that the spec determines."""
    from hone.rollout.native.paged_core import PagedCore

    config = spec.config
    return partial(
        PagedCore,
        policy,
        eos_ids=spec.eos_ids,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_total_tokens,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tokenizer=spec.tokenizer,
        capture_sizes=config.cudagraph_capture_sizes,
        prefix_caching=config.enable_prefix_caching,
    )


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
