"""What the engines of a run do not support in its models and layouts is refused before a model loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hone.config import ConfigError
from hone.models.families import UnsupportedModel
from hone.models.tiny import tiny_lm
from hone.plugins import PluginError
from tests.trainer.ppo.dry_runs import dry_run, no_models  # noqa: F401
from tests.trainer.runs import Task


@pytest.mark.parametrize("role", ["actor_rollout_ref.actor", "critic"])
def test_an_unknown_optimizer_is_refused_before_a_model_loads(
    task: Task, tmp_path: Path, role: str
) -> None:
    overrides = ("algorithm.adv_estimator=gae", f"{role}.optim.optimizer=AdmW")
    with pytest.raises(PluginError, match=r"AdmW was not found \(optimizer_impl=torch\.optim\)"):
        dry_run(task, tmp_path / "run", *overrides)


def test_every_model_of_prime_is_checked(task: Task, tmp_path: Path) -> None:
    config = json.loads((task.model / "config.json").read_text())
    for name, model_type in (("empty", config["model_type"]), ("mamba", "mamba")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": model_type}))
    for changed in ("path", "ref_path"):
        for folder, problem in (("empty", "no weights"), ("mamba", "mamba model")):
            paths = {"path": task.model, "ref_path": task.model, changed: tmp_path / folder}
            models = [f"reward_model.model.{key}={path}" for key, path in paths.items()]
            prime = ("algorithm.adv_estimator=rloo", "reward_model.enable=true", *models)
            with pytest.raises(UnsupportedModel, match=f"{folder} .*{problem}"):
                dry_run(task, tmp_path / "run", *prime, "reward_model.type=prime")


def test_a_folder_without_weights_is_refused_before_models_load(task: Task, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(task.model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(UnsupportedModel, match=r"it has config\.json and no weights"):
        dry_run(task, tmp_path / "run", f"actor_rollout_ref.model.path={bare}")
    weights = next(task.model.glob("*.safetensors"))
    (bare / weights.name).write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UnsupportedModel, match="is truncated or damaged"):
        dry_run(task, tmp_path / "run", f"actor_rollout_ref.model.path={bare}")


ROLES = {
    "the actor": ("actor_rollout_ref.actor.fsdp_config", ()),
    "the reference": (
        "actor_rollout_ref.ref.fsdp_config",
        ("actor_rollout_ref.actor.use_kl_loss=true",),
    ),
    "a critic from the actor's model": (
        "critic.model.fsdp_config",
        ("algorithm.adv_estimator=gae",),
    ),
}


@pytest.mark.parametrize("size", ["tensor_parallel_size", "ulysses_sequence_parallel_size"])
@pytest.mark.parametrize("role", ROLES)
def test_a_layout_that_the_model_of_a_role_does_not_split_into_is_refused(
    task: Task, tmp_path: Path, role: str, size: str
) -> None:
    block, overrides = ROLES[role]
    ranks = ("trainer.n_gpus_per_node=16", "data.train_batch_size=16")
    ranks += ("ray_kwargs.ray_init.num_cpus=16",)
    with pytest.raises(UnsupportedModel, match=f"{size}=16"):
        dry_run(task, tmp_path / "run", *ranks, f"{block}.{size}=16", *overrides)


@pytest.mark.parametrize("family", ["phi3", "qwen3_moe"])
def test_a_family_that_the_rollout_does_not_shard_is_refused_before_workers_start(
    task: Task, tmp_path: Path, family: str
) -> None:
    """Fused projections, and a mixture of experts."""
    other = tmp_path / "other"
    shutil.copytree(task.model, other)
    config = tiny_lm(42, hidden=32, mlp=48, family=family).config
    config.save_pretrained(other)
    ranks = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    sentence = f"is a {family} model, which the native engine does not shard"
    with pytest.raises(UnsupportedModel, match=sentence):
        dry_run(task, tmp_path / "run", *ranks, f"actor_rollout_ref.model.path={other}")


@pytest.mark.parametrize("role", ["actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"])
def test_what_megatron_does_not_train_is_refused_before_workers_start(
    task: Task, tmp_path: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hone.config.checks.find_spec", lambda name: object())
    windowed = tmp_path / "windowed"
    shutil.copytree(task.model, windowed)
    config = json.loads((windowed / "config.json").read_text())
    (windowed / "config.json").write_text(json.dumps(config | {"use_sliding_window": True}))
    roles = ("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true")
    roles += ("actor_rollout_ref.ref.strategy=fsdp2", f"{role}.strategy=megatron")
    with pytest.raises(
        UnsupportedModel, match="has use_sliding_window, which strategy=megatron does not"
    ):
        dry_run(task, tmp_path / "run", *roles, f"actor_rollout_ref.model.path={windowed}")
    override = f"{role}.megatron.override_transformer_config={{hidden_dropout: 0.1}}"
    with pytest.raises(ConfigError, match="has hidden_dropout, which hone sets"):
        dry_run(task, tmp_path / "run", *roles, override)


def test_overrides_that_megatron_does_not_read_are_one_line(
    task: Task,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("hone.config.checks.find_spec", lambda name: object())
    roles = ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
    settings = [f"{role}.strategy=megatron" for role in roles]
    key = "megatron.override_transformer_config.moe_permute_fusion"
    settings += [f"+{role}.{key}=true" for role in roles]
    dry_run(task, tmp_path / "run", "actor_rollout_ref.actor.use_kl_loss=true", *settings)
    assert capsys.readouterr().out.count("has moe_permute_fusion, which has no effect") == 1
