"""From `rollout.name` to an engine; the native one shares the policy's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hone.config.rollout import RolloutConfig
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
        from hone.rollout.native.core import NativeCore
        from hone.rollout.native.engine import NativeRollout

        core = NativeCore(
            policy,
            eos_ids=eos_ids,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            tokenizer=tokenizer,
        )
        return NativeRollout(core)
    if config.name == "hf":
        from hone.rollout.hf import HFRollout

        return HFRollout(policy, eos_ids=eos_ids, tokenizer=tokenizer)
    if config.name == "scripted":
        raise RolloutError(
            "rollout.name=scripted needs a script, which no config can hold; in a test, build "
            "hone.rollout.scripted.ScriptedRollout and give it to LoopRunner"
        )
    raise RolloutError(f"rollout.name={config.name} is not available here; use native")
