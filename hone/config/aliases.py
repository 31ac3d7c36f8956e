"""Keys that users' documents and older trees write, and what they are called here: one table.

A rename keeps the value, a rule changes it, and a few keys only make sense together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hone.config.errors import nearest
from hone.config.reward import RewardKwargs
from hone.config.sources import Setting

ROLLOUT = "actor_rollout_ref.rollout"
MULTI_TURN = f"{ROLLOUT}.multi_turn"
ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"

LORA_RANK_WHEN_ENABLED = 16
"""Rank of `actor.lora.enable=true` where no rank is given."""
SAMPLES_WHEN_LOGGED = 8
"""Samples of `trainer.log_generation_samples=true`."""


class BadAliasValue(ValueError):
    """The value of an old key cannot be said in the new one; the text says what it takes."""


@dataclass(frozen=True)
class Rule:
    """An old key whose value changes on the way: the function gives the new settings."""

    apply: Callable[[Any], dict[str, Any]]
    meaning: str


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise BadAliasValue("takes true or false")


def _whole(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise BadAliasValue("takes an integer")


def _agent_loop(value: Any) -> dict[str, Any]:
    names = {"tool_agent_loop": "tool_agent", "single_turn_agent_loop": "single_turn_agent"}
    return {f"{ROLLOUT}.agent.default_agent_loop": names.get(value, value)}


def _log_samples(value: Any) -> dict[str, Any]:
    count = SAMPLES_WHEN_LOGGED * value if isinstance(value, bool) else _whole(value)
    return {"trainer.log_train_generations": count, "trainer.log_val_generations": count}


def _debug(value: Any) -> dict[str, Any]:
    return {"trainer.controller": "local", "trainer.logger": ["console"]} if _truth(value) else {}


def _search(value: Any) -> dict[str, Any]:
    loop = "search_agent" if _truth(value) else "single_turn_agent"
    return {f"{ROLLOUT}.agent.default_agent_loop": loop}


RENAMED: dict[str, str] = {
    # users' documents
    "algorithm.group_size": f"{ROLLOUT}.n",
    "trainer.run_name": "trainer.experiment_name",
    "tool_config_path": f"{MULTI_TURN}.tool_config_path",
    "actor_rollout_ref.tool_config_path": f"{MULTI_TURN}.tool_config_path",
    f"{ROLLOUT}.tool_config_path": f"{MULTI_TURN}.tool_config_path",
    f"{ACTOR}.tool_config_path": f"{MULTI_TURN}.tool_config_path",
    "tool_config.max_tool_calls": f"{MULTI_TURN}.max_tool_calls",
    "tool_config.timeout": f"{MULTI_TURN}.tool_timeout_s",
    "sampling_params.max_tokens": f"{ROLLOUT}.max_tokens_per_turn",
    "sampling_params.timeout": f"{MULTI_TURN}.trajectory_timeout_s",
    "sampling_params.temperature": f"{ROLLOUT}.temperature",
    "sampling_params.top_p": f"{ROLLOUT}.top_p",
    "sampling_params.top_k": f"{ROLLOUT}.top_k",
    "sampling_params.min_p": f"{ROLLOUT}.min_p",
    "sampling_params.n": f"{ROLLOUT}.n",
    "sampling_params.stop": f"{ROLLOUT}.stop",
    "sampling_params.seed": f"{ROLLOUT}.seed",
    f"{ACTOR}.lora.r": f"{MODEL}.lora_rank",
    f"{ACTOR}.lora.rank": f"{MODEL}.lora_rank",
    f"{ACTOR}.lora.lora_alpha": f"{MODEL}.lora_alpha",
    f"{ACTOR}.lora.alpha": f"{MODEL}.lora_alpha",
    f"{ACTOR}.lora.lora_dropout": f"{MODEL}.lora_dropout",
    f"{ACTOR}.lora.target_modules": f"{MODEL}.target_modules",
    "reward_model.model_path": "reward_model.model.path",
    "reward_model.batch_size": "reward_model.micro_batch_size",
    "ray_init.timeline_json_file": "ray_kwargs.timeline_json_file",
    "trainer.profile_steps": "global_profiler.steps",
    # the newer tree
    f"{MODEL}.lora.rank": f"{MODEL}.lora_rank",
    f"{MODEL}.lora.alpha": f"{MODEL}.lora_alpha",
    f"{MODEL}.lora.dropout": f"{MODEL}.lora_dropout",
    f"{MODEL}.lora.target_modules": f"{MODEL}.target_modules",
    f"{MODEL}.lora.exclude_modules": f"{MODEL}.exclude_modules",
    f"{MODEL}.lora.adapter_path": f"{MODEL}.lora_adapter_path",
    "reward.num_workers": "reward_model.num_workers",
    # older trees
    f"{ACTOR}.optim.warmup_style": f"{ACTOR}.optim.lr_scheduler_type",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    f"{ACTOR}.fsdp_config.min_num_params": f"{ACTOR}.fsdp_config.wrap_policy.min_num_params",
    "critic.model.fsdp_config.min_num_params": (
        "critic.model.fsdp_config.wrap_policy.min_num_params"
    ),
    "reward_model.model.fsdp_config.min_num_params": (
        "reward_model.model.fsdp_config.wrap_policy.min_num_params"
    ),
    f"{MULTI_TURN}.max_turns": f"{MULTI_TURN}.max_assistant_turns",
    # Search-R1 and PURE
    f"{ROLLOUT}.n_agent": f"{ROLLOUT}.n",
    "data.shuffle_train_dataloader": "data.shuffle",
    "data.max_obs_length": f"{MULTI_TURN}.max_observation_tokens",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
}
"""Old key to new key; the value stays."""

RENAMED_BLOCKS: dict[str, str] = {
    "ray_init": "ray_kwargs.ray_init",
    "trainer.controller_nsight_options": (
        "global_profiler.global_tool_config.nsys.controller_nsight_options"
    ),
    "trainer.worker_nsight_options": (
        "global_profiler.global_tool_config.nsys.worker_nsight_options"
    ),
    "actor_rollout_ref.profiler": f"{ACTOR}.profiler",
    "reward.custom_reward_function": "custom_reward_function",
    "reward.reward_manager": "reward_manager",
    "reward.reward_model": "reward_model",
    "reward.sandbox_fusion": "reward_model.sandbox_fusion",
    "reward.reward_kwargs": "reward_model.reward_kwargs",
    "reward_model.overlong_buffer": "reward_model.reward_kwargs.overlong_buffer_cfg",
    "critic.fsdp": "critic.model.fsdp_config",
    "critic.fsdp_config": "critic.model.fsdp_config",
    f"{ACTOR}.fsdp": f"{ACTOR}.fsdp_config",
    "actor_rollout_ref.ref.fsdp": "actor_rollout_ref.ref.fsdp_config",
    "critic.kl_ctrl": "algorithm.kl_ctrl",
}
"""Old block to new block; every key inside moves with it."""

RULES: dict[str, Rule] = {
    f"{ROLLOUT}.agent_loop": Rule(_agent_loop, f"{ROLLOUT}.agent.default_agent_loop"),
    "trainer.log_generation_samples": Rule(
        _log_samples,
        f"trainer.log_train_generations and trainer.log_val_generations; true is {SAMPLES_WHEN_LOGGED}",
    ),
    "trainer.debug": Rule(_debug, "true is trainer.controller=local trainer.logger=[console]"),
    "trainer.debug_mode": Rule(_debug, "true is trainer.controller=local trainer.logger=[console]"),
    "trainer.remove_previous_ckpt_in_save": Rule(
        lambda value: {"trainer.max_actor_ckpt_to_keep": 1} if _truth(value) else {},
        "true is trainer.max_actor_ckpt_to_keep=1",
    ),
    "data.train_data_num": Rule(
        lambda value: {"data.train_max_samples": -1 if value is None else value},
        "data.train_max_samples; null is -1, all",
    ),
    "data.val_data_num": Rule(
        lambda value: {"data.val_max_samples": -1 if value is None else value},
        "data.val_max_samples; null is -1, all",
    ),
    "max_turns": Rule(
        lambda value: {f"{MULTI_TURN}.max_assistant_turns": _whole(value) + 1},
        f"{MULTI_TURN}.max_assistant_turns, one more: so many searches, then the answer",
    ),
    "do_search": Rule(
        _search, f"true is {ROLLOUT}.agent.default_agent_loop=search_agent, false single_turn_agent"
    ),
}
"""Old key to a function of its value."""

GROUPED: dict[str, str] = {
    f"{ACTOR}.lora.enable": (
        f"false is {MODEL}.lora_rank=0; true without a rank is rank {LORA_RANK_WHEN_ENABLED}"
    ),
    "algorithm.kl_penalty": (
        "as a number: algorithm.kl_ctrl.kl_coef with algorithm.use_kl_in_reward=true, or "
        f"{ACTOR}.kl_loss_coef where {ACTOR}.use_kl_loss=true"
    ),
    "data.max_start_length": (
        "data.max_prompt_length; beside it data.max_prompt_length is the length of all turns "
        f"(data.max_response_length) and data.max_response_length that of one "
        f"({ROLLOUT}.max_tokens_per_turn)"
    ),
}
"""Old keys whose meaning hangs on other keys; the functions below do them."""


def written_as(origin: str, old: str) -> str:
    """The origin of a value that was set under another name."""
    return f"{origin}, written {old}"


def _moved(setting: Setting, key: str, value: Any) -> Setting:
    return replace(setting, key=key, value=value, origin=written_as(setting.origin, setting.key))


def translate(settings: Sequence[Setting], problems: list[str]) -> list[Setting]:
    """The settings of a `ppo_trainer` tree under their own names."""
    grouped = _search_lengths(_kl_number(_lora_switch(list(settings), problems)))
    return [new for old in grouped for new in _translate_one(old, problems)]


def _translate_one(setting: Setting, problems: list[str]) -> list[Setting]:
    if setting.key in RULES:
        try:
            new = RULES[setting.key].apply(setting.value)
        except BadAliasValue as error:
            problems.append(f"{setting.key}={setting.value} {error} ({setting.origin})")
            return []
        return [_moved(setting, key, value) for key, value in new.items()]
    return [_manager_extras(rename(setting, RENAMED, RENAMED_BLOCKS))]


def rename(setting: Setting, keys: dict[str, str], blocks: dict[str, str]) -> Setting:
    """The setting under its new name, or as it is."""
    key = setting.key
    for _ in range(len(blocks)):  # a renamed block may hold a renamed key
        if key in keys:
            key = keys[key]
            continue
        prefix = next((b for b in blocks if key == b or key.startswith(b + ".")), None)
        if prefix is None:
            break
        key = blocks[prefix] + key[len(prefix) :]
    return setting if key == setting.key else _moved(setting, key, setting.value)


def _lora_switch(settings: list[Setting], problems: list[str]) -> list[Setting]:
    switch = f"{ACTOR}.lora.enable"
    ranks = {
        f"{MODEL}.lora_rank",
        *(old for old, new in RENAMED.items() if new.endswith(".lora_rank")),
    }
    asked = [s for s in settings if s.key == switch]
    if not asked:
        return settings
    kept = [s for s in settings if s.key != switch]
    try:
        enabled = _truth(asked[-1].value)
    except BadAliasValue as error:
        problems.append(f"{switch}={asked[-1].value} {error} ({asked[-1].origin})")
        return kept
    if not enabled:
        return [*kept, _moved(asked[-1], f"{MODEL}.lora_rank", 0)]
    if any(s.key in ranks for s in kept):
        return kept
    return [*kept, _moved(asked[-1], f"{MODEL}.lora_rank", LORA_RANK_WHEN_ENABLED)]


def _kl_number(settings: list[Setting]) -> list[Setting]:
    def is_number(s: Setting) -> bool:
        number = isinstance(s.value, int | float) and not isinstance(s.value, bool)
        return s.key == "algorithm.kl_penalty" and number

    last = {s.key: s.value for s in settings}
    result: list[Setting] = []
    for setting in settings:
        if not is_number(setting):
            result.append(setting)
        elif last.get(f"{ACTOR}.use_kl_loss") is True:
            result.append(_moved(setting, f"{ACTOR}.kl_loss_coef", setting.value))
        else:
            result.append(_moved(setting, "algorithm.kl_ctrl.kl_coef", setting.value))
            if "algorithm.use_kl_in_reward" not in last:
                result.append(_moved(setting, "algorithm.use_kl_in_reward", True))
    return result


def _manager_extras(setting: Setting) -> Setting:
    """A key that the managers' settings do not know goes to a manager of the user's own."""
    block = "reward_model.reward_kwargs"
    rest = setting.key.removeprefix(block + ".")
    known = {field.name for field in fields(RewardKwargs)}
    name = rest.split(".")[0]
    if rest == setting.key or name in known or nearest(name, known):
        return setting
    return _moved(setting, f"{block}.extra.{rest}", setting.value)


def _search_lengths(settings: list[Setting]) -> list[Setting]:
    if all(s.key != "data.max_start_length" for s in settings):
        return settings
    names = {
        "data.max_start_length": "data.max_prompt_length",
        "data.max_prompt_length": "data.max_response_length",
        "data.max_response_length": f"{ROLLOUT}.max_tokens_per_turn",
    }
    return [_moved(s, names[s.key], s.value) if s.key in names else s for s in settings]
