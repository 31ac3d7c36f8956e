#!/usr/bin/env bash
# GRPO on GSM8K with LoRA adapters on Qwen2.5-3B-Instruct: the base stays frozen, so one GPU of 24 GB holds it.
#   python examples/data_preprocess/gsm8k.py --local_dir ~/data/gsm8k
#   bash examples/grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh trainer.n_gpus_per_node=2
# DATA and MODEL name other files; every further word is an override of a key.
set -euo pipefail

data=${DATA:-$HOME/data/gsm8k}
model=${MODEL:-Qwen/Qwen2.5-3B-Instruct}

python3 -m hone.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.model.lora_rank=64 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.model.target_modules=all-linear \
    actor_rollout_ref.actor.optim.lr=2e-5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.rollout.n=5 \
    trainer.project_name=gsm8k \
    trainer.experiment_name=qwen2.5-3b-grpo-lora \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=3 \
    "$@"
