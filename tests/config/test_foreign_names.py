"""A setting of TRL works, or its error names hone's setting or says that there is none."""

from __future__ import annotations

import pytest

from hone.api.settings import resolve_key
from hone.config import ConfigError, compose
from hone.config.foreign_names import COUNTERPARTS
from hone.config.keys import leaves
from hone.config.short_keys import SHORT_KEYS
from hone.config.trees import TREES

TRL = {
    "num_generations": "In hone it is n.",
    "max_completion_length": "In hone it is max_tokens.",
    "learning_rate": "In hone it is lr.",
    "beta": "In hone it is actor_rollout_ref.actor.kl_loss_coef",
    "epsilon": "In hone it is actor_rollout_ref.actor.clip_ratio.",
    "epsilon_high": "In hone it is actor_rollout_ref.actor.clip_ratio_high.",
    "num_iterations": "In hone it is actor_rollout_ref.actor.ppo_epochs.",
    "per_device_train_batch_size": "In hone it is batch_size",
    "gradient_accumulation_steps": "hone has no such setting",
    "num_train_epochs": "In hone it is epochs.",
    "max_steps": "In hone it is steps.",
    "output_dir": "In hone it is out.",
    "report_to": "In hone it is trainer.logger",
    "logging_steps": "hone has no such setting: every step is logged.",
    "save_steps": "In hone it is trainer.save_freq.",
    "eval_steps": "In hone it is trainer.test_freq.",
    "peft_config": "In hone it is actor_rollout_ref.model.lora_rank.",
    "use_vllm": "In hone it is actor_rollout_ref.rollout.name (set it to vllm).",
    "loss_type": "In hone it is actor_rollout_ref.actor.loss_agg_mode",
    "scale_rewards": "In hone it is algorithm.norm_adv_by_std_in_grpo.",
    "bf16": "hone has no such setting",
    "reward_weights": "hone has no such setting",
    "load_in_4bit": "4-bit weights are not supported yet.",
    "tools": "In hone it is actor_rollout_ref.rollout.multi_turn.function_tool_path",
    "callbacks": "Callbacks are not supported yet.",
    "async_training": "Asynchronous training is not supported yet.",
}


@pytest.mark.parametrize("name", TRL)
def test_the_error_of_a_trl_setting_names_ours_on_the_command_line_and_in_python(name: str) -> None:
    for key in (name, f"trainer.{name}"):
        with pytest.raises(ConfigError) as error:
            compose([f"{key}=1"])
        assert TRL[name] in str(error.value)
        assert "Did you mean" not in str(error.value)
    with pytest.raises(ConfigError) as error:
        resolve_key("ppo_trainer", name)
    assert TRL[name] in str(error.value)


@pytest.mark.parametrize("name", ["temperature", "max_prompt_length"])
def test_a_trl_setting_that_hone_has_works(name: str) -> None:
    assert resolve_key("ppo_trainer", name).endswith(name)


def test_a_counterpart_is_a_setting_of_hone() -> None:
    keys = {key for tree in TREES.values() for key in leaves(tree.root)}
    assert {ours for names in COUNTERPARTS.values() for ours in names} <= {*SHORT_KEYS, *keys}


def test_a_counterpart_that_the_tree_lacks_is_not_named() -> None:
    with pytest.raises(ConfigError, match=r"'num_generations'. hone has no such setting here"):
        compose(["num_generations=2"], schema="sft_trainer", config_name="sft_trainer")
