"""The value loss of the critic."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.policy_losses.policy_loss import agg_loss
from hone.ops.rows import masked_mean, zero_outside_mask


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the critic's loss ½·max((v−R)², (clip(v, V±c)−R)²), aggregated, and the clip fraction.

    v is `vpreds`, V `values` (before the update), R `returns`, and c `cliprange_value`.
    """
    vpreds, returns, values = (
        zero_outside_mask(x, response_mask) for x in (vpreds, returns, values)
    )
    clipped_vpreds = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    error = (vpreds - returns) ** 2
    clipped_error = (clipped_vpreds - returns) ** 2
    loss = agg_loss(
        0.5 * torch.maximum(error, clipped_error),
        response_mask,
        loss_agg_mode,
        dp_size,
        batch_num_tokens,
        global_batch_size,
        loss_scale_factor,
    )
    clipfrac = masked_mean((clipped_error > error).to(error.dtype), response_mask)
    return loss, clipfrac.detach()
