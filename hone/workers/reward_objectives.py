"""The objectives that train reward models: on labelled steps, and on pairs of responses."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from hone.algorithms.aggregation import agg_loss
from hone.columns import require
from hone.engine.contract import Terms
from hone.ops.masked import masked_mean
from hone.protocol import DataProto
from hone.workers.objectives import TokenObjective


class StepObjective(TokenObjective):
    """Mean cross-entropy of a process reward model over labelled steps; labels may be probabilities."""

    reads = ("response_mask", "labels")

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> Terms:
        scores, labels, mask = outputs["scores"], require(batch, "labels"), self.mask(batch)
        # The score is the difference of two logits, so this is the cross-entropy of their softmax.
        losses = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
        loss = agg_loss(losses, mask, "token-mean")
        is_correct = ((scores.detach() > 0) == (labels > 0.5)).float()
        return Terms(
            loss, {"train/loss": loss.detach()}, {"train/accuracy": masked_mean(is_correct, mask)}
        )


class PairObjective(TokenObjective):
    """Bradley–Terry loss −log σ(chosen − rejected − margin), mean over pairs.

    Rows alternate between the chosen and the rejected response, and each has one scored token.
    """

    reads = ("response_mask", "margin")

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> Terms:
        mask = self.mask(batch)
        if not mask.any():  # padding that only takes part in the collectives
            loss = gaps = outputs["scores"].sum() * 0.0
        else:
            gaps = score_gaps(outputs["scores"], mask)
            losses = F.softplus(require(batch, "margin")[::2] - gaps).repeat_interleave(2)
            loss = agg_loss(losses[:, None] * mask, mask, "token-mean")
        gaps = gaps.detach()
        means = {"train/accuracy": (gaps > 0).float().mean(), "train/score_gap": gaps.mean()}
        return Terms(loss, {"train/loss": loss.detach()}, means)


def score_gaps(scores: Tensor, mask: Tensor) -> Tensor:  # [B, T], [B, T] -> [B / 2]
    """Returns the score of the chosen response minus the score of the rejected one, for each pair."""
    chosen, rejected = (scores * mask).sum(1).view(-1, 2).unbind(1)
    return chosen - rejected
