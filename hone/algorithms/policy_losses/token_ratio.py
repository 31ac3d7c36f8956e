"""Token-level losses other than PPO's clip: CISPO, SAPO, DPPO, DRO, and the plain policy gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.policy_losses.policy_loss import (
    Columns,
    PolicyLoss,
    Tokens,
    clipped_log_ratio,
    standard_metrics,
)

_EPS = 1e-8


def policy_gradient(tokens: Tokens) -> tuple[Tensor, Columns]:
    """−A·log π (GPG, 2504.02546); without a ratio, the data must be nearly on-policy or weighted."""
    return -tokens.advantages * tokens.log_prob, standard_metrics(tokens)


def cispo_loss(tokens: Tokens) -> tuple[Tensor, Columns]:
    """−sg(clip(r))·A·log π (2506.13585); pg_clipfrac counts tokens clipped on either side."""
    low, high = tokens.clip_bounds()
    log_ratio = clipped_log_ratio(tokens).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - low, 1 + high)
    loss = -weight * tokens.advantages * tokens.log_prob
    return loss, standard_metrics(tokens, ratio != weight, log_ratio=log_ratio)


def sapo_loss(tokens: Tokens) -> tuple[Tensor, Columns]:
    """−A·σ(τ(r−1))·4/τ (2511.20347); τ is larger if the advantage is not positive."""
    positive, negative = tokens.setting("tau_pos"), tokens.setting("tau_neg")
    if positive <= 0 or negative <= 0:
        raise ValueError(f"sapo: tau_pos={positive} and tau_neg={negative} must both be above 0")
    log_ratio = clipped_log_ratio(tokens)
    ratio = log_ratio.exp()
    tau = torch.full_like(ratio, negative).masked_fill(tokens.advantages > 0, positive)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return -tokens.advantages * gate, standard_metrics(tokens, log_ratio=log_ratio)


def quadratic_penalty(tokens: Tokens) -> tuple[Tensor, Columns]:
    """−(A·log π − β/2·(log π/π_old)²) (2405.19107): a quadratic penalty instead of a clip."""
    beta = tokens.setting("policy_loss.dro_beta")
    if beta is None or beta <= 0:
        raise ValueError(
            f"loss_mode=dro needs actor_rollout_ref.actor.policy_loss.dro_beta above 0, got {beta}"
        )
    loss = -(tokens.advantages * tokens.log_prob - beta / 2 * tokens.log_ratio**2)
    return loss, standard_metrics(tokens)


def _masked_gradient(tokens: Tokens, keep: Tensor) -> tuple[Tensor, Columns]:
    """−A·sg(min(r, c))·log π on the kept tokens (DPPO, 2602.04879).

    pg_clipfrac counts dropped tokens, pg_clipfrac_lower kept tokens whose ratio was truncated at c.
    """
    log_ratio = clipped_log_ratio(tokens).detach()
    ratio, ceiling = log_ratio.exp(), tokens.setting("clip_ratio_c")
    loss = -tokens.advantages * ratio.clamp(max=ceiling) * tokens.log_prob
    loss = torch.where(keep, loss, 0.0)
    return loss, standard_metrics(tokens, ~keep, keep & (ratio > ceiling), log_ratio)


def total_variation(tokens: Tokens) -> tuple[Tensor, Columns]:
    """Keeps tokens with π − π_old ≤ high if A > 0, ≥ −low otherwise."""
    low, high = tokens.clip_bounds()
    change = tokens.log_prob.detach().exp() - tokens.old_log_prob.exp()
    keep = torch.where(tokens.advantages > 0, change <= high, change >= -low)
    return _masked_gradient(tokens, keep)


def binary_kl(tokens: Tokens) -> tuple[Tensor, Columns]:
    """Keeps tokens whose binary KL between π_old and π is in bounds, or that move back to π_old."""
    low, high = tokens.clip_bounds()
    new = tokens.log_prob.detach().exp()
    old = tokens.old_log_prob.exp()
    # The other outcome of the binary distribution: any other token.
    other_old, other_new = (1 - old).clamp(min=_EPS), (1 - new).clamp(min=_EPS)
    divergence = -old * tokens.log_ratio.detach() + other_old * (other_old / other_new).log()
    keep = torch.where(
        tokens.advantages > 0,
        (divergence <= high) | (new <= old),
        (divergence <= low) | (new >= old),
    )
    return _masked_gradient(tokens, keep)


gpg = PolicyLoss("gpg", policy_gradient)
reinforce = PolicyLoss("reinforce", policy_gradient, default_agg_mode="seq-mean-token-sum")
cispo = PolicyLoss("cispo", cispo_loss)
sapo = PolicyLoss("sapo", sapo_loss, agg_mode="seq-mean-token-mean")
dro = PolicyLoss("dro", quadratic_penalty)
dppo_tv = PolicyLoss("dppo_tv", total_variation)
dppo_kl = PolicyLoss("dppo_kl", binary_kl)
