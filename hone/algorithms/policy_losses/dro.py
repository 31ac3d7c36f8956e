"""DRO (2405.19107): policy gradient with a quadratic pull towards the old policy, no clip."""

from __future__ import annotations

from torch import Tensor

from hone.algorithms.policy_losses.policy_loss import Columns, PolicyLoss, Tokens, standard_metrics


def quadratic_pull(tokens: Tokens) -> tuple[Tensor, Columns]:
    """−(A·log π − β/2·(log π/π_old)²)."""
    beta = tokens.setting("policy_loss.dro_beta")
    if beta is None or beta <= 0:
        raise ValueError(
            f"loss_mode=dro needs actor_rollout_ref.actor.policy_loss.dro_beta above 0, got {beta}"
        )
    loss = -(tokens.advantages * tokens.log_prob - beta / 2 * tokens.log_ratio**2)
    return loss, standard_metrics(tokens)


dro = PolicyLoss("dro", quadratic_pull)
