"""The objectives of supervised, process-reward-model and reward-model training."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from hone.algorithms.policy_losses.policy_loss import agg_loss
from hone.columns import require
from hone.engine.contract import ObjectiveOutput, Options
from hone.ops.rows import masked_mean
from hone.protocol import PADDED_ROW, DataProto
from hone.protocol.padding import zero_padded_rows

_NO_OPTIONS: Options = {}
_LOG_PROBS_ONLY: Options = {"temperature": 1.0, "with_entropy": False}


class TokenObjective:
    """Base of objectives over all policy tokens without statistics of the mini-batch."""

    needs_batch_statistics = False
    options = _NO_OPTIONS

    def mask(self, batch: DataProto) -> Tensor:  # [B, T]
        """Returns `response_mask`, with 0 in padded rows."""
        mask = require(batch, "response_mask")
        return zero_padded_rows(mask, batch) if batch.has_column(PADDED_ROW) else mask

    def prepare(self, outputs: Mapping[str, Tensor], batch: DataProto) -> dict[str, Tensor]:
        """Returns no statistics of the mini-batch."""
        return {}


class SupervisedObjective(TokenObjective):
    """Mean negative log-likelihood of the target tokens."""

    reads = ("response_mask",)
    options = _LOG_PROBS_ONLY

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> ObjectiveOutput:
        loss = agg_loss(-outputs["log_probs"], self.mask(batch), "token-mean")
        return ObjectiveOutput(loss, {"train/loss": loss.detach()})


class StepObjective(TokenObjective):
    """Mean cross-entropy of a process reward model over labelled steps; labels may be probabilities."""

    reads = ("response_mask", "labels")

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> ObjectiveOutput:
        scores, labels, mask = outputs["scores"], require(batch, "labels"), self.mask(batch)
        # The score is the difference of two logits, so this is the cross-entropy of their softmax.
        losses = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
        loss = agg_loss(losses, mask, "token-mean")
        is_correct = (scores.detach() > 0) == (labels > 0.5)
        accuracy = masked_mean(is_correct.float(), mask)
        return ObjectiveOutput(loss, {"train/loss": loss.detach()}, {"train/accuracy": accuracy})


class PairObjective(TokenObjective):
    """Bradley–Terry loss −log σ(chosen − rejected − margin), mean over pairs.

    Rows alternate between the chosen and the rejected response, and each has one scored token.
    """

    reads = ("response_mask", "margin")

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> ObjectiveOutput:
        mask = self.mask(batch)
        if not mask.any():  # a dummy row, with which this rank takes part in the collectives
            loss = gaps = outputs["scores"].sum() * 0.0
        else:
            gaps = score_gaps(outputs["scores"], mask)
            margins = require(batch, "margin")[::2]  # both rows of a pair have its margin
            losses = F.softplus(margins - gaps).repeat_interleave(2)  # the loss of each row's pair
            loss = agg_loss(losses[:, None] * mask, mask, "token-mean")
        gaps = gaps.detach()
        means = {"train/accuracy": (gaps > 0).float().mean(), "train/score_gap": gaps.mean()}
        return ObjectiveOutput(loss, {"train/loss": loss.detach()}, means)


def score_gaps(scores: Tensor, mask: Tensor) -> Tensor:  # [B, T], [B, T] -> [B / 2]
    """Returns the score of the chosen response minus the score of the rejected one, for each pair."""
    chosen, rejected = (scores * mask).sum(1).view(-1, 2).unbind(1)
    return chosen - rejected
