"""One case for each name of the alias table, and the groups of keys that only make sense together."""

from __future__ import annotations

from typing import Any

import pytest

from hone.config import ConfigError
from hone.config.apply import compose_settings
from hone.config.keys import get
from hone.config.sources import Setting
from hone.config.trees import TREES
from hone.verl.dialect import VERL_KEYS, compose, load_config
from hone.verl.rules import COMPUTED, matches_pattern, new_name, rule_of, rules

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"

RENAMED_CASES: dict[str, Any] = {
    "algorithm.group_size": 4,
    "trainer.run_name": "exp1",
    "algorithm.rollout_is_threshold": 3.0,
    "algorithm.rollout_is_veto_threshold": 1e-4,
    "trainer.profile_steps": [2, 3],
    "sampling_params.max_tokens": 2048,
    "sampling_params.timeout": 30,
    "tool_config.max_tool_calls": 5,
    "tool_config.timeout": 30,
    "tool_config_path": "tools.yaml",
    "actor_rollout_ref.tool_config_path": "tools.yaml",
    f"{ROLLOUT}.tool_config_path": "tools.yaml",
    f"{ACTOR}.tool_config_path": "tools.yaml",
    f"{ACTOR}.lora.r": 8,
    f"{ACTOR}.lora.rank": 8,
    f"{ACTOR}.lora.lora_alpha": 32,
    f"{ACTOR}.lora.alpha": 32,
    f"{ACTOR}.lora.lora_dropout": 0.1,
    f"{ACTOR}.lora.target_modules": ["q_proj", "v_proj"],
    "reward_model.model_path": "my/reward",
    "reward_model.model.optim.grad_clip": 2.0,
    "algorithm.gt_coef": 1.5,
    "algorithm.dpo_coef": 0.5,
    "reward_model.batch_size": 64,
    "reward_model.sandbox_fusion_url": "http://localhost:8080/run_code",
    "ray_init.timeline_json_file": "timeline.json",
    f"{MODEL}.lora.merge": True,
    f"{MODEL}.lora.rank": 8,
    f"{MODEL}.lora.alpha": 32,
    f"{MODEL}.lora.dropout": 0.1,
    f"{MODEL}.lora.target_modules": ["q_proj"],
    f"{MODEL}.lora.exclude_modules": ["lm_head"],
    f"{MODEL}.lora.adapter_path": "adapter",
    "reward.num_workers": 2,
    f"{ACTOR}.optim.warmup_style": "cosine",
    "critic.optim.warmup_style": "cosine",
    f"{ROLLOUT}.multi_turn.max_turns": 3,
    f"{ROLLOUT}.n_agent": 5,
    "data.shuffle_train_dataloader": False,
    "data.chat_template": "{{ messages }}",
    "data.max_obs_length": 500,
    f"{ROLLOUT}.agent.tool_parser": "hermes",
    f"{ROLLOUT}.engine_kwargs.stop": ["</a>"],
    f"{ROLLOUT}.engine_kwargs.vllm.stop": ["</a>"],
    f"{ROLLOUT}.engine_kwargs.sglang.stop": ["</a>"],
    "trainer.val_generations_to_log_to_wandb": 3,
    "reward_model.reward_loop_source": "register",
    "reward_model.reward_loop_module_path": "my.py",
    "reward_model.reward_loop_class_name": "Mine",
    "critic.optim.name": "SGD",
    "critic.optim.min_lr_factor": 0.1,
    f"{ACTOR}.optim.lr_decay_style": "cosine",
    f"{ACTOR}.optim.lr_decay_steps": 100,
    f"{ACTOR}.checkpoint.contents": ["model"],
    f"{ROLLOUT}.update_weights_bucket_megabytes": 512,
    f"{ACTOR}.megatron.param_offload": True,
    f"{ACTOR}.megatron.optimizer_offload": True,
    "actor_rollout_ref.ref.megatron.param_offload": True,
    "actor_rollout_ref.ref.param_offload": True,
    "critic.megatron.param_offload": True,
    "critic.megatron.optimizer_offload": True,
    "reward_model.param_offload": True,
    "critic.model.lora.rank": 4,
}

BLOCK_CASES: dict[str, tuple[str, Any, str, Any]] = {
    "ray_init": ("num_cpus", 4, "ray_kwargs.ray_init.num_cpus", 4),
    "reward.custom_reward_function": ("path", "my.py", "custom_reward_function.path", "my.py"),
    "reward.reward_manager": ("name", "dapo", "reward_manager.name", "dapo"),
    "reward.reward_model": ("model_path", "m", "reward_model.model.path", "m"),
    "reward.sandbox_fusion": ("max_concurrent", 8, "reward_model.sandbox_fusion.max_concurrent", 8),
    "reward.reward_kwargs": ("max_resp_len", 9, "reward_model.reward_kwargs.max_resp_len", 9),
    "custom_reward_function.overlong_buffer": (
        "log",
        True,
        "reward_model.reward_kwargs.overlong_buffer_cfg.log",
        True,
    ),
    "reward_model.overlong_buffer": (
        "penalty_factor",
        0.5,
        "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
        0.5,
    ),
    "critic.fsdp": ("param_offload", True, "critic.model.fsdp_config.param_offload", True),
    "critic.fsdp_config": ("param_offload", True, "critic.model.fsdp_config.param_offload", True),
    f"{ACTOR}.fsdp": ("param_offload", True, f"{ACTOR}.fsdp_config.param_offload", True),
    "actor_rollout_ref.ref.fsdp": (
        "param_offload",
        True,
        "actor_rollout_ref.ref.fsdp_config.param_offload",
        True,
    ),
    "trainer.controller_nsight_options": (
        "trace",
        "cuda",
        "global_profiler.nsys_options",
        {"trace": "cuda"},
    ),
    "global_profiler.global_tool_config.nsys.controller_nsight_options": (
        "trace",
        "cuda",
        "global_profiler.nsys_options",
        {"trace": "cuda"},
    ),
    "sampling_params": ("top_k", 20, f"{ROLLOUT}.top_k", 20),
    "critic.kl_ctrl": ("kl_coef", 0.01, "algorithm.kl_ctrl.kl_coef", 0.01),
    "sandbox_fusion": ("max_concurrent", 8, "reward_model.sandbox_fusion.max_concurrent", 8),
    f"{ACTOR}.policy_loss.rollout_correction": (
        "rollout_is",
        "token",
        "algorithm.rollout_correction.rollout_is",
        "token",
    ),
}

VALUE_CASES: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    f"{ROLLOUT}.agent_loop": [
        ("tool_agent_loop", {f"{ROLLOUT}.agent.default_agent_loop": "tool_agent"}),
        ("single_turn_agent_loop", {f"{ROLLOUT}.agent.default_agent_loop": "single_turn_agent"}),
        ("my_custom_agent_loop", {f"{ROLLOUT}.agent.default_agent_loop": "my_custom_agent_loop"}),
    ],
    "trainer.log_generation_samples": [
        (
            True,
            {
                "trainer.log_train_generations": 8,
                "trainer.log_val_generations": 8,
            },
        ),
        (False, {"trainer.log_train_generations": 0, "trainer.log_val_generations": 0}),
        (3, {"trainer.log_train_generations": 3, "trainer.log_val_generations": 3}),
    ],
    "trainer.debug": [
        (True, {"trainer.controller": "local", "trainer.logger": ("console",)}),
        (False, {"trainer.controller": "auto"}),
    ],
    "trainer.debug_mode": [(True, {"trainer.controller": "local"})],
    "trainer.remove_previous_ckpt_in_save": [
        (True, {"trainer.max_actor_ckpt_to_keep": 1}),
        (False, {"trainer.max_actor_ckpt_to_keep": None}),
    ],
    "data.train_data_num": [
        (None, {"data.train_max_samples": -1}),
        (100, {"data.train_max_samples": 100}),
    ],
    "data.val_data_num": [
        (None, {"data.val_max_samples": -1}),
        (50, {"data.val_max_samples": 50}),
    ],
    f"{ACTOR}.use_token_level_loss": [
        (True, {f"{ACTOR}.loss_agg_mode": "token-mean"}),
        (False, {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}),
    ],
    f"{ACTOR}.use_rollout_log_probs": [
        (True, {"algorithm.rollout_correction.bypass_mode": True}),
        (False, {"algorithm.rollout_correction.bypass_mode": False}),
    ],
    "algorithm.rollout_correction.use_policy_gradient": [
        (True, {"algorithm.rollout_correction.loss_type": "reinforce"}),
        (False, {"algorithm.rollout_correction.loss_type": "ppo_clip"}),
    ],
    "max_turns": [(4, {f"{ROLLOUT}.multi_turn.max_assistant_turns": 5})],
    "do_search": [
        (False, {f"{ROLLOUT}.agent.default_agent_loop": "single_turn_agent"}),
    ],
}

BESIDE_OTHERS = (
    "retriever.url",
    f"{ACTOR}.lora.enable",
    "algorithm.kl_penalty",
    "algorithm.rollout_is",
    f"{ACTOR}.tis_imp_ratio_cap",
    "data.max_start_length",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.gen_batch_size",
    "reward_model.rollout.response_length",
)
"""Keys whose meaning depends on other keys: each has a test of its own below."""


def load(settings: dict[str, Any]) -> Any:
    given = [Setting(k, v, "command line") for k, v in settings.items()]
    return compose_settings(TREES["ppo_trainer"], given, dialect=VERL_KEYS)


def as_config(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def test_every_alias_has_a_case() -> None:
    table = [rule.pattern for rule in rules("renamed", tree="ppo_trainer")]
    blocks = {old.removesuffix(".**") for old in table if old.endswith(".**")}
    assert set(BLOCK_CASES) == blocks
    for old in table:
        named = any(matches_pattern(old, case) for case in (*RENAMED_CASES, *VALUE_CASES))
        assert old.endswith(".**") or named, old
    rewritten = {rule.pattern.lstrip("!") for rule in rules("rewritten", tree="ppo_trainer")}
    assert rewritten <= {*VALUE_CASES, *BESIDE_OTHERS}


@pytest.mark.parametrize("old", sorted(RENAMED_CASES))
def test_a_renamed_key_sets_the_new_key_or_is_reported_under_it(old: str) -> None:
    value, new = RENAMED_CASES[old], new_name(old, "ppo_trainer")
    assert new != old
    composed = load({old: value})
    if rule_of(new, "ppo_trainer") is not None:
        return
    assert get(composed.config, new) == as_config(value)
    assert composed.origins[new] == f"command line, written {old}"


@pytest.mark.parametrize("old", sorted(BLOCK_CASES))
def test_a_renamed_block_moves_its_keys(old: str) -> None:
    name, value, new, expected = BLOCK_CASES[old]
    assert get(load({f"{old}.{name}": value}).config, new) == expected


@pytest.mark.parametrize("old", sorted(VALUE_CASES))
def test_an_old_key_with_its_values_becomes_the_new_one(old: str) -> None:
    for value, expected in VALUE_CASES[old]:
        config = load({old: value}).config
        for key, expected_value in expected.items():
            assert get(config, key) == expected_value, (old, value, key)


def test_a_retriever_enables_searches_unless_they_are_disabled() -> None:
    url = {"retriever.url": "http://127.0.0.1:8000/retrieve"}
    for loop, keys in {
        "search_agent": url,
        "single_turn_agent": {**url, "do_search": False},
    }.items():
        config = load(keys).config
        assert config.actor_rollout_ref.rollout.agent.default_agent_loop == loop


def test_a_rule_refuses_a_value_that_it_cannot_rewrite() -> None:
    with pytest.raises(ConfigError, match=r"do_search=7 takes true or false \(command line\)"):
        load({"do_search": 7})
    with pytest.raises(ConfigError, match="max_turns=many takes an integer"):
        load({"max_turns": "many"})


def test_keys_that_are_computed_are_those_that_have_tests_here() -> None:
    assert {old.lstrip("!") for old in COMPUTED} == {
        "algorithm.rollout_correction.rollout_rs_threshold_lower",
        "**.optim.min_lr",
        "**.optim.lr_min",
        "reward_model.reward_kwargs.**",
    }


def test_a_minimum_learning_rate_becomes_a_share_of_the_peak() -> None:
    config = load({f"{ACTOR}.optim.lr": 1e-5, f"{ACTOR}.optim.min_lr": 1e-6}).config
    assert config.actor_rollout_ref.actor.optim.min_lr_ratio == pytest.approx(0.1)
    assert load({f"{ACTOR}.optim.min_lr": 0.0}).config == load({}).config
    sft = load_config(["optim.lr=1e-5", "optim.lr_min=1e-6"], config_name="sft_trainer")
    assert sft.optim.min_lr_ratio == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="give that, or both"):
        load({f"{ACTOR}.optim.min_lr": 1e-6})


def test_the_two_bounds_of_a_rejection_become_one() -> None:
    block = "algorithm.rollout_correction"
    config = load(
        {
            f"{block}.rollout_rs": "geometric",
            f"{block}.rollout_rs_threshold": 2.0,
            f"{block}.rollout_rs_threshold_lower": 0.25,
        }
    ).config
    assert config.algorithm.rollout_correction.rollout_rs == "seq_mean_k1"
    assert config.algorithm.rollout_correction.rollout_rs_threshold == "0.25_2"


def test_verls_response_length_of_a_reward_model_is_what_a_judge_may_write() -> None:
    judged = {"reward_model.enable": True, "reward_model.model.path": "m"}
    settings = {**judged, "reward_model.rollout.response_length": 77}
    assert load(settings).config.reward_model.judge.max_tokens == 512
    config = load({**settings, "reward_model.type": "judge"}).config
    assert config.reward_model.judge.max_tokens == 77


def test_without_filters_a_step_has_as_many_prompts_as_a_generation_round() -> None:
    composed = load({"data.gen_batch_size": 512})
    assert composed.config.data.train_batch_size == 512
    assert "a step has this many prompts" in composed.notes[0]
    filtered = load(
        {
            "data.gen_batch_size": 512,
            "data.train_batch_size": 256,
            "algorithm.filter_groups.enable": True,
            f"{ROLLOUT}.n": 2,
        }
    )
    assert filtered.config.data.train_batch_size == 256
    assert filtered.notes == ()


@pytest.mark.parametrize(
    ("settings", "rank"),
    [
        ({f"{ACTOR}.lora.enable": True}, 16),
        ({f"{ACTOR}.lora.enable": True, f"{ACTOR}.lora.r": 4}, 4),
        ({f"{ACTOR}.lora.r": 4, f"{ACTOR}.lora.enable": True}, 4),
        ({f"{ACTOR}.lora.enable": True, f"{MODEL}.lora_rank": 32}, 32),
        ({f"{ACTOR}.lora.enable": False, f"{ACTOR}.lora.r": 4}, 0),
        ({f"{ACTOR}.lora.enable": False}, 0),
    ],
)
def test_the_lora_switch_and_its_rank_work_in_any_order(
    settings: dict[str, Any], rank: int
) -> None:
    assert load(settings).config.actor_rollout_ref.model.lora_rank == rank


def test_the_lora_switch_takes_only_a_boolean() -> None:
    with pytest.raises(ConfigError, match=r"lora\.enable=8 takes true or false"):
        load({f"{ACTOR}.lora.enable": 8})


def test_a_number_as_kl_penalty_is_the_weight_in_the_reward() -> None:
    algorithm = load({"algorithm.kl_penalty": 0.01}).config.algorithm
    assert (algorithm.kl_ctrl.kl_coef, algorithm.use_kl_in_reward) == (0.01, True)
    assert algorithm.kl_penalty == "kl"


def test_a_number_as_kl_penalty_is_the_weight_of_the_loss_where_the_loss_has_the_kl() -> None:
    config = load({"algorithm.kl_penalty": 0.02, f"{ACTOR}.use_kl_loss": True}).config
    assert config.actor_rollout_ref.actor.kl_loss_coef == 0.02
    assert not config.algorithm.use_kl_in_reward


def test_a_number_as_kl_penalty_leaves_an_explicit_switch_alone() -> None:
    settings = {"algorithm.kl_penalty": 0.02, "algorithm.use_kl_in_reward": False}
    assert not load(settings).config.algorithm.use_kl_in_reward


def test_a_name_as_kl_penalty_stays_the_estimator() -> None:
    assert load_config(["algorithm.kl_penalty=low_var_kl"]).algorithm.kl_penalty == "low_var_kl"


def test_start_length_gives_the_search_meaning_to_the_other_two_lengths() -> None:
    config = load(
        {
            "data.max_start_length": 2048,
            "data.max_prompt_length": 4096,
            "data.max_response_length": 500,
        }
    ).config
    assert config.data.max_prompt_length == 2048
    assert config.data.max_response_length == 4096
    assert config.actor_rollout_ref.rollout.max_tokens_per_turn == 500


def test_unknown_manager_settings_reach_a_manager_of_the_users_own() -> None:
    config = load({"reward_model.reward_kwargs.judge.url": "http://x"}).config
    assert config.reward_model.reward_kwargs.extra == {"judge": {"url": "http://x"}}


def test_a_misspelt_manager_setting_is_still_an_error() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'max_resp_len'"):
        load({"reward_model.reward_kwargs.max_respo_len": 3})


def test_the_later_of_an_old_and_a_new_name_applies() -> None:
    one = compose([f"{ROLLOUT}.n=2", "algorithm.group_size=4"])
    two = compose(["algorithm.group_size=4", f"{ROLLOUT}.n=2"])
    assert one.config.actor_rollout_ref.rollout.n == 4
    assert two.config.actor_rollout_ref.rollout.n == 2


SFT_CASES: dict[str, Any] = {
    "model.partial_pretrain": "my/model",
    "model.strategy": "fsdp",
    "optim.lr_scheduler": "constant",
    "optim.warmup_style": "constant",
    "optim.warmup_steps_ratio": 0.2,
    "model.fsdp_config.cpu_offload": True,
    "model.fsdp_config.offload_params": True,
    "data.messages_key": "conversation",
    "data.tools_key": "functions",
    "data.enable_thinking_key": "think",
    "trainer.run_name": "exp",
    "trainer.resume_path": "x",
    "trainer.balance_batch": False,
    "model.lora.rank": 4,
}


@pytest.mark.parametrize("old", sorted(SFT_CASES))
def test_a_renamed_sft_key_sets_the_new_key(old: str) -> None:
    value = SFT_CASES[old]
    composed = compose_settings(
        TREES["sft_trainer"], [Setting(old, value, "command line")], dialect=VERL_KEYS
    )
    assert get(composed.config, new_name(old, "sft_trainer")) == value


def test_renamed_sft_blocks_move_their_keys() -> None:
    config = load_config(
        ["model.fsdp_config.fsdp_size=2", "trainer.checkpoint.save_contents=[model]"],
        config_name="sft_trainer",
    )
    assert config.engine.fsdp_size == 2
    assert config.checkpoint.save_contents == ("model",)


@pytest.mark.parametrize(
    ("settings", "level", "threshold"),
    [
        (
            {"rollout_is": True, "rollout_is_level": "token", "rollout_is_mode": "truncate"},
            "token",
            2,
        ),
        ({"rollout_is": True, "rollout_is_level": "sequence"}, "sequence", 2),
        ({"rollout_is": True, "rollout_is_threshold": 5.0}, "token", 5),
        ({"rollout_is": True, "rollout_is_threshold": None}, None, 2),
        ({"rollout_is": False, "rollout_is_threshold": 3.0}, None, 3),
    ],
)
def test_the_importance_weights_of_verl_0_6_0_are_those_of_the_correction(
    settings: dict[str, Any], level: str | None, threshold: float
) -> None:
    config = load({f"algorithm.{name}": value for name, value in settings.items()}).config
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold) == (level, threshold)


@pytest.mark.parametrize(
    ("cap", "level", "threshold"), [(2, "token", 2), (1.5, "token", 1.5), (-1, None, 2)]
)
def test_the_cap_of_importance_weights_in_verl_0_5_is_a_token_correction(
    cap: float, level: str | None, threshold: float
) -> None:
    correction = load({f"{ACTOR}.tis_imp_ratio_cap": cap}).config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold) == (level, threshold)


def test_masked_weights_of_verl_0_6_0_name_the_rejection() -> None:
    with pytest.raises(ConfigError, match="masked weights are a rejection; use algorithm"):
        load({"algorithm.rollout_is": True, "algorithm.rollout_is_mode": "mask"})


def test_zero_is_not_read_as_null() -> None:
    config = load_config(["max_turns=0", "retriever.url=http://localhost:8000/retrieve"])
    assert get(config, f"{ROLLOUT}.multi_turn.max_assistant_turns") == 1
    with pytest.raises(ConfigError, match="use_token_level_loss"):
        load_config([f"{ACTOR}.use_token_level_loss=0"])


def test_coefficients_are_numbers() -> None:
    with pytest.raises(ConfigError, match="turn_reward_coef"):
        load_config(["reward_model.turn_reward_coef.calculator=abc"])
