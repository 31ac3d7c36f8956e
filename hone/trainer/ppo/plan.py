"""Which steps a run needs, read off the columns its algorithm declares; no name is special-cased."""

from __future__ import annotations

from dataclasses import dataclass

from hone.algorithms.advantages import needs
from hone.config import PPOTrainerConfig


@dataclass(frozen=True)
class Plan:
    """What the loop computes each step, beyond generating and scoring."""

    columns: tuple[str, ...]
    """Columns the advantage estimator reads beyond rewards, mask and uid."""
    reference: bool
    critic: bool
    old_log_probs: bool
    """Whether a pass before the update computes them; else the update's own forward gives them,
    which is the same when each batch is used for exactly one update."""

    @staticmethod
    def of(config: PPOTrainerConfig) -> Plan:
        algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
        columns = needs(algorithm.adv_estimator, algorithm)
        critic = "values" in columns if config.critic.enable is None else config.critic.enable
        one_update = (
            actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= config.data.train_batch_size
        )
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
            old_log_probs=reads_old or not one_update,
        )
