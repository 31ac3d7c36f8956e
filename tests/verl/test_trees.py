"""A command means what it meant in the tree it was written for: marks, defaults, the line at the start."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hone import program_dialect
from hone.config import ComposedConfig, ConfigError, compose, config_to_dict
from hone.config.convert import to_plain
from hone.config.keys import get, leaves
from hone.config.trees import PPOTrainerConfig
from hone.trainer.command_line import compose_arguments
from hone.trainer.starting_values import starting_values
from hone.verl.rules import matches_pattern, new_name
from tests.verl.tree_defaults import DEFAULTS, HONES_OWN, SCRIPT_VALUES, SCRIPTS, Values

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GSPO = [f"{ACTOR}.policy_loss.loss_mode=gspo", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"]


def composed(*overrides: str, program: str = "main_ppo") -> ComposedConfig:
    return compose_arguments(list(overrides), schema="ppo_trainer", program=program)


def values_of(config: PPOTrainerConfig) -> Values:
    return {key: to_plain(get(config, key)) for key in leaves(PPOTrainerConfig)}


def without_hones_own(values: Values) -> Values:
    return {
        key: value
        for key, value in values.items()
        if not any(matches_pattern(pattern, key) for pattern in HONES_OWN)
    }


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_of_a_tree_composes_to_the_defaults_of_the_tree(script: str) -> None:
    tree = script.split()[0]
    expected = {
        **without_hones_own(values_of(compose().config)),
        **{new_name(key, "ppo_trainer"): value for key, value in DEFAULTS[tree].items()},
        **SCRIPT_VALUES[script],
    }
    found = values_of(composed(*SCRIPTS[script]).config)
    followed = {
        key: leaf.followed_key
        for key, leaf in leaves(PPOTrainerConfig).items()
        if leaf.followed_key and key not in DEFAULTS[tree]
    }
    differing = {
        key: (found[key], value)
        for key, value in without_hones_own(expected).items()
        if found[key] != value and key not in followed
    }
    assert differing == {}


@pytest.mark.parametrize("tree", DEFAULTS)
def test_hone_tree_names_the_tree_of_a_command_without_other_marks(tree: str) -> None:
    found = composed(f"hone.tree={tree}")
    values = values_of(found.config)
    for key, value in without_hones_own(DEFAULTS[tree]).items():
        assert values[new_name(key, "ppo_trainer")] == value, key
    assert f"named by hone.tree={tree} (command line)" in found.tree_line


def test_the_kl_is_in_the_reward_unless_the_loss_has_it_or_the_command_says_otherwise() -> None:
    def in_reward(*overrides: str) -> bool:
        algorithm = composed("hone.tree=verl-0.2", *overrides).config.algorithm
        return algorithm.use_kl_in_reward

    assert in_reward()
    assert in_reward(f"{ACTOR}.use_kl_loss=false")
    assert not in_reward(f"{ACTOR}.use_kl_loss=true")
    assert not in_reward("algorithm.use_kl_in_reward=false")


@pytest.mark.parametrize(
    ("overrides", "title"),
    [
        (["+trainer.val_before_train=False"], "verl 0.3 or older"),
        ([f"{ACTOR}.fsdp_config.grad_offload=False"], "verl 0.3 or older"),
        (["trainer.val_generations_to_log_to_wandb=1"], "verl 0.3 or older"),
        (["+trainer.val_before_train=False", f"{ROLLOUT}.n_agent=2"], "Search-R1"),
        (["max_turns=3"], "Search-R1"),
        (["algorithm.adv_norm=true", "+trainer.val_before_train=False"], "PURE"),
        (["curriculum_learning.enable=true"], "PURE"),
        (["reward_model.training=False"], "PURE"),
        (["trainer.project_name=TinyZero"], "TinyZero"),
        (["trainer.project_name=mine"], "verl 0.9.1"),
        (["trainer.val_before_train=False"], "verl 0.9.1"),
        (["algorithm.kl_ctrl.kl_coef=0.001"], "verl 0.9.1"),
        (["algorithm.adv_norm=true", "hone.tree=verl"], "verl 0.9.1"),
        (["hone.tree=verl-0.6"], "verl 0.4 to 0.9.0"),
        (["hone.tree=verl-0.9.1"], "verl 0.9.1"),
        (["hone.tree=verl-0.1"], "verl 0.3 or older"),
    ],
)
def test_a_tree_is_known_by_its_own_keys(overrides: list[str], title: str) -> None:
    assert composed(*overrides).tree_line.startswith(f"the tree of this command: {title}, ")


def test_a_tree_is_known_by_its_program() -> None:
    from hone.verl.programs import PROGRAMS

    module, *arguments = PROGRAMS["hone.trainer.main_ppo_format"].split()
    assert module == "hone.trainer.main_ppo"
    assert composed(*arguments).config.actor_rollout_ref.rollout.top_p == 0.95


def test_a_whole_file_of_an_old_tree_is_a_mark(tmp_path: Path) -> None:
    text = (
        "algorithm: {adv_estimator: gae, kl_penalty: kl, kl_ctrl: {type: fixed, kl_coef: 0.002}}\n"
        "actor_rollout_ref: {hybrid_engine: true, actor: {use_kl_loss: false}}\n"
    )
    (tmp_path / "ppo_trainer.yaml").write_text(text)
    files = ["--config-path", str(tmp_path), "--config-name", "ppo_trainer"]
    found = composed(*files)
    assert found.config.algorithm.use_kl_in_reward
    assert "named by the file ppo_trainer.yaml" in found.tree_line
    (tmp_path / "ppo_trainer.yaml").write_text(text + "algorithm.use_kl_in_reward: false\n")
    assert "verl 0.9.1" in composed(*files).tree_line


def test_the_saved_config_of_a_run_names_no_tree(tmp_path: Path) -> None:
    saved = OmegaConf.create(config_to_dict(composed("algorithm.adv_norm=true").config))
    OmegaConf.save(saved, tmp_path / "config.yaml")
    found = composed("--config-path", str(tmp_path), "--config-name", "config")
    assert "as nothing names another" in found.tree_line
    assert found.config.algorithm.use_kl_in_reward


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["hone.tree=pure", "max_turns=2"],
            "hone.tree=pure (command line) is of PURE, and max_turns (command line) is of Search-R1; "
            "leave one of them out",
        ),
        (
            ["reward_model.training=False", f"{ACTOR}.fsdp_config.grad_offload=True"],
            f"reward_model.training (command line) is of PURE, and {ACTOR}.fsdp_config.grad_offload "
            "(command line) is of verl 0.3 or older; leave one of them out",
        ),
        (
            ["hone.tree=tinyzer"],
            "hone.tree=tinyzer is no tree. Did you mean 'tinyzero'? Use tinyzero, search_r1, pure, verl, "
            "or a version such as verl-0.3 (command line)",
        ),
    ],
)
def test_marks_that_contradict_each_other_stop_the_run(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(*overrides)
    assert caught.value.problems == [problem]


def test_gspo_is_aggregated_as_in_its_tree_and_the_line_says_which() -> None:
    today, before = composed(*GSPO), composed("hone.tree=verl-0.9.0", *GSPO)
    assert today.config.actor_rollout_ref.actor.policy_loss_agg_mode == "token-mean"
    assert "gspo is aggregated by token-mean (by seq-mean-token-mean in" in today.tree_line
    actor = before.config.actor_rollout_ref.actor
    assert (actor.policy_loss_agg_mode, actor.loss_agg_mode) == (
        "seq-mean-token-mean",
        "token-mean",
    )
    assert before.tree_line.endswith("gspo is aggregated by seq-mean-token-mean")
    chosen = composed(*GSPO, f"{ACTOR}.loss_agg_mode=seq-mean-token-sum")
    assert "gspo is aggregated by seq-mean-token-sum (" in chosen.tree_line


def test_a_program_of_hone_keeps_its_own_keys_and_its_starting_values() -> None:
    def train(*overrides: str) -> ComposedConfig:
        return compose(overrides, starting_values=starting_values, dialect=program_dialect())

    assert "verl 0.9.1" in train("algorithm.adv_norm=true").tree_line
    pure = train("hone.tree=pure")
    assert pure.config.data.max_response_length == 128
    assert pure.config.algorithm.use_kl_in_reward
    search = train(f"{ROLLOUT}.n_agent=2").config
    assert (search.actor_rollout_ref.rollout.top_p, search.data.max_response_length) == (0.95, 128)
    assert search.actor_rollout_ref.rollout.max_tokens_per_turn is None


def test_a_default_of_a_tree_has_its_origin_and_no_note() -> None:
    found = composed("hone.tree=pure")
    assert found.origins["critic.optim.lr"] == "default of PURE"
    assert found.notes == ()


def test_another_program_ignores_the_trees() -> None:
    found = compose(["hone.tree=pure"], config_name="sft_trainer", dialect=program_dialect())
    assert found.tree_line == ""
    with pytest.raises(ConfigError, match=r"hone\.tree=prue is no tree"):
        compose(["hone.tree=prue"], config_name="sft_trainer", dialect=program_dialect())
