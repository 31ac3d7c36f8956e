"""Keys that were set and have no effect in this run, because of other keys: said once at start.

A docstring that begins with a name (`clip_cov: …`) says to whom a key belongs. What depends on the estimator
is found by `hone/trainer/ppo/plan.py`, from the options that it declares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hone.config.describe import field_docs
from hone.config.keys import walk_fields
from hone.config.rollout import SINGLE_TURN_LOOP
from hone.config.schema import PPOTrainerConfig

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_BELONGS = re.compile(r"([a-z_]+): ")


def find_idle(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """Keys or blocks without effect beside the others, and why."""
    for prefixes, why in _conditions(config):
        for prefix in prefixes.split():
            yield prefix, f"no effect while {why}"
    names = _names(config)
    for key, owner, *_ in walk_fields(PPOTrainerConfig):
        belongs = _BELONGS.match(field_docs(owner).get(key.rpartition(".")[2], ""))
        if belongs and belongs[1] not in names:
            yield key, f"no effect without {belongs[1]}"
    val = config.actor_rollout_ref.rollout.val_kwargs
    if not val.samples:
        yield f"{_ROLLOUT}.val_kwargs.n", "greedy responses to one prompt are all the same"
    if not config.algorithm.filter_groups.enable:
        why = "without algorithm.filter_groups.enable a step has this many prompts"
        yield "data.gen_batch_size", why


def _names(config: PPOTrainerConfig) -> set[str]:
    """Names that this run has chosen."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    bypass = {"bypass"} if algorithm.rollout_correction.bypass_mode else set()
    return bypass | {
        actor.policy_loss.loss_mode,
        algorithm.adv_estimator,
        algorithm.kl_ctrl.type,
        algorithm.pf_ppo.reweight_method,
        config.curriculum_learning.fn_name,
        config.reward_manager.name,
    }


def _under(block: str, names: str) -> str:
    return " ".join(f"{block}.{name}" for name in names.split())


def _conditions(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """Keys, and the setting without which they have no effect."""
    policy, algorithm = config.actor_rollout_ref, config.algorithm
    correction = algorithm.rollout_correction
    if not algorithm.use_kl_in_reward:
        yield "algorithm.kl_ctrl algorithm.kl_penalty", "algorithm.use_kl_in_reward=false"
    if not config.global_profiler.steps:
        yield "global_profiler", "global_profiler.steps=null"
    elif config.global_profiler.tool is None:
        yield "global_profiler.steps", "global_profiler.tool=null"
    if not policy.actor.use_kl_loss:
        yield f"{_ACTOR}.kl_loss_coef {_ACTOR}.kl_loss_type", f"{_ACTOR}.use_kl_loss=false"
    if correction.bypass_mode:
        if policy.actor.policy_loss.loss_mode not in ("vanilla", "bypass_mode"):
            why = f"{_CORRECTION}.bypass_mode=true: {_CORRECTION}.loss_type chooses the loss"
            yield f"{_ACTOR}.policy_loss.loss_mode", why
        if correction.loss_type == "ppo_clip" and correction.rollout_is is not None:
            yield f"{_CORRECTION}.rollout_is", "loss_type=ppo_clip: its ratio is the weight"
    if correction.rollout_is is None:
        keys = _under(_CORRECTION, "rollout_is_threshold rollout_is_batch_normalize")
        yield keys, f"{_CORRECTION}.rollout_is=null"
    if correction.rollout_rs is None:
        yield f"{_CORRECTION}.rollout_rs_threshold", f"{_CORRECTION}.rollout_rs=null"
    if not algorithm.filter_groups.enable:
        names = "metric max_num_gen_batches max_empty_gen_batches max_inflight_gen_batches order"
        keys = _under("algorithm.filter_groups", names)
        yield keys, "algorithm.filter_groups.enable=false"
    if not algorithm.use_pf_ppo:
        yield "algorithm.pf_ppo", "algorithm.use_pf_ppo=false"
    if not config.curriculum_learning.enable:
        yield "curriculum_learning.fn_name curriculum_learning.fn_params", "its enable=false"
    if not config.reward_model.enable:
        keys = _under(
            "reward_model",
            "model micro_batch_size micro_batch_size_per_gpu max_length type use_dynamic_bsz "
            "forward_max_token_len_per_gpu credit_assignment modeling_reward_coef split_step_char "
            "step_separator",
        )
        yield keys, "reward_model.enable=false"
    if not policy.model.uses_lora:
        names = "lora_alpha lora_dropout target_modules exclude_modules"
        yield _under("actor_rollout_ref.model", names), "actor_rollout_ref.model.lora_rank=0"
    if not config.critic.model.lora_rank:
        yield "critic.model.lora_alpha critic.model.target_modules", "critic.model.lora_rank=0"
    yield from _of_the_run(config)


def _of_the_run(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """The same for resuming, turns and ranks."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    if trainer.resume_mode != "resume_path":
        yield "trainer.resume_from_path", f"trainer.resume_mode={trainer.resume_mode}"
    if rollout.default_loop == SINGLE_TURN_LOOP:
        why = (
            f"rows have one turn (agent.default_agent_loop={SINGLE_TURN_LOOP}); several need "
            f"{_ROLLOUT}.multi_turn.tool_config_path or an agent_name in the row"
        )
        keys = _under(
            f"{_ROLLOUT}.multi_turn",
            "enable max_assistant_turns max_user_turns max_parallel_calls max_tool_calls tool_timeout_s "
            "trajectory_timeout_s max_tool_response_length tool_response_truncate_side "
            "max_observation_tokens format",
        )
        yield keys, why
    if config.world_size == 1:
        blocks = (_ACTOR, "actor_rollout_ref.ref", "critic.model")
        why = "there is one rank; param_offload and optimizer_offload work there"
        yield " ".join(f"{block}.fsdp_config.offload_policy" for block in blocks), why
