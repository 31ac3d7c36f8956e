"""Losses that use the rollout's log-probs as the old log-probs.

Rejected tokens stay in the denominator, so the loss does not depend on the split into micro-batches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hone.algorithms.correction import catastrophic_tokens, importance_weights, rejection_mask
from hone.algorithms.policy_losses.policy_loss import NamedTensors, PolicyLoss, Tokens, ppo_clip
from hone.algorithms.policy_losses.ratio import policy_gradient_loss
from hone.config.algorithm import RolloutCorrectionConfig
from hone.config.block import config_value, setting
from hone.types import Settings

_KEYWORD = "rollout_correction"


def bypass_loss(tokens: Tokens) -> tuple[Tensor, NamedTensors]:
    """Returns the loss, 0 for rejected tokens; `loss_type` ppo_clip is PPO, reinforce is −weight·A·log π."""
    option = partial(setting, _settings(tokens), defaults=RolloutCorrectionConfig)
    if option("rollout_is_batch_normalize"):
        raise ValueError(
            "rollout_is_batch_normalize needs a mean over the whole batch, which a loss in bypass_mode "
            "does not have; set it or bypass_mode to false"
        )
    log_ratio = tokens.log_ratio.detach()
    keep_mask, _ = rejection_mask(
        log_ratio, tokens.mask, option("rollout_rs"), option("rollout_rs_threshold")
    )
    if (veto_threshold := option("rollout_token_veto_threshold")) is not None:
        is_catastrophic = catastrophic_tokens(log_ratio, tokens.mask, veto_threshold)
        keep_mask = keep_mask & ~is_catastrophic.any(-1, keepdim=True)
    loss_type, level = option("loss_type"), option("rollout_is")
    weights = None
    if level is not None:
        weights = importance_weights(log_ratio, tokens.mask, level, option("rollout_is_threshold"))
    if loss_type == "reinforce":
        loss, metrics = policy_gradient_loss(tokens)
        loss = loss if weights is None else loss * weights
    elif loss_type == "ppo_clip":  # the ratio is already the importance weight
        loss, metrics = ppo_clip(replace(tokens, weights=None))
    else:
        raise ValueError(
            f"algorithm.rollout_correction.loss_type={loss_type!r} is unknown; use ppo_clip or reinforce"
        )
    if weights is not None:
        metrics["rollout_corr/rollout_is_mean"] = weights
    metrics["rollout_corr/rollout_rs_masked_fraction"] = ~keep_mask
    return torch.where(keep_mask, loss, 0.0), metrics


def _settings(tokens: Tokens) -> Settings | None:
    """Returns `algorithm.rollout_correction`, from the keyword argument or from `config.policy_loss`, where
    verl's trainer puts it; raises if both are set and differ."""
    from_keyword = tokens.extras.get(_KEYWORD)
    from_config = config_value(tokens.config, f"policy_loss.{_KEYWORD}")
    if from_keyword is not None and from_config is not None and from_keyword != from_config:
        raise ValueError(
            "bypass_mode has two different rollout_correction settings, the keyword argument and "
            "config.policy_loss.rollout_correction; set one of them"
        )
    return from_config if from_keyword is None else from_keyword


bypass_mode = PolicyLoss(
    "bypass_mode", bypass_loss, applies_weights=True, extra_keywords=(_KEYWORD,)
)
