"""Clip-Cov and KL-Cov (2505.22617): restrain the few tokens that reduce entropy most.

For these tokens, advantage and log-probability are both far above the mini-batch means, so both rules
first process the whole mini-batch. Clip-Cov's random choice is a hash of the token's position, so the
same batch always gives the same choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.policy_losses.policy_loss import Columns, PolicyLoss, Tokens, standard_metrics
from hone.ops.masked import masked_mean

_CHOSEN = "high_covariance"


def _covariance(tokens: Tokens) -> Tensor:
    """[B, T] (A − mean A)·(log π − mean log π)."""
    advantages, log_prob = tokens.advantages, tokens.log_prob
    return (advantages - masked_mean(advantages, tokens.mask)) * (
        log_prob - masked_mean(log_prob, tokens.mask)
    )


def _surrogates(tokens: Tokens) -> tuple[Tensor, Tensor]:
    low, high = tokens.clip_bounds()
    ratio = tokens.log_ratio.exp()
    return -tokens.advantages * ratio, -tokens.advantages * ratio.clamp(1 - low, 1 + high)


def choose_to_clip(tokens: Tokens) -> Columns:
    """Samples a few tokens of high covariance that PPO does not already clip."""
    plain, clipped = _surrogates(tokens)
    covariance = _covariance(tokens)
    lower = tokens.setting("policy_loss.clip_cov_lb")
    upper = tokens.setting("policy_loss.clip_cov_ub")
    eligible = tokens.mask & (covariance > lower) & (covariance < upper) & (clipped <= plain)
    count = _share(tokens, "policy_loss.clip_cov_ratio")
    lottery = torch.where(eligible, _hash_of_place(tokens.mask), torch.iinfo(torch.int64).max)
    return {_CHOSEN: _smallest(lottery, count) & eligible}


def choose_to_penalise(tokens: Tokens) -> Columns:
    """Selects the tokens of highest covariance."""
    covariance = torch.where(tokens.mask, _covariance(tokens), -torch.inf)
    return {
        _CHOSEN: _smallest(-covariance, _share(tokens, "policy_loss.kl_cov_ratio")) & tokens.mask
    }


def _share(tokens: Tokens, key: str) -> int:
    return max(int(tokens.setting(key) * int(tokens.mask.sum())), 1)


def _smallest(x: Tensor, count: int) -> Tensor:
    """Returns a mask of the `count` smallest entries; the first ones in a tie."""
    selected = torch.zeros(x.numel(), dtype=torch.bool, device=x.device)
    selected[torch.sort(x.flatten(), stable=True).indices[:count]] = True
    return selected.view_as(x)


def _hash_of_place(mask: Tensor) -> Tensor:
    """[B, T] non-negative integers that depend on row and column only, not on the padded width."""
    row = torch.arange(mask.shape[0], device=mask.device).unsqueeze(-1)
    column = torch.arange(mask.shape[1], device=mask.device)
    x = row * 0x9E3779B1 + column * 0x85EBCA77 + 0x165667B1
    for factor in (0x7FEB352D, 0x846CA68B):  # 32-bit integer mixing, kept below 2**31
        x = ((x ^ (x >> 15)) & 0x7FFFFFFF) * factor & 0x7FFFFFFF
    return x ^ (x >> 16)


def clipped_by_covariance(tokens: Tokens) -> tuple[Tensor, Columns]:
    """max(−A·r, −A·clip(r)); 0 for the chosen tokens."""
    selected = tokens.prepared[_CHOSEN]
    loss = torch.where(selected, 0.0, torch.maximum(*_surrogates(tokens)))
    return loss, standard_metrics(tokens, selected)


def penalised_by_covariance(tokens: Tokens) -> tuple[Tensor, Columns]:
    """−A·r, plus ppo_kl_coef·|log-ratio| for the chosen tokens."""
    distance = tokens.log_ratio.abs()
    loss = -tokens.advantages * tokens.log_ratio.exp()
    penalty = tokens.setting("policy_loss.ppo_kl_coef") * distance
    loss = loss + torch.where(tokens.prepared[_CHOSEN], penalty, 0.0)
    return loss, {**standard_metrics(tokens), "actor/ppo_kl": distance}


clip_cov = PolicyLoss("clip_cov", clipped_by_covariance, prepare_tokens=choose_to_clip)
kl_cov = PolicyLoss("kl_cov", penalised_by_covariance, prepare_tokens=choose_to_penalise)
