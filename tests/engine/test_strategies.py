"""`strategy` names an engine: ours, or one from outside the package, in a real tiny run."""

from __future__ import annotations

import json

import pytest
import torch

from hone.config import ConfigError
from hone.config.engine import FSDPConfig
from hone.engine.build import build_strategy
from hone.engine.contract import EngineSpec, Mesh
from hone.engine.engine import Engine
from hone.ops.rows import MicroBatchRule
from hone.plugins import PluginError
from hone.trainer.main_ppo import run
from hone.verl.dialect import load_config
from tests.engine import outside_engine
from tests.engine.outside_engine import HalfAnEngine, PlainEngine
from tests.workers.tasks import config_of, write_model

OUTSIDE = "tests.engine.outside_engine"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def spec_of(model, **changes):
    def rule(ranks):
        return MicroBatchRule(rows=1, tokens=0)

    settings = {
        "head": "policy",
        "model_path": str(model),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "fsdp": FSDPConfig(),
        "train_micro_batch_rule": rule,
        "infer_micro_batch_rule": rule,
        "response_width": 4,
    }
    return EngineSpec(**settings | changes)


def test_both_names_are_our_engine(model):
    for name in ("fsdp", "fsdp2"):
        assert type(build_strategy(name, spec_of(model))) is Engine


def test_a_model_without_an_optimizer_is_frozen(model):
    engine = build_strategy("fsdp2", spec_of(model))
    assert not any(p.requires_grad for p in engine.module.parameters())


def test_an_engine_with_missing_members_is_refused(model):
    with pytest.raises(PluginError, match=r"HalfAnEngine without advance_schedule, device, export"):
        build_strategy(f"{OUTSIDE}:HalfAnEngine", spec_of(model))
    assert HalfAnEngine.mesh == Mesh()


def test_a_mesh_without_every_rank_is_refused(model, monkeypatch):
    monkeypatch.setattr(outside_engine.PlainEngine, "mesh", Mesh(tensor_size=2))
    with pytest.raises(PluginError, match="1 × 2 ranks, but 1 ranks run"):
        build_strategy(f"{OUTSIDE}:PlainEngine", spec_of(model))


def test_an_unknown_engine_is_refused_when_the_config_is_read():
    for key in ("actor_rollout_ref.actor.strategy", "critic.strategy"):
        with pytest.raises(ConfigError, match=f"{key}=fdsp2 is unknown.*'fsdp2'.*pkg.mod:object"):
            load_config([f"{key}=fdsp2"])


def test_a_run_trains_with_an_engine_from_outside(model, tmp_path):
    row = {"data_source": "arithmetic", "prompt": "1+1=", "reward_model": {"ground_truth": 2}}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    folder = tmp_path / "run"
    config = config_of(
        model,
        f"actor_rollout_ref.actor.strategy={OUTSIDE}:PlainEngine",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.use_kl_loss=true",  # the reference follows the actor's strategy
        f"data.train_files={tmp_path / 'rows.jsonl'}",
        "data.val_files=[]",
        "data.prompt_format=raw",
        "trainer.total_training_steps=2",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={folder}",
    )
    run(config)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["actor/lr"] for line in lines] == [1e-2, 1e-2]
    assert (folder / "global_step_2" / "actor" / "plain.pt").is_file()
    assert PlainEngine.mesh == Mesh()
