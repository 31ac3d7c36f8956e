"""From `rollout.name` to an engine of hone, or to a custom engine in a tiny training run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.config import ConfigError, replace
from hone.plugins import PluginError
from hone.rollout.build import build_rollout
from hone.rollout.contract import RolloutEngine, RolloutError, RolloutSpec
from hone.rollout.hf import HFRollout
from hone.rollout.native.engine import NativeRollout
from hone.trainer.command_line import check_plan
from hone.verl.dialect import compose, load_config

from .models import EOS, TOKENIZER, policy

OUTSIDE = f"{Path(__file__).parent / 'outside_engine.py'}"


def spec_of(name: str, **changes: Any) -> RolloutSpec:
    config = replace(load_config([]), "actor_rollout_ref.rollout.name", name)
    settings: dict[str, Any] = {
        "config": config.actor_rollout_ref.rollout,
        "model_path": "unused",
        "load_policy": policy,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "tokenizer": TOKENIZER,
        "eos_ids": (EOS,),
    }
    return RolloutSpec(**settings | changes)


def test_native_and_hf_are_built_over_the_policy() -> None:
    for name, kind in (("native", NativeRollout), ("hf", HFRollout)):
        engine = build_rollout(spec_of(name))
        assert isinstance(engine, kind)
        assert isinstance(engine, RolloutEngine)
        assert engine.traits.uses_policy_module
        asyncio.run(engine.close())


def test_scripted_says_where_its_script_goes() -> None:
    with pytest.raises(RolloutError, match="ScriptedRollout"):
        build_rollout(spec_of("scripted"))


def test_an_engine_that_lacks_members_is_refused_in_one_sentence() -> None:
    with pytest.raises(PluginError, match=r"HalfAnEngine without abort, begin_update, close"):
        build_rollout(spec_of(f"{OUTSIDE}:HalfAnEngine"))


def test_an_unknown_engine_is_refused_when_the_config_is_read() -> None:
    override = "actor_rollout_ref.rollout.name=natve"
    with pytest.raises(ConfigError, match=f"{override}: unknown rollout engine.*mean 'native'"):
        compose([override], extra_checks=check_plan)


def test_a_run_trains_with_an_engine_of_its_own_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.models.load import load_causal_lm
    from hone.plugins import load_object
    from hone.trainer.main_ppo import run
    from tests.workers.tasks import config_of, write_model

    engine = load_object(f"{OUTSIDE}:OwnWeightsEngine")
    commit, versions, engines = engine.commit, [], set()

    async def recorded(self: Any, version: int) -> None:
        await commit(self, version)
        versions.append(version)
        engines.add(self)

    monkeypatch.setattr(engine, "commit", recorded)
    row = {"data_source": "arithmetic", "prompt": "1+1=", "reward_model": {"ground_truth": 2}}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    config = config_of(
        write_model(tmp_path / "model"),
        f"actor_rollout_ref.rollout.name={OUTSIDE}:OwnWeightsEngine",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={tmp_path / 'rows.jsonl'}",
        "data.val_files=[]",
        "data.prompt_format=raw",
        "trainer.total_training_steps=2",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    )
    run(config)
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert versions == [0, 1, 2]  # at the start, and after each step
    assert lines[0]["perf/weight_bytes"] > 0
    assert max(abs(line["rollout_corr/kl"]) for line in lines) < 1e-5
    (built,) = engines
    trained = load_causal_lm(
        str(tmp_path / "run/global_step_2/actor/huggingface"), dtype=torch.float32
    )
    for name, own in trained.named_parameters():
        assert torch.equal(own, built.lm.get_parameter(name)), name
