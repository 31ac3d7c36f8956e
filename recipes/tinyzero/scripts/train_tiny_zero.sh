#!/usr/bin/env bash
# PPO with a critic on countdown or multiply. The environment says where and what:
#   N_GPUS           processes, one a device
#   BASE_MODEL       model folder or hub name
#   DATA_DIR         folder with train.parquet and test.parquet
#   ROLLOUT_TP_SIZE  1: the native engine keeps the whole model on each device
#   EXPERIMENT_NAME  name in the trackers and of the run folder
# Further key=value overrides may follow on the command line.
set -euo pipefail
: "${BASE_MODEL:?set BASE_MODEL to a model folder or hub name}"
: "${DATA_DIR:?set DATA_DIR to the folder with train.parquet and test.parquet}"
: "${N_GPUS:=1}" "${ROLLOUT_TP_SIZE:=1}" "${EXPERIMENT_NAME:=countdown-ppo}"

exec "${PYTHON:-python3}" -m hone.trainer.main_ppo \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.prompt_format=raw \
    data.train_batch_size=256 \
    data.val_batch_size=1312 \
    data.max_prompt_length=256 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="$BASE_MODEL" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size=8 \
    actor_rollout_ref.actor.entropy_coeff=0.001 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP_SIZE" \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.n=1 \
    actor_rollout_ref.ref.log_prob_micro_batch_size=4 \
    critic.optim.lr=1e-5 \
    critic.model.path="$BASE_MODEL" \
    critic.ppo_micro_batch_size=8 \
    algorithm.adv_estimator=gae \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.kl_coef=0.001 \
    +trainer.val_before_train=False \
    trainer.n_gpus_per_node="$N_GPUS" \
    trainer.nnodes=1 \
    trainer.save_freq=100 \
    trainer.test_freq=100 \
    trainer.project_name=TinyZero \
    trainer.experiment_name="$EXPERIMENT_NAME" \
    trainer.total_epochs=15 \
    "$@"
