#!/bin/sh
# GRPO on sums with SmolLM2-135M: MODEL is the folder of `hone model get smollm2-135m MODEL`.
set -eu
MODEL=${1:?model folder} DATA=${2:?data folder} OUT=${3:?run folder}
HERE=$(dirname "$0") PYTHON=${PYTHON:-python3}
shift 3
"$PYTHON" "$HERE/prepare.py" "$DATA"
exec "$PYTHON" -m hone.trainer.main_ppo \
  actor_rollout_ref.model.path="$MODEL" \
  data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
  data.train_batch_size=128 data.max_prompt_length=96 data.max_response_length=24 \
  custom_reward_function.path="$HERE/reward.py" \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.max_num_seqs=1024 \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.optim.lr=1e-5 \
  trainer.total_training_steps=100 trainer.test_freq=10 trainer.val_before_train=true \
  trainer.default_local_dir="$OUT" "$@"
