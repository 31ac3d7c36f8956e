"""Keys of the family that this schema does not declare, with the sentence that answers each. One table.

Most are settings of engines that are not built; some asked for nothing in the first place.
"""

from __future__ import annotations

from hone.config.states import Accepts, Rule, first_match, neutral

MEGATRON = "megatron is not built; use strategy=fsdp2"
ASYNC = "training is synchronous: rollout and update take turns on the same devices"


def off(pattern: str, why: str) -> Rule:
    """Refused, unless the value says that the thing is off."""
    return Rule(pattern, "refused", why, Accepts.OFF)


ABSENT_RULES: tuple[Rule, ...] = (
    neutral("**._target_", "the schema decides the class of a block"),
    neutral("model_engine", "the strategy of each role says which engine trains it"),
    neutral("hydra.searchpath", "the trees are built in; only the config's own folder is searched"),
    neutral("hydra.**", "Hydra parses the command line here, it writes no folder of its own"),
    off("**.megatron.**", MEGATRON),
    off("**.veomni.**", "veomni is not built; use strategy=fsdp2"),
    off("**.torchtitan.**", "torchtitan is not built; use strategy=fsdp2"),
    off("**.automodel.**", "automodel is not built; use strategy=fsdp2"),
    off("**.mindspeed.**", "mindspeed is not built; use strategy=fsdp2"),
    off("**.load_weight", MEGATRON),
    off("**.optim.lr_warmup_init", MEGATRON),
    off("**.optim.lr_decay_style", "use optim.lr_scheduler_type"),
    off("**.optim.lr_decay_steps", MEGATRON),
    off("**.optim.lr_wsd_decay_style", "use optim.lr_scheduler_type=wsd"),
    off("**.optim.lr_wsd_decay_steps", "use optim.lr_decay_steps_ratio"),
    off("**.optim.min_lr", "use optim.min_lr_ratio"),
    off("**.optim.weight_decay_incr_style", MEGATRON),
    off("**.optim.use_checkpoint_opt_param_scheduler", MEGATRON),
    off("**.fsdp_config.grad_offload", "use param_offload and optimizer_offload"),
    off("**.fsdp_config.qat.**", "weights are not quantised in training"),
    off("**.fsdp_config.turbo_config.**", "only FSDP2 is built"),
    off("**.fsdp_config.pad_to_length", "rows are packed without padding"),
    neutral("**.fsdp_config.pad_to_length_bucket", "no effect while pad_to_length=false"),
    off("**.fsdp_config.mixed_precision.**", "set fsdp_config.dtype and fsdp_config.model_dtype"),
    off("**.qat.**", "weights are not quantised in training"),
    off("distillation.**", "on-policy distillation is not built"),
    off("async_training.**", ASYNC),
    neutral("trainer.use_v1", "there is one trainer"),
    Rule("trainer.v1.trainer_mode", "neutral", ASYNC, ("sync",)),
    neutral("trainer.v1.**", "no effect while trainer.v1.trainer_mode=sync"),
    off("trainer.checkpoint_callback_class", "copy checkpoints from trainer.default_local_dir"),
    off(
        "trainer.npu_profile.**", "no profiler is wired; timing_s/* in the metrics times each phase"
    ),
    off("skip.*.enable", "generations are not reused; trainer.rollout_data_dir keeps them"),
    neutral("skip.**", "no effect while its enable=false"),
    neutral("transfer_queue.**", "no effect while transfer_queue.enable=false"),
    off("actor_rollout_ref.rollout.disaggregation.enabled", "prefill and decode share a rank"),
    neutral("actor_rollout_ref.rollout.disaggregation.**", "no effect while enabled=false"),
    off("actor_rollout_ref.rollout.router_config_path", "there are no servers to route between"),
    off(
        "actor_rollout_ref.rollout.moe_load_balance_metrics_interval", "expert load is not measured"
    ),
    off("actor_rollout_ref.rollout.mtp.**", "multi-token prediction heads are not decoded"),
    off("actor_rollout_ref.rollout.chat_scheduler", "use rollout.agent.default_agent_loop"),
    off("actor_rollout_ref.rollout.use_fire_sampling", "use rollout.temperature"),
    off("actor_rollout_ref.rollout.limit_images", "no vision model is decoded"),
    off("actor_rollout_ref.rollout.swap_space", "requests wait when the cache is full"),
    off("actor_rollout_ref.rollout.multi_turn.completion_callback", "write an agent loop"),
    neutral(
        "actor_rollout_ref.rollout.multi_turn.enable_tokenization_sanity_check",
        "turns are never re-tokenised",
    ),
    neutral("actor_rollout_ref.model.lora.type", "LoRA matrices are PEFT's plain ones"),
    off(
        "actor_rollout_ref.model.lora.merge",
        "adapters stay apart in the rollout; export merges them",
    ),
    off("actor_rollout_ref.model.lora.**", "use model.lora_rank, lora_alpha and target_modules"),
    off(
        "actor_rollout_ref.actor.use_rollout_log_probs",
        "use algorithm.rollout_correction.bypass_mode",
    ),
    off("actor_rollout_ref.actor.data_loader_shuffle", "use actor.shuffle"),
    off("algorithm.no_think_rl", "the policy writes its own thinking"),
    neutral("algorithm.state_masking.**", "tokens the policy did not write never carry loss"),
)


def absent_rule(key: str) -> Rule | None:
    """What is said about a key that the schema does not declare."""
    return first_match(key, ABSENT_RULES)
