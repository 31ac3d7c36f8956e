"""New weights, by their Hugging Face names, into the policy an engine decodes with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch
from torch import Tensor

from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutError


@torch.no_grad()
def load_weights(policy: PolicyModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy each tensor over its parameter; a name or shape the model does not have is refused."""
    own: dict[str, Tensor] = {}
    for name, tensor in weights:
        own = own or dict(policy.lm.named_parameters(remove_duplicate=False))
        if name not in own:
            near = difflib.get_close_matches(name, own, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise RolloutError(f"update_weights got {name!r}, which the model does not have.{hint}")
        if own[name].shape != tensor.shape:
            raise RolloutError(
                f"update_weights got {name!r} with shape {tuple(tensor.shape)}; the model's has "
                f"{tuple(own[name].shape)}"
            )
        own[name].copy_(tensor)
