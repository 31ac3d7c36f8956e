"""From `rollout.name` to an engine; the native one shares the policy's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hone.config.rollout import RolloutConfig
from hone.models.load import load_config
from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutEngine, RolloutError


def build_rollout(
    config: RolloutConfig,
    policy: PolicyModel,
    tokenizer: Any,
    eos_ids: Sequence[int],
    device: torch.device,
) -> RolloutEngine:
    """The configured engine over this policy."""
    if config.name == "native":
        from hone.rollout.native.engine import NativeRollout

        if config.exact:
            from hone.rollout.native.exact_decoder import ExactDecoder

            policy.exact = exact = ExactDecoder(policy)
            return NativeRollout(_paged_core(config, policy, tokenizer, eos_ids, exact))
        make_core = _paged_core if device.type == "cuda" else _slot_core
        return NativeRollout(make_core(config, policy, tokenizer, eos_ids))
    if config.name == "hf":
        from hone.rollout.hf import HFRollout

        return HFRollout(policy, eos_ids=eos_ids, tokenizer=tokenizer)
    if config.name == "scripted":
        raise RolloutError(
            "rollout.name=scripted needs a script, which no config can hold; in a test, build "
            "hone.rollout.scripted.ScriptedRollout and give it to LoopRunner"
        )
    raise RolloutError(f"rollout.name={config.name} is not available here; use native")


def refuse_inexact(config: RolloutConfig, model_path: str) -> None:
    """Where rollout.exact is asked for: say no to other families, from the model's config alone."""
    if not config.exact:
        return
    from hone.rollout.native.exact_decoder import refuse_unless_exact

    refuse_unless_exact(load_config(model_path), model_path)


def _slot_core(
    config: RolloutConfig, policy: PolicyModel, tokenizer: Any, eos_ids: Sequence[int]
) -> Any:
    from hone.rollout.native.core import NativeCore

    return NativeCore(
        policy,
        eos_ids=eos_ids,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        tokenizer=tokenizer,
    )


def _paged_core(
    config: RolloutConfig,
    policy: PolicyModel,
    tokenizer: Any,
    eos_ids: Sequence[int],
    exact: Any = None,
) -> Any:
    from hone.rollout.native.paged_core import PagedCore

    return PagedCore(
        policy,
        eos_ids=eos_ids,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_total_tokens,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tokenizer=tokenizer,
        enforce_eager=config.enforce_eager,
        capture_sizes=config.cudagraph_capture_sizes,
        prefix_caching=config.enable_prefix_caching,
        exact=exact,
    )
