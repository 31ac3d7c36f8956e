"""The objectives of training on preferences: over pairs of responses, and over labelled responses."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hone.algorithms.policy_losses.policy_loss import agg_loss
from hone.algorithms.preference_losses import LossFunction
from hone.columns import require
from hone.config.preference import PreferenceLossConfig
from hone.engine.contract import ObjectiveOutput, Options
from hone.ops.rows import last_true_index, masked_sum
from hone.protocol import DataProto
from hone.workers.objectives import TokenObjective

Values = tuple[Tensor, dict[str, Tensor]]
"""The losses and the metrics of each pair or response, [N] each."""


_LOG_PROBS_ONLY: Options = {"temperature": 1.0, "with_entropy": False}


class PreferenceObjective(TokenObjective):
    """The mean of a preference loss over pairs or responses.

    The loss of a response is counted at its last token, so that the mean over loss tokens is over responses.
    """

    options = _LOG_PROBS_ONLY
    reads: tuple[str, ...]
    sequences_per_loss: int
    """The number of consecutive rows that have one loss."""

    def __init__(self, loss: LossFunction, config: PreferenceLossConfig) -> None:
        self._loss, self._config = loss, config

    def mask(self, batch: DataProto) -> Tensor:  # [B, T]
        """Returns a mask with 1 at the last token of each response."""
        mask = super().mask(batch)
        positions = torch.arange(mask.shape[1], device=mask.device)
        return (positions == last_true_index(mask)[:, None]).to(mask.dtype)

    def values(self, outputs: Mapping[str, Tensor], batch: DataProto) -> Values:
        """Returns the losses and the metrics of the batch."""
        raise NotImplementedError

    def response_log_probs(self, outputs: Mapping[str, Tensor], batch: DataProto) -> Tensor:  # [B]
        """Returns the log-probability of each response."""
        return masked_sum(outputs["log_probs"], super().mask(batch), 1)

    def lengths(self, batch: DataProto) -> Tensor:  # [B]
        """Returns the number of tokens of each response."""
        return super().mask(batch).sum(1)

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> ObjectiveOutput:
        mask = self.mask(batch)
        if not mask.any():  # a dummy row, with which this rank takes part in the collectives
            loss = outputs["log_probs"].sum() * 0.0
            return ObjectiveOutput(loss, {"train/loss": loss.detach()})
        losses, metrics = self.values(outputs, batch)
        row_losses = losses.repeat_interleave(self.sequences_per_loss)
        loss = agg_loss(row_losses[:, None] * mask, mask, "token-mean")
        means = {f"train/{name}": value.detach().mean() for name, value in metrics.items()}
        return ObjectiveOutput(loss, {"train/loss": loss.detach()}, means)


class PairedObjective(PreferenceObjective):
    """A preference loss over pairs; rows alternate between the chosen and the rejected response."""

    reads = ("response_mask", "ref_response_log_prob", "margin")
    sequences_per_loss = 2

    def values(self, outputs: Mapping[str, Tensor], batch: DataProto) -> Values:
        chosen, rejected = self.response_log_probs(outputs, batch).view(-1, 2).unbind(1)
        chosen_length, rejected_length = self.lengths(batch).view(-1, 2).unbind(1)
        values = {
            "chosen_logp": chosen,
            "rejected_logp": rejected,
            "chosen_length": chosen_length,
            "rejected_length": rejected_length,
            "margin": require(batch, "margin")[::2],  # both rows of a pair have its margin
        }
        if self._loss.needs_reference:
            reference = require(batch, "ref_response_log_prob").view(-1, 2)
            values["ref_chosen_logp"], values["ref_rejected_logp"] = reference.unbind(1)
        losses, loss_metrics = self._loss(**values, config=self._config)
        metrics = dict(loss_metrics) | {"logps/chosen": chosen, "logps/rejected": rejected}
        if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
            margins = metrics["rewards/chosen"] - metrics["rewards/rejected"]
            metrics["rewards/margins"] = margins
            metrics["rewards/accuracies"] = (margins > 0).to(margins.dtype)
        return losses, metrics


class LabelledObjective(PreferenceObjective):
    """A preference loss over single responses with a label.

    The columns `kl` and `label_scale` are statistics of the mini-batch: the estimate of the KL, and the
    number of responses divided by that of the responses with this row's label.
    """

    reads = ("response_mask", "ref_response_log_prob", "label", "label_scale", "kl")
    sequences_per_loss = 1

    def values(self, outputs: Mapping[str, Tensor], batch: DataProto) -> Values:
        log_probs, label = self.response_log_probs(outputs, batch), require(batch, "label")
        values = {
            "logp": log_probs,
            "length": self.lengths(batch),
            "label": label,
            "kl": require(batch, "kl"),
        }
        if self._loss.needs_reference:
            values["ref_logp"] = require(batch, "ref_response_log_prob")
        losses, loss_metrics = self._loss(**values, config=self._config)
        metrics = dict(loss_metrics)
        # A mean over all responses of a scaled value is the mean over the responses with the label.
        scale = require(batch, "label_scale")
        by_label = {"chosen": label * scale, "rejected": (1 - label) * scale}
        per_response = {"rewards": metrics.pop("rewards", None), "logps": log_probs}
        for name, value in per_response.items():
            if value is not None:
                metrics |= {f"{name}/{key}": value * weight for key, weight in by_label.items()}
        if "rewards/chosen" in metrics:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        if self._loss.needs_kl:
            metrics["kl"] = values["kl"]
        return losses, metrics
