"""Losses other than PPO's clip, with one ratio per token (CISPO, SAPO, DPPO, DRO, the plain policy gradient)
or per sequence (GSPO 2507.18071, LUSPO 2602.05261, GMPO 2507.20673).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.policy_losses.policy_loss import (
    NamedTensors,
    PolicyLoss,
    Tokens,
    bounded_log_ratio,
    standard_metrics,
    surrogate_losses,
)
from hone.ops.rows import masked_mean

_EPS = 1e-8
_EXPONENT_CEILING = 10.0


def policy_gradient_loss(tokens: Tokens) -> tuple[Tensor, NamedTensors]:
    """−A·log π (GPG, 2504.02546); without a ratio, the data must be nearly on-policy or weighted."""
    return -tokens.advantages * tokens.log_prob, standard_metrics(tokens)


def cispo_loss(tokens: Tokens) -> tuple[Tensor, NamedTensors]:
    """−sg(clip(r))·A·log π (2506.13585), sg = stop-gradient; pg_clipfrac counts clips on both sides."""
    low, high = tokens.clip_bounds()
    log_ratio = bounded_log_ratio(tokens).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - low, 1 + high)
    loss = -weight * tokens.advantages * tokens.log_prob
    return loss, standard_metrics(tokens, ratio != weight, log_ratio=log_ratio)


def sapo_loss(tokens: Tokens) -> tuple[Tensor, NamedTensors]:
    """−A·σ(τ(r−1))·4/τ (2511.20347); τ is tau_pos if A > 0, else tau_neg."""
    tau_pos, tau_neg = tokens.setting("tau_pos"), tokens.setting("tau_neg")
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"sapo: tau_pos={tau_pos} and tau_neg={tau_neg} must both be above 0")
    log_ratio = bounded_log_ratio(tokens)
    ratio = log_ratio.exp()
    tau = torch.full_like(ratio, tau_neg).masked_fill(tokens.advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return -tokens.advantages * gate, standard_metrics(tokens, log_ratio=log_ratio)


def dro_loss(tokens: Tokens) -> tuple[Tensor, NamedTensors]:
    """−(A·log π − β/2·(log π/π_old)²) (2405.19107): a quadratic penalty instead of a clip."""
    beta = tokens.setting("policy_loss.dro_beta")
    if beta is None or beta <= 0:
        raise ValueError(
            f"loss_mode=dro needs actor_rollout_ref.actor.policy_loss.dro_beta above 0, got {beta}"
        )
    loss = -(tokens.advantages * tokens.log_prob - beta / 2 * tokens.log_ratio**2)
    return loss, standard_metrics(tokens)


def _masked_gradient_loss(tokens: Tokens, keep_mask: Tensor) -> tuple[Tensor, NamedTensors]:
    """−A·sg(min(r, c))·log π on the tokens in `keep_mask`, 0 on others (DPPO, 2602.04879); c = clip_ratio_c.

    pg_clipfrac counts the others; pg_clipfrac_lower counts tokens in `keep_mask` whose ratio is above c.
    """
    log_ratio = bounded_log_ratio(tokens).detach()
    ratio, ceiling = log_ratio.exp(), tokens.setting("clip_ratio_c")
    loss = -tokens.advantages * ratio.clamp(max=ceiling) * tokens.log_prob
    loss = torch.where(keep_mask, loss, 0.0)
    return loss, standard_metrics(tokens, ~keep_mask, keep_mask & (ratio > ceiling), log_ratio)


def dppo_tv_loss(tokens: Tokens) -> tuple[Tensor, NamedTensors]:
    """`_masked_gradient_loss` on the tokens with π − π_old ≤ high if A > 0, and ≥ −low otherwise."""
    low, high = tokens.clip_bounds()
    change = tokens.log_prob.detach().exp() - tokens.old_log_prob.exp()
    keep_mask = torch.where(tokens.advantages > 0, change <= high, change >= -low)
    return _masked_gradient_loss(tokens, keep_mask)


def dppo_kl_loss(tokens: Tokens) -> tuple[Tensor, NamedTensors]:
    """`_masked_gradient_loss` on the tokens whose binary KL(π_old, π) is in bounds or would shrink."""
    low, high = tokens.clip_bounds()
    prob = tokens.log_prob.detach().exp()
    old_prob = tokens.old_log_prob.exp()
    # The second outcome of the binary distribution is any other token.
    other_old, other_new = (1 - old_prob).clamp(min=_EPS), (1 - prob).clamp(min=_EPS)
    divergence = -old_prob * tokens.log_ratio.detach() + other_old * (other_old / other_new).log()
    keep_mask = torch.where(
        tokens.advantages > 0,
        (divergence <= high) | (prob <= old_prob),
        (divergence <= low) | (prob >= old_prob),
    )
    return _masked_gradient_loss(tokens, keep_mask)


def sequence_clip_loss(tokens: Tokens) -> tuple[Tensor, NamedTensors]:
    """max(−A·s, −A·clip(s)), s = exp(mean log-ratio); the gradient at a token is that of its own log π."""
    mean_log_ratio = masked_mean(tokens.log_ratio, tokens.mask, -1).unsqueeze(-1).detach()
    log_ratio = tokens.log_prob - tokens.log_prob.detach() + mean_log_ratio
    ratio = log_ratio.clamp(max=_EXPONENT_CEILING).exp()
    unclipped, clipped = surrogate_losses(tokens, ratio)
    return torch.maximum(unclipped, clipped), standard_metrics(tokens, clipped > unclipped)


def geometric_mean_loss(tokens: Tokens) -> tuple[Tensor, NamedTensors]:
    """−mean(A)·exp(mean log-ratio), where log-ratios are clipped above if A > 0 and below if A < 0.

    pg_clipfrac counts tokens with A > 0 outside of either bound, pg_clipfrac_lower those with A < 0.
    """
    low, high = tokens.clip_bounds()
    sign = tokens.advantages.sign()
    log_ratio = bounded_log_ratio(tokens)
    clipped_log_ratio = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-low, high))
    ratio = masked_mean(clipped_log_ratio, tokens.mask, -1).exp()
    loss = -masked_mean(tokens.advantages, tokens.mask, -1) * ratio
    if tokens.weights is not None:
        log_weights = torch.where(tokens.mask, tokens.weights, torch.ones_like(loss[:, None])).log()
        loss = loss * masked_mean(log_weights, tokens.mask, -1).exp()
    is_outside = (log_ratio > high) | (log_ratio < -low)
    metrics = standard_metrics(tokens, is_outside & (sign > 0), is_outside & (sign < 0))
    return loss.unsqueeze(-1).expand_as(log_ratio), metrics


gpg = PolicyLoss("gpg", policy_gradient_loss)
reinforce = PolicyLoss("reinforce", policy_gradient_loss, default_agg_mode="seq-mean-token-sum")
cispo = PolicyLoss("cispo", cispo_loss)
sapo = PolicyLoss("sapo", sapo_loss, agg_mode="seq-mean-token-mean")
dro = PolicyLoss("dro", dro_loss)
dppo_tv = PolicyLoss("dppo_tv", dppo_tv_loss)
dppo_kl = PolicyLoss("dppo_kl", dppo_kl_loss)
gspo = PolicyLoss("gspo", sequence_clip_loss, default_agg_mode="seq-mean-token-mean")
luspo = PolicyLoss("luspo", sequence_clip_loss, agg_mode="seq-mean-token-sum")
geo_mean = PolicyLoss(
    "geo_mean", geometric_mean_loss, agg_mode="seq-mean-token-mean", applies_weights=True
)
