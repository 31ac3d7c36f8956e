"""Losses that use the rollout's log-probs as the old log-probs.

Old log-probs are not recomputed; the loss corrects the difference between the rollout engine and the
trained policy with the current log-probs. Rejected tokens stay in the denominator, so the loss does not
depend on the split into micro-batches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hone.algorithms.correction import importance_weights
from hone.algorithms.policy_losses.policy_loss import Columns, PolicyLoss, Tokens
from hone.algorithms.policy_losses.token_ratio import policy_gradient
from hone.algorithms.policy_losses.vanilla import ppo_clip
from hone.algorithms.rejection import catastrophic, rejection_mask
from hone.algorithms.settings import config_value, setting
from hone.config.algorithm import RolloutCorrectionConfig
from hone.types import Settings

_KEYWORD = "rollout_correction"


def bypass_loss(tokens: Tokens) -> tuple[Tensor, Columns]:
    """`ppo_clip`: PPO on the tokens that are not rejected; `reinforce`: −A·log π·w on them.

    Settings come from the keyword argument `rollout_correction` (algorithm.rollout_correction),
    or from `config.policy_loss.rollout_correction`, where verl's trainer puts them.
    """
    option = partial(setting, _settings(tokens), defaults=RolloutCorrectionConfig)
    if option("rollout_is_batch_normalize"):
        raise ValueError(
            "rollout_is_batch_normalize needs a mean over the whole batch, which a loss in bypass_mode "
            "does not have; set it or bypass_mode to false"
        )
    log_ratio = tokens.log_ratio.detach()
    keep, _ = rejection_mask(
        log_ratio, tokens.mask, option("rollout_rs"), option("rollout_rs_threshold")
    )
    if (veto := option("rollout_token_veto_threshold")) is not None:
        keep = keep & ~catastrophic(log_ratio, tokens.mask, veto).any(-1, keepdim=True)
    kind, level = option("loss_type"), option("rollout_is")
    weights = None
    if level is not None:
        weights = importance_weights(log_ratio, tokens.mask, level, option("rollout_is_threshold"))
    if kind == "reinforce":
        loss, metrics = policy_gradient(tokens)
        loss = loss if weights is None else loss * weights
    elif kind == "ppo_clip":  # the ratio is already the importance weight
        loss, metrics = ppo_clip(replace(tokens, weights=None))
    else:
        raise ValueError(
            f"algorithm.rollout_correction.loss_type={kind!r} is unknown; use ppo_clip or reinforce"
        )
    if weights is not None:
        metrics["rollout_corr/rollout_is_mean"] = weights
    metrics["rollout_corr/rollout_rs_masked_fraction"] = ~keep
    return torch.where(keep, loss, 0.0), metrics


def _settings(tokens: Tokens) -> Settings | None:
    """Returns the settings from either place; setting both is an error, as one would be ignored."""
    by_keyword = tokens.extras.get(_KEYWORD)
    in_config = config_value(tokens.config, f"policy_loss.{_KEYWORD}")
    if by_keyword is not None and in_config is not None and by_keyword != in_config:
        raise ValueError(
            "bypass_mode has two different rollout_correction settings, the keyword argument and "
            "config.policy_loss.rollout_correction; set one of them"
        )
    return in_config if by_keyword is None else by_keyword


bypass_mode = PolicyLoss(
    "bypass_mode", bypass_loss, applies_weights=True, extra_keywords=(_KEYWORD,)
)
