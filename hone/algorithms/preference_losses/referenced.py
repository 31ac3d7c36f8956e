"""Losses over pairs that compare the policy with a frozen reference (DPO and its variants).

The log-ratio of a response is log π(y|x) − log π_ref(y|x), and β times it is the implicit reward. All tensors
are [N], one number per pair.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.algorithms.preference_losses import LossAndMetrics
from hone.config.preference import PreferenceLossConfig


def sigmoid(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    margin: Tensor,
    config: PreferenceLossConfig,
) -> LossAndMetrics:
    """DPO (arXiv 2305.18290, eq. 7): −log σ(β·(chosen log-ratio − rejected log-ratio) − margin)."""
    chosen, rejected = chosen_logp - ref_chosen_logp, rejected_logp - ref_rejected_logp
    losses = F.softplus(margin - config.beta * (chosen - rejected))
    return losses, _rewards(chosen, rejected, config)


def sigmoid_norm(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    chosen_length: Tensor,
    rejected_length: Tensor,
    margin: Tensor,
    config: PreferenceLossConfig,
) -> LossAndMetrics:
    """Length-normalised DPO (arXiv 2411.15124): the log-ratios are means over the response tokens."""
    chosen = (chosen_logp - ref_chosen_logp) / chosen_length
    rejected = (rejected_logp - ref_rejected_logp) / rejected_length
    losses = F.softplus(margin - config.beta * (chosen - rejected))
    return losses, _rewards(chosen, rejected, config)


def ipo(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    chosen_length: Tensor,
    rejected_length: Tensor,
    config: PreferenceLossConfig,
) -> LossAndMetrics:
    """IPO (arXiv 2310.12036, eq. 17): (difference − 1 / 2β)², over log-ratios per token.

    The paper has sums over tokens; its results, as those of TRL, are with means.
    """
    chosen = (chosen_logp - ref_chosen_logp) / chosen_length
    rejected = (rejected_logp - ref_rejected_logp) / rejected_length
    losses = (chosen - rejected - 1 / (2 * config.beta)) ** 2
    return losses, _rewards(chosen, rejected, config)


def hinge(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    margin: Tensor,
    config: PreferenceLossConfig,
) -> LossAndMetrics:
    """The hinge of SLiC on DPO's rewards (arXiv 2309.06657): max(0, 1 + margin − β·difference)."""
    chosen, rejected = chosen_logp - ref_chosen_logp, rejected_logp - ref_rejected_logp
    losses = torch.relu(1 + margin - config.beta * (chosen - rejected))
    return losses, _rewards(chosen, rejected, config)


def robust(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    margin: Tensor,
    config: PreferenceLossConfig,
) -> LossAndMetrics:
    """Robust DPO (arXiv 2403.00409): unbiased if a share ε (`label_smoothing`) of the pairs is swapped.

    ((1 − ε)·loss − ε·loss of the swapped pair) / (1 − 2ε).
    """
    chosen, rejected = chosen_logp - ref_chosen_logp, rejected_logp - ref_rejected_logp
    logits = config.beta * (chosen - rejected) - margin
    swapped = config.label_smoothing
    losses = (1 - swapped) * F.softplus(-logits) - swapped * F.softplus(logits)
    return losses / (1 - 2 * swapped), _rewards(chosen, rejected, config)


def apo_zero(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    config: PreferenceLossConfig,
) -> LossAndMetrics:
    """APO-zero (arXiv 2408.06266, eq. 7): chosen up, rejected down; for better answers."""
    chosen, rejected = chosen_logp - ref_chosen_logp, rejected_logp - ref_rejected_logp
    losses = torch.sigmoid(-config.beta * chosen) + torch.sigmoid(config.beta * rejected)
    return losses, _rewards(chosen, rejected, config)


def apo_down(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    config: PreferenceLossConfig,
) -> LossAndMetrics:
    """APO-down (arXiv 2408.06266, eq. 8): both down; for answers worse than the policy's."""
    chosen, rejected = chosen_logp - ref_chosen_logp, rejected_logp - ref_rejected_logp
    losses = torch.sigmoid(config.beta * chosen)
    losses = losses + torch.sigmoid(-config.beta * (chosen - rejected))
    return losses, _rewards(chosen, rejected, config)


def _rewards(chosen: Tensor, rejected: Tensor, config: PreferenceLossConfig) -> dict[str, Tensor]:
    """Returns the implicit rewards of log-ratios."""
    return {"rewards/chosen": config.beta * chosen, "rewards/rejected": config.beta * rejected}
