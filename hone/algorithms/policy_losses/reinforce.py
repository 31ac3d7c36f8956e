"""The plain policy gradient, −A·log π: under the name `reinforce`, and as GPG's loss (2504.02546)."""

from __future__ import annotations

from torch import Tensor

from hone.algorithms.policy_losses.policy_loss import Columns, PolicyLoss, Tokens, standard_metrics


def policy_gradient(tokens: Tokens) -> tuple[Tensor, Columns]:
    """−A·log π; no ratio, so the data must be close to on-policy or weighted."""
    return -tokens.advantages * tokens.log_prob, standard_metrics(tokens)


gpg = PolicyLoss("gpg", policy_gradient)
reinforce = PolicyLoss("reinforce", policy_gradient, default_agg_mode="seq-mean-token-sum")
