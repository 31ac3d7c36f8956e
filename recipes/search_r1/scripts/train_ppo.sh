#!/usr/bin/env bash
# PPO with a critic and searches, with the authors' settings (their v0.2); the environment is train_grpo.sh's.
set -euo pipefail
: "${BASE_MODEL:?set BASE_MODEL to a model folder or hub name}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/train_grpo.sh" \
    algorithm.adv_estimator=gae \
    algorithm.use_kl_in_reward=true \
    algorithm.kl_ctrl.kl_coef=0.001 \
    actor_rollout_ref.actor.use_kl_loss=false \
    actor_rollout_ref.rollout.n_agent=1 \
    actor_rollout_ref.rollout.top_p=1.0 \
    critic.model.path="$BASE_MODEL" \
    critic.model.enable_gradient_checkpointing=true \
    critic.optim.lr=1e-5 \
    critic.optim.lr_warmup_steps_ratio=0.015 \
    trainer.experiment_name="${EXPERIMENT_NAME:-search-r1-ppo}" \
    "$@"
