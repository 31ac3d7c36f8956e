"""The entropy bonus, aggregated like the policy loss."""

from __future__ import annotations

from torch import Tensor

from hone.algorithms.aggregation import agg_loss


def compute_entropy_loss(
    entropys: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> Tensor:
    """This micro-batch's share of the mean entropy; the caller subtracts entropy_coeff times it."""
    return agg_loss(entropys, response_mask, loss_agg_mode, loss_scale_factor=loss_scale_factor)
