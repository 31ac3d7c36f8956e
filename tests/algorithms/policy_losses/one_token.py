"""One token by hand: its loss, gradient and metrics under a named loss."""

from __future__ import annotations

import math

import torch

from hone.algorithms.policy_losses import get_policy_loss_fn

CFG = {"clip_ratio": 0.2, "clip_ratio_c": 3.0, "tau_pos": 1.0, "tau_neg": 1.05}


def one(name, ratio, advantage, old=0.5, cfg=CFG, **kw):
    """Loss, gradient and metrics of a single token whose probability went from old to old·ratio."""
    new = torch.tensor([[math.log(old * ratio)]], dtype=torch.float64, requires_grad=True)
    old_log_prob = torch.tensor([[math.log(old)]], dtype=torch.float64)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob, new, advantages, torch.ones(1, 1), config=cfg, **kw
    )
    loss.backward()
    return (
        loss.item(),
        new.grad.item(),
        {k.removeprefix("actor/"): v.item() for k, v in metrics.items()},
    )
