#!/usr/bin/env bash
# GRPO with searches, with the authors' settings (their v0.2). The environment says where and what:
#   BASE_MODEL   model folder or hub name           DATA_DIR   folder with train.parquet and test.parquet
#   N_GPUS       processes, one per device: 8       RETRIEVER  URL of the retrieval service
# Further key=value overrides may follow on the command line.
set -euo pipefail
: "${BASE_MODEL:?set BASE_MODEL to a model folder or hub name}"
: "${DATA_DIR:?set DATA_DIR to the folder with train.parquet and test.parquet}"
: "${N_GPUS:=8}" "${EXPERIMENT_NAME:=search-r1-grpo}" "${RETRIEVER:=http://127.0.0.1:8000/retrieve}"

exec "${PYTHON:-python3}" -m hone.trainer.main_ppo \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.train_batch_size=512 \
    data.max_start_length=2048 \
    data.max_prompt_length=4096 \
    data.max_response_length=500 \
    data.max_obs_length=500 \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path="$BASE_MODEL" \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.rollout.n_agent=5 \
    actor_rollout_ref.rollout.top_p=0.95 \
    do_search=true \
    max_turns=4 \
    retriever.url="$RETRIEVER" \
    retriever.topk=3 \
    trainer.n_gpus_per_node="$N_GPUS" \
    trainer.val_before_train=true \
    trainer.save_freq=100 \
    trainer.test_freq=100 \
    trainer.project_name=Search-R1 \
    trainer.experiment_name="$EXPERIMENT_NAME" \
    trainer.total_epochs=15 \
    trainer.total_training_steps=1005 \
    "$@"
