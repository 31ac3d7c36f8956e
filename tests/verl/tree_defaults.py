"""The defaults and scripts of TinyZero, Search-R1, PURE (branch verl) and verl 0.3, as facts about them.

Read in the `ppo_trainer.yaml` of each. A default that follows another key of the same tree is left out, and
so are keys that only decide speed, memory or places (`HONES_OWN`), which are hone's in every tree.
"""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

HONES_OWN = (
    # how many devices, how much memory and how fast
    *(
        "trainer.n_gpus_per_node",
        "**.strategy",
        "**.*micro_batch_size*",
        "**.*max_token_len_per_gpu",
    ),
    *("**.use_dynamic_bsz", "**.log_prob_use_dynamic_bsz", "**.enable_gradient_checkpointing"),
    *("**.rollout.name", "**.rollout.gpu_memory_utilization", "**.rollout.enforce_eager"),
    *("**.rollout.free_cache_engine", "**.rollout.tensor_model_parallel_size"),
    *("**.rollout.max_num_batched_tokens", "**.rollout.max_num_seqs", "**.rollout.max_model_len"),
    *("**.use_torch_compile", "**.rollout.prompt_length", "**.rollout.response_length"),
    # where things lie
    *("trainer.logger", "trainer.project_name", "trainer.experiment_name", "trainer.default_*_dir"),
    *("critic.model.path", "**.checkpoint.save_contents", "data.val_batch_size"),
    "global_profiler.save_path",
)

_OLD: Values = {
    "data.train_files": ["~/data/rlhf/gsm8k/train.parquet"],
    "data.val_files": ["~/data/rlhf/gsm8k/test.parquet"],
    "data.prompt_key": "prompt",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    "data.shuffle": True,
    "actor_rollout_ref.hybrid_engine": True,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.grad_clip": 1.0,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.entropy_coeff": 0.001,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.shuffle": False,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.0,
    "actor_rollout_ref.actor.optim.warmup_style": "constant",
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.rollout.top_k": -1,
    "actor_rollout_ref.rollout.top_p": 1.0,
    "actor_rollout_ref.rollout.ignore_eos": False,
    "actor_rollout_ref.rollout.do_sample": True,
    "actor_rollout_ref.rollout.n": 1,
    "critic.optim.lr": 1e-5,
    "critic.optim.lr_warmup_steps_ratio": 0.0,
    "critic.optim.warmup_style": "constant",
    "critic.ppo_mini_batch_size": 256,
    "critic.ppo_epochs": 1,
    "critic.shuffle": False,
    "critic.grad_clip": 1.0,
    "critic.cliprange_value": 0.5,
    "reward_model.enable": False,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.adv_estimator": "gae",
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "trainer.total_epochs": 30,
    "trainer.total_training_steps": None,
    "trainer.nnodes": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.critic_warmup": 0,
    # in the code: `trainer.get("val_before_train", True)`, and the KL where `use_kl_loss` is false
    "trainer.val_before_train": True,
    "algorithm.use_kl_in_reward": True,
}
DEFAULTS: dict[str, Values] = {
    "verl-0.3": _OLD | {"reward_model.reward_manager": "naive", "trainer.balance_batch": True},
    # its data set tokenizes the text of the prompt without a chat template
    "tinyzero": _OLD | {"data.prompt_format": "raw"},
    "search_r1": _OLD
    | {
        "actor_rollout_ref.rollout.top_p": 0.95,
        "reward_model.structure_format_score": 0.0,
        "reward_model.final_format_score": 0.0,
        "reward_model.retrieval_score": 0.0,
        "retriever.url": "http://127.0.0.1:8000/retrieve",
        "retriever.topk": 3,
        # max_start_length, max_prompt_length, max_response_length, max_obs_length, max_turns and do_search
        "data.max_prompt_length": 256,
        "data.max_response_length": 512,
        "actor_rollout_ref.rollout.max_tokens_per_turn": 512,
        "actor_rollout_ref.rollout.multi_turn.max_observation_tokens": 512,
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 11,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "search_agent",
    },
    "pure": _OLD
    | {
        "data.train_files": ["train.parquet"],
        "data.val_files": ["aime2024.parquet", "math500.parquet"],
        "data.prompt_key": "question",
        # its code adds an instruction to the question, without a chat template
        "data.prompt_format": "raw",
        "data.max_prompt_length": 1024,
        "data.max_response_length": 7168,
        "data.train_batch_size": 64,
        # 256 and 128 there; a step has 64 prompts, all of them in one update
        "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
        "critic.ppo_mini_batch_size": 64,
        "actor_rollout_ref.actor.entropy_coeff": 0.0,
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B",
        "actor_rollout_ref.rollout.n": 8,
        "critic.optim.lr": 5e-6,
        "reward_model.enable": True,
        "reward_model.type": "prm",
        "reward_model.model.path": "jinachris/PURE-PRM-7B",
        "reward_model.credit_assignment": 0.1,
        "reward_model.reward_manager": "prime",
        "reward_model.verifiable_reward_coef": 1.0,
        "algorithm.adv_estimator": "rloo",
        "algorithm.adv_norm": True,
        "algorithm.kl_penalty": "low_var_kl",
        "trainer.total_epochs": 20,
        "trainer.save_freq": 50,
        "trainer.test_freq": 10,
    },
}

_TINYZERO = """
    data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=256
    data.val_batch_size=1312 data.max_prompt_length=256 data.max_response_length=1024
    actor_rollout_ref.model.path=base actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size=8
    actor_rollout_ref.rollout.log_prob_micro_batch_size=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4
    actor_rollout_ref.ref.log_prob_micro_batch_size=4 critic.optim.lr=1e-5 critic.model.path=base
    critic.ppo_micro_batch_size=8 algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=['wandb']
    +trainer.val_before_train=False trainer.default_hdfs_dir=null trainer.n_gpus_per_node=1
    trainer.nnodes=1 trainer.save_freq=100 trainer.test_freq=100 trainer.project_name=TinyZero
    trainer.experiment_name=countdown trainer.total_epochs=15
"""
_SEARCH_R1 = """
    data.train_files=train.parquet data.val_files=test.parquet data.train_data_num=null
    data.val_data_num=null data.train_batch_size=512 data.val_batch_size=256
    data.max_prompt_length=4096 data.max_response_length=500 data.max_start_length=2048
    data.max_obs_length=500 data.shuffle_train_dataloader=True actor_rollout_ref.model.path=base
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size=64
    actor_rollout_ref.actor.fsdp_config.grad_offload=true
    actor_rollout_ref.rollout.log_prob_micro_batch_size=128
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.ref.log_prob_micro_batch_size=128 actor_rollout_ref.rollout.temperature=1
    actor_rollout_ref.actor.state_masking=true algorithm.no_think_rl=false trainer.logger=['wandb']
    +trainer.val_only=false +trainer.val_before_train=true trainer.default_hdfs_dir=null
    trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=100 trainer.test_freq=50
    trainer.project_name=Search-R1 trainer.experiment_name=nq trainer.total_epochs=15
    trainer.total_training_steps=1005 max_turns=2 retriever.url=http://127.0.0.1:8000/retrieve
    retriever.topk=3
"""
SCRIPTS: dict[str, list[str]] = {
    "tinyzero": _TINYZERO.split(),
    "search_r1 ppo": [
        *_SEARCH_R1.split(),
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.rollout.n_agent=1",
        "critic.optim.lr=1e-5",
        "critic.optim.lr_warmup_steps_ratio=0.015",
        "critic.model.path=base",
        "critic.ppo_micro_batch_size=8",
        "algorithm.kl_ctrl.kl_coef=0.001",
        "trainer.critic_warmup=0",
    ],
    "search_r1 grpo": [
        *_SEARCH_R1.split(),
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n_agent=5",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    ],
    # `train.parquet` and the rest are in the tree's own file; a command changes what differs
    "pure": ["reward_model.credit_assignment=0.1", "trainer.project_name=pure_verl"],
}
"""The commands of the three, without the name of the program; paths and numbers of devices are shortened."""

SCRIPT_VALUES: dict[str, Values] = {
    "tinyzero": {
        "data.train_files": ["train.parquet"],
        "data.val_files": ["test.parquet"],
        "actor_rollout_ref.model.path": "base",
        "data.train_batch_size": 256,
        "data.max_prompt_length": 256,
        "data.max_response_length": 1024,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
        "critic.ppo_mini_batch_size": 64,
        "trainer.val_before_train": False,
        "trainer.save_freq": 100,
        "trainer.test_freq": 100,
        "trainer.total_epochs": 15,
    },
    "search_r1 ppo": {
        "data.train_files": ["train.parquet"],
        "data.val_files": ["test.parquet"],
        "actor_rollout_ref.model.path": "base",
        "data.train_batch_size": 512,
        "data.max_prompt_length": 2048,
        "data.max_response_length": 4096,
        "actor_rollout_ref.rollout.max_tokens_per_turn": 500,
        "actor_rollout_ref.rollout.multi_turn.max_observation_tokens": 500,
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 3,
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.285,
        "critic.optim.lr_warmup_steps_ratio": 0.015,
        "trainer.save_freq": 100,
        "trainer.test_freq": 50,
        "trainer.total_epochs": 15,
        "trainer.total_training_steps": 1005,
    },
    "pure": {},
}
SCRIPT_VALUES["search_r1 grpo"] = SCRIPT_VALUES["search_r1 ppo"] | {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 5,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "algorithm.use_kl_in_reward": False,
    # 256 responses there: ten updates of a step's 512 prompts with five responses, here too
    "actor_rollout_ref.actor.ppo_mini_batch_size": 52,
    "critic.ppo_mini_batch_size": 52,
    "critic.optim.lr_warmup_steps_ratio": 0.0,
}
"""What each script changes in the defaults of its tree, in hone's keys."""
