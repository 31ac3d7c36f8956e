"""The entropy of a batch of logits, aggregated like the policy loss.

For code that holds logits, as verl's does. The engine computes entropies with the log-probs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.aggregation import agg_loss


def compute_entropy_loss(
    logits: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> Tensor:
    """This micro-batch's share of the mean entropy of softmax(logits), logits [B, T, V]."""
    if logits.dim() != 3 or logits.shape[:2] != response_mask.shape:
        raise ValueError(
            f"compute_entropy_loss takes logits [B, T, V] and a mask [B, T]; got "
            f"{list(logits.shape)} and {list(response_mask.shape)}. Aggregate entropies with agg_loss"
        )
    probabilities = torch.softmax(logits, dim=-1)
    finite = torch.where(probabilities > 0, logits, 0.0)  # a logit of -inf takes no part
    entropy = torch.logsumexp(logits, dim=-1) - (probabilities * finite).sum(dim=-1)
    return agg_loss(entropy, response_mask, loss_agg_mode, loss_scale_factor=loss_scale_factor)
