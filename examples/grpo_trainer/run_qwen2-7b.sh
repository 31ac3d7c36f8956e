#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2-7B-Instruct, for one machine with 8 GPUs.
#   python examples/data_preprocess/gsm8k.py --local_dir ~/data/gsm8k
#   bash examples/grpo_trainer/run_qwen2-7b.sh trainer.total_epochs=1
# DATA and MODEL name other files; every further word is an override of a key.
set -euo pipefail

data=${DATA:-$HOME/data/gsm8k}
model=${MODEL:-Qwen/Qwen2-7B-Instruct}

python3 -m hone.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.ref.fsdp_config.param_offload=true \
    actor_rollout_ref.rollout.n=5 \
    trainer.n_gpus_per_node=8 \
    trainer.project_name=gsm8k \
    trainer.experiment_name=qwen2-7b-grpo \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
