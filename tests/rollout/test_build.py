"""From `rollout.name` to an engine."""

from __future__ import annotations

import asyncio

import pytest
import torch

from hone.config import load_config, replace
from hone.rollout.build import build_rollout
from hone.rollout.contract import RolloutEngine, RolloutError
from hone.rollout.hf import HFRollout
from hone.rollout.native.engine import NativeRollout

from .models import EOS, TOKENIZER, policy


def build(name: str) -> RolloutEngine:
    config = replace(load_config([]), "actor_rollout_ref.rollout.name", name)
    config = config.actor_rollout_ref.rollout
    return build_rollout(config, policy(), TOKENIZER, (EOS,), torch.device("cpu"))


def test_native_and_hf_are_built_over_the_policy() -> None:
    for name, kind in (("native", NativeRollout), ("hf", HFRollout)):
        engine = build(name)
        assert isinstance(engine, kind)
        assert isinstance(engine, RolloutEngine)
        asyncio.run(engine.close())


def test_scripted_says_where_its_script_goes() -> None:
    with pytest.raises(RolloutError, match="ScriptedRollout"):
        build("scripted")
