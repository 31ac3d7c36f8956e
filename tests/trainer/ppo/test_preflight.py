"""What can be known before a model loads is told then, all at once."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from hone import cli
from hone.config import ConfigError
from hone.models.families import UnsupportedModel
from hone.models.tiny import tiny_lm
from hone.plugins import PluginError
from hone.tracking import TrackerError

from ..runs import Task
from .dry_runs import MULTI_TURN, TOOL_LOOP, dry_run, no_models, problems_of  # noqa: F401


def test_every_problem_is_told_at_once_with_exit_code_2(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools:\n  - class_name: no_such_package.Tool\n    config: {}\n")
    overrides = ("data.max_prompt_length=2", f"{MULTI_TURN}.tool_config_path={tools}", TOOL_LOOP)
    assert cli.main(["train", "--dry-run", *task.overrides(tmp_path / "run", *overrides)]) == 2
    output = capsys.readouterr().err
    assert "prompts have more than data.max_prompt_length=2 tokens, the longest" in output
    assert "no_such_package" in output


def test_a_response_that_exceeds_the_positions_of_the_model_is_refused_with_what_fits(
    task: Task, tmp_path: Path
) -> None:
    (problem,) = problems_of(task, tmp_path, "data.max_response_length=10000")
    assert "positions; use data.max_response_length=" in problem
    fits = int(problem.rpartition("data.max_response_length=")[2].split()[0])
    dry_run(task, tmp_path / "run", f"data.max_response_length={fits}")


@pytest.mark.parametrize("prompt_tokens_left", [1, 0, -1_000_000])
def test_a_response_that_leaves_no_room_for_the_prompts_is_blamed(
    task: Task, tmp_path: Path, prompt_tokens_left: int
) -> None:
    positions = json.loads((task.model / "config.json").read_text())["max_position_embeddings"]
    lengths = (positions - prompt_tokens_left, max(1, prompt_tokens_left))
    keys = ("data.max_response_length", "data.max_prompt_length")
    overrides = [f"{key}={length}" for key, length in zip(keys, lengths, strict=True)]
    (problem,) = problems_of(task, tmp_path, *overrides)
    assert f"data.max_response_length={lengths[0]} exceed the model's" in problem
    assert "raise it" not in problem


@pytest.mark.parametrize("role", ["actor_rollout_ref.actor", "critic"])
def test_an_unknown_optimizer_is_refused_before_a_model_loads(
    task: Task, tmp_path: Path, role: str
) -> None:
    overrides = ("algorithm.adv_estimator=gae", f"{role}.optim.optimizer=AdmW")
    with pytest.raises(PluginError, match=r"AdmW was not found \(optimizer_impl=torch\.optim\)"):
        dry_run(task, tmp_path / "run", *overrides)


def test_a_tracker_without_its_package_is_refused_before_a_model_loads(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrackerError, match=r"pip install 'hone-rl\[wandb\]'"):
        dry_run(task, tmp_path / "run", "trainer.logger=[console,wandb]")


def test_positions_that_the_user_raises_count(task: Task, tmp_path: Path) -> None:
    key = "actor_rollout_ref.model.override_config.max_position_embeddings"
    dry_run(task, tmp_path / "run", "data.max_response_length=10000", f"{key}=20000")


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


def test_a_curriculum_without_a_rule_is_said(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("reward_model.enable=true", f"reward_model.model.path={task.model}")
    blank = ("reward_model.type=judge", "reward_model.reward_manager=blank")
    dry_run(task, tmp_path / "run", "curriculum_learning.enable=true", *model, *blank)
    assert "curriculum learning removes no group unless the agent loop" in capsys.readouterr().out


def test_prompts_that_are_truncated_are_not_too_long(task: Task, tmp_path: Path) -> None:
    dry_run(task, tmp_path / "run", "data.max_prompt_length=2", "data.truncation=left")


@pytest.mark.parametrize(
    ("estimator", "n", "warned"),
    [("grpo", 1, True), ("opo", 1, True), ("grpo", 2, False), ("reinforce_plus_plus", 1, False)],
)
def test_an_estimator_over_groups_without_a_group_is_said(
    task: Task,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    estimator: str,
    n: int,
    warned: bool,
) -> None:
    overrides = (f"algorithm.adv_estimator={estimator}", f"actor_rollout_ref.rollout.n={n}")
    dry_run(task, tmp_path / "run", *overrides)
    message = f"algorithm.adv_estimator={estimator} compares the responses of one prompt"
    assert (message in capsys.readouterr().out) is warned


def test_mistakes_of_all_parts_are_told_at_once(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    overrides = (
        f"actor_rollout_ref.model.path={tmp_path}/nowhere",
        f"data.train_files={tmp_path}/bad.jsonl",
        f"data.val_files={tmp_path}/absent.parquet",
        f"custom_reward_function.path={tmp_path}/absent.py",
        f"trainer.default_local_dir={tmp_path}/taken",
    )
    for flags in (["--dry-run"], []):
        assert cli.main(["train", *flags, *task.overrides(tmp_path / "run", *overrides)]) == 2
        output = capsys.readouterr().err
        assert output.startswith("PreflightError: 5 problems\n- trainer.default_local_dir=")
        assert f"trainer.default_local_dir={tmp_path}/taken is a file" in output
        assert f"actor_rollout_ref.model.path={tmp_path}/nowhere: model path" in output
        assert "bad.jsonl, row 0: column 'prompt' (data.prompt_key) is missing" in output
        assert "absent.parquet does not exist" in output
        assert f"no such file: '{tmp_path}/absent.py'" in output


def test_a_folder_without_weights_is_refused_before_models_load(task: Task, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(task.model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(UnsupportedModel, match=r"it has config\.json and no weights"):
        dry_run(task, tmp_path / "run", f"actor_rollout_ref.model.path={bare}")
    weights = next(task.model.glob("*.safetensors"))
    (bare / weights.name).write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UnsupportedModel, match="is truncated or damaged"):
        dry_run(task, tmp_path / "run", f"actor_rollout_ref.model.path={bare}")


def test_a_reward_model_that_cannot_score_stops_before_a_model_loads(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    enabled = ("reward_model.enable=true", f"reward_model.model.path={task.model}")
    with pytest.raises(ValueError, match=r"generates text and has no score head.*type=judge"):
        dry_run(task, tmp_path / "run", *enabled)
    judge = (*enabled, "reward_model.type=judge")
    with pytest.raises(ValueError, match=r"judge\.template='rate it' has no \{response\}"):
        dry_run(task, tmp_path / "run", *judge, "reward_model.judge.template='rate it'")
    server_overrides = (*judge, "reward_model.server.url=http://127.0.0.1:9")
    with pytest.raises(ValueError, match="api_key_env=NO_SUCH_KEY"):
        dry_run(
            task, tmp_path / "run", *server_overrides, "reward_model.server.api_key_env=NO_SUCH_KEY"
        )
    dry_run(task, tmp_path / "run", *judge)
    assert "cannot be reached" not in (output := capsys.readouterr()).out + output.err
    dry_run(task, tmp_path / "run", *server_overrides)
    output = capsys.readouterr()
    assert "server cannot be reached (http://127.0.0.1:9/v1/chat" in output.out + output.err


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
