"""Which steps a run needs, read off the columns its algorithm declares; no name is special-cased."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hone.algorithms.advantages import needs
from hone.algorithms.policy_losses import get_policy_loss_fn
from hone.config import PPOTrainerConfig, replace


def with_schedule_length(config: PPOTrainerConfig, total: int) -> PPOTrainerConfig:
    """Learning-rate schedules end with the run; the actor's begins after `critic_warmup`."""
    actor_steps = max(total - config.trainer.critic_warmup, 1)
    if config.actor_rollout_ref.actor.optim.total_training_steps <= 0:
        key = "actor_rollout_ref.actor.optim.total_training_steps"
        config = replace(config, key, actor_steps)
    if config.critic.optim.total_training_steps <= 0:
        config = replace(config, "critic.optim.total_training_steps", total)
    return config


@dataclass(frozen=True)
class Plan:
    """What the loop computes each step, beyond generating and scoring."""

    columns: tuple[str, ...]
    """Columns the advantage estimator reads beyond rewards, mask and uid."""
    reference: bool
    critic: bool
    reward_model: Literal["orm", "prm"] | None
    old_log_probs: bool
    """Whether a pass before the update computes them; else the update's own forward gives them,
    which is the same when each batch is used for exactly one update."""
    sum_pi_squared: bool
    rows_per_update: tuple[int, ...]
    """Rows of a mini-batch of each role that is trained."""

    @property
    def log_prob_pass(self) -> bool:
        """Whether the actor runs over the batch before the update."""
        return self.old_log_probs or self.sum_pi_squared

    @staticmethod
    def of(config: PPOTrainerConfig) -> Plan:
        algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
        columns = needs(algorithm.adv_estimator, algorithm)
        critic = "values" in columns if config.critic.enable is None else config.critic.enable
        one_update = (
            actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= config.data.train_batch_size
        )
        # An unknown loss is said now, not at the first update.
        get_policy_loss_fn(actor.policy_loss.loss_mode)
        correction = algorithm.rollout_correction
        reads_old = (
            "old_log_probs" in columns
            or algorithm.use_kl_in_reward
            or correction.rollout_is is not None
            or correction.rollout_rs is not None
            or config.trainer.critic_warmup > 0
        )
        return Plan(
            columns=columns,
            reference=algorithm.use_kl_in_reward or actor.use_kl_loss,
            critic=critic,
            reward_model=config.reward_model.type if config.reward_model.enable else None,
            # In bypass mode the rollout's own log-probs stand for them.
            old_log_probs=not correction.bypass_mode and (reads_old or not one_update),
            sum_pi_squared="sum_pi_squared" in columns or actor.calculate_sum_pi_squared,
            rows_per_update=(
                actor.sequences_per_update(),
                *([config.critic.sequences_per_update()] if critic else []),
            ),
        )
