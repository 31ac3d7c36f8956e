"""Names of settings in TRL and in older releases, with their counterparts in hone."""

from __future__ import annotations

from hone.config.keys import leaves
from hone.config.short_keys import short_keys_of
from hone.suggestions import foreign_answer

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
COUNTERPARTS: dict[str, tuple[str, ...]] = {
    "advantage_estimator": ("estimator",),
    "beta": (f"{_ACTOR}.kl_loss_coef",),
    "dataset": ("data",),
    "epsilon": (f"{_ACTOR}.clip_ratio",),
    "epsilon_high": (f"{_ACTOR}.clip_ratio_high",),
    "eval_dataset": ("val",),
    "eval_steps": ("trainer.test_freq",),
    "folder": ("out",),
    "learning_rate": ("lr",),
    "loss_type": (f"{_ACTOR}.loss_agg_mode",),
    "lr_scheduler_type": (f"{_ACTOR}.optim.lr_scheduler_type", "optim.lr_scheduler_type"),
    "max_completion_length": ("max_tokens",),
    "max_grad_norm": (f"{_ACTOR}.optim.clip_grad", "optim.clip_grad"),
    "max_new_tokens": ("max_tokens",),
    "max_prompt_length": ("data.max_prompt_length", "data.max_length"),
    "max_seq_length": ("data.max_length",),
    "max_steps": ("steps",),
    "model_name_or_path": ("model",),
    "num_generations": ("n",),
    "num_iterations": (f"{_ACTOR}.ppo_epochs",),
    "num_train_epochs": ("epochs",),
    "output_dir": ("out",),
    "peft_config": ("actor_rollout_ref.model.lora_rank", "model.lora_rank"),
    "per_device_train_batch_size": ("batch_size",),
    "report_to": ("trainer.logger",),
    "reward_funcs": ("reward",),
    "run_name": ("trainer.experiment_name",),
    "save_steps": ("trainer.save_freq",),
    "scale_rewards": ("algorithm.norm_adv_by_std_in_grpo",),
    "tools": (f"{_ROLLOUT}.multi_turn.function_tool_path",),
    "total_steps": ("steps",),
    "train_dataset": ("data",),
    "use_vllm": (f"{_ROLLOUT}.name",),
    "validation": ("val",),
}
"""The setting of hone, short or dotted, by the foreign name; the first that a tree has is used."""
REMARKS = {
    "beta": "with actor_rollout_ref.actor.use_kl_loss=true",
    "loss_type": "as token-mean for dapo, seq-mean-token-mean for grpo",
    "per_device_train_batch_size": "the rows of all devices",
    "report_to": "a list, as [console,wandb]",
    "tools": "a file of functions",
    "use_vllm": "set it to vllm",
}
NO_COUNTERPART = {
    "bf16": "the parameters are bfloat16 on a GPU and float32 on a CPU",
    "fp16": "the parameters are bfloat16 on a GPU and float32 on a CPU",
    "gradient_accumulation_steps": "batch_size is a whole step's, and micro-batches follow from the memory",
    "logging_steps": "every step is logged",
    "reward_weights": "in Python, reward={function: weight} has the weights",
}
"""Why hone has no setting of this name."""


def foreign_hint(root: type, key: str) -> str:
    """Returns the part of an error message about a name that other programs have, or an empty string."""
    name = key.rpartition(".")[2]
    short_keys, known_keys = short_keys_of(root), leaves(root)
    for counterpart in COUNTERPARTS.get(name, ()):
        if counterpart in short_keys or counterpart in known_keys:
            if counterpart.rpartition(".")[2] == name:  # the name itself is known
                return ""
            remark = f" ({REMARKS[name]})" if name in REMARKS else ""
            return f" In hone it is {counterpart}{remark}."
    if name in NO_COUNTERPART:
        return f" hone has no such setting: {NO_COUNTERPART[name]}."
    if name in COUNTERPARTS and not any(key.endswith(f".{name}") for key in known_keys):
        return " hone has no such setting here."
    return foreign_answer(name)
