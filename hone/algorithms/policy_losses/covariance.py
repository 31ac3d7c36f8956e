"""Clip-Cov and KL-Cov (2505.22617): clip or penalise the few tokens that reduce entropy most.

For these tokens, advantage and log-probability are both far above the mini-batch means. Clip-Cov samples
them by a hash of their position, so the same batch always gives the same tokens.
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

_SELECTED_COLUMN = "high_covariance"


def _covariance(tokens: Tokens) -> Tensor:
    """Returns [B, T] (A − mean A)·(log π − mean log π)."""
    advantages, log_prob = (
        x - masked_mean(x, tokens.mask) for x in (tokens.advantages, tokens.log_prob)
    )
    return advantages * log_prob


def select_to_clip(tokens: Tokens) -> NamedTensors:
    """Samples a few tokens of high covariance that PPO does not already clip."""
    unclipped, clipped = surrogate_losses(tokens, bounded_log_ratio(tokens).exp())
    covariance = _covariance(tokens)
    lower = tokens.setting("policy_loss.clip_cov_lb")
    upper = tokens.setting("policy_loss.clip_cov_ub")
    is_eligible = tokens.mask & (covariance > lower) & (covariance < upper) & (clipped <= unclipped)
    count = _selected_count(tokens, "policy_loss.clip_cov_ratio")
    priority = torch.where(is_eligible, _position_hash(tokens.mask), torch.iinfo(torch.int64).max)
    return {_SELECTED_COLUMN: _mask_of_smallest(priority, count) & is_eligible}


def select_to_penalise(tokens: Tokens) -> NamedTensors:
    """Selects the tokens of highest covariance."""
    covariance = torch.where(tokens.mask, _covariance(tokens), -torch.inf)
    count = _selected_count(tokens, "policy_loss.kl_cov_ratio")
    return {_SELECTED_COLUMN: _mask_of_smallest(-covariance, count) & tokens.mask}


def _selected_count(tokens: Tokens, key: str) -> int:
    """Returns the number of tokens to select: the fraction `key` of all tokens, but at least 1."""
    return max(int(tokens.setting(key) * int(tokens.mask.sum())), 1)


def _mask_of_smallest(x: Tensor, count: int) -> Tensor:
    """Returns a mask of the `count` smallest entries; of equal entries, the first are taken."""
    selected = torch.zeros(x.numel(), dtype=torch.bool, device=x.device)
    selected[torch.sort(x.flatten(), stable=True).indices[:count]] = True
    return selected.view_as(x)


def _position_hash(mask: Tensor) -> Tensor:
    """Returns [B, T] non-negative integers that depend on row and position, not on the padded width."""
    row = torch.arange(mask.shape[0], device=mask.device).unsqueeze(-1)
    position = torch.arange(mask.shape[1], device=mask.device)
    x = row * 0x9E3779B1 + position * 0x85EBCA77 + 0x165667B1
    for factor in (0x7FEB352D, 0x846CA68B):  # 32-bit integer mixing, kept below 2**31
        x = ((x ^ (x >> 15)) & 0x7FFFFFFF) * factor & 0x7FFFFFFF
    return x ^ (x >> 16)


def clip_cov_loss(tokens: Tokens) -> tuple[Tensor, NamedTensors]:
    """max(−A·r, −A·clip(r)) with r = π/π_old; 0 for the selected tokens."""
    is_selected = tokens.prepared[_SELECTED_COLUMN]
    unclipped, clipped = surrogate_losses(tokens, bounded_log_ratio(tokens).exp())
    loss = torch.where(is_selected, 0.0, torch.maximum(unclipped, clipped))
    return loss, standard_metrics(tokens, is_selected)


def kl_cov_loss(tokens: Tokens) -> tuple[Tensor, NamedTensors]:
    """−A·r with r = π/π_old, plus ppo_kl_coef·|log r| for the selected tokens."""
    distance = tokens.log_ratio.abs()
    loss = -tokens.advantages * bounded_log_ratio(tokens).exp()
    penalty = tokens.setting("policy_loss.ppo_kl_coef") * distance
    loss = loss + torch.where(tokens.prepared[_SELECTED_COLUMN], penalty, 0.0)
    return loss, {**standard_metrics(tokens), "actor/ppo_kl": distance}


clip_cov = PolicyLoss("clip_cov", clip_cov_loss, prepare_tokens=select_to_clip)
kl_cov = PolicyLoss("kl_cov", kl_cov_loss, prepare_tokens=select_to_penalise)
