"""The objectives of policy, critic, supervised and reward-model training, and the mini-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.algorithms.advantages.estimator import needed_columns
from hone.algorithms.kl import kl_penalty
from hone.algorithms.policy_losses import TABLE
from hone.algorithms.policy_losses.policy_loss import PolicyLoss, agg_loss, call_custom_loss
from hone.algorithms.value_loss import compute_value_loss
from hone.columns import require
from hone.config.actor import ActorConfig, CriticConfig
from hone.config.algorithm import RolloutCorrectionConfig
from hone.engine.contract import ObjectiveOutput, Options
from hone.ops.rows import masked_mean, zero_outside_mask
from hone.protocol import PADDED_ROW, DataProto, real_row_mask
from hone.types import Fields

_PREPARED_PREFIX = "prepared/"
_NO_OPTIONS: Options = {}
_LOG_PROBS_ONLY: Options = {"temperature": 1.0, "with_entropy": False}


def mask_without_padding(batch: DataProto, column: str) -> Tensor:  # [B, T]
    """Returns a mask column, set to 0 in padded rows."""
    mask: Tensor = require(batch, column)
    if batch.has_column(PADDED_ROW):
        mask = mask * real_row_mask(batch).to(mask.device)[:, None]
    return mask


class PolicyObjective:
    """Policy loss − entropy_coeff · entropy + kl_loss_coef · KL to the reference."""

    def __init__(
        self,
        config: ActorConfig,
        *,
        temperature: float,
        correction: RolloutCorrectionConfig | None = None,
    ) -> None:
        self._config = config
        is_bypassed = correction is not None and correction.bypass_mode
        self._bypass_correction = correction if is_bypassed else None
        name = "bypass_mode" if is_bypassed else config.policy_loss.loss_mode
        self._loss: Any = TABLE.get(name)
        self._extra_columns = needed_columns(self._loss)
        # The entropy is always computed: the cost is low, and an entropy collapse must be visible.
        self.options: Options = {"temperature": temperature, "with_entropy": True}
        self.needs_batch_statistics = bool(getattr(self._loss, "needs_batch_statistics", False))

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that the loss reads; a batch may lack some of them."""
        policy = ("advantages", "old_log_probs", "rollout_log_probs", "rollout_is_weights")
        reference = ("ref_log_prob",) if self._config.use_kl_loss else ()
        return ("response_mask", "loss_mask", *policy, *reference, *self._extra_columns)

    def mask(self, batch: DataProto) -> Tensor:
        has_loss_mask = batch.has_column("loss_mask")
        return mask_without_padding(batch, "loss_mask" if has_loss_mask else "response_mask")

    def prepare(self, outputs: Mapping[str, Tensor], batch: DataProto) -> dict[str, Tensor]:
        log_prob = outputs["log_probs"]
        has_old = batch.has_column("old_log_probs")
        old_log_prob = batch.column("old_log_probs") if has_old else log_prob
        inputs = old_log_prob, log_prob, require(batch, "advantages"), self.mask(batch)
        prepared = self._loss.prepare(*inputs, self._config)
        return {_PREPARED_PREFIX + name: values for name, values in prepared.items()}

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> ObjectiveOutput:
        config, columns, mask = self._config, batch.batch, self.mask(batch)
        log_prob, names = outputs["log_probs"], set(columns.keys())
        # Without a log-prob pass before the update, the old log-probs are the current ones.
        old_log_prob = columns["old_log_probs"] if "old_log_probs" in names else log_prob.detach()
        is_weights = columns["rollout_is_weights"] if "rollout_is_weights" in names else None
        inputs = (old_log_prob, log_prob, require(batch, "advantages"), mask)
        arguments: Fields = {name: require(batch, name) for name in self._extra_columns}
        if self._bypass_correction is not None:
            arguments["rollout_correction"] = self._bypass_correction
        if self.needs_batch_statistics:
            prepared_names = [name for name in names if name.startswith(_PREPARED_PREFIX)]
            arguments["prepared"] = {
                name.removeprefix(_PREPARED_PREFIX): columns[name] for name in prepared_names
            }
        if isinstance(self._loss, PolicyLoss):
            tokens = self._loss.tokens(inputs, config, is_weights, **arguments)
            losses, metrics = self._loss.per_token(tokens)
            loss, means = self._loss.reduce(tokens, losses, metrics, config.loss_agg_mode)
        else:
            loss, means = call_custom_loss(self._loss, inputs, config, is_weights, arguments)
        sums = {"actor/pg_loss": loss.detach()}
        means = {**means, "actor/entropy": masked_mean(outputs["entropy"].detach(), mask)}
        if "routing_agreement" in outputs:
            agreement = outputs["routing_agreement"].detach()
            means["actor/routing_agreement"] = masked_mean(agreement, mask)
        if config.entropy_coeff != 0:
            entropy = self._aggregate(outputs["entropy"], mask)
            sums["actor/entropy_loss"] = entropy.detach()
            loss = loss - config.entropy_coeff * entropy
        if config.use_kl_loss:
            reference = require(batch, "ref_log_prob")
            kl = self._aggregate(kl_penalty(log_prob, reference, config.kl_loss_type), mask)
            sums["actor/kl_loss"] = kl.detach()
            loss = loss + config.kl_loss_coef * kl
        maxima: dict[str, Tensor] = {}
        if "old_log_probs" not in names and "rollout_log_probs" in names:
            gap = zero_outside_mask(log_prob.detach() - columns["rollout_log_probs"], mask)
            means["rollout_corr/kl"] = -masked_mean(gap, mask)
            means["rollout_corr/log_prob_abs_diff_mean"] = masked_mean(gap.abs(), mask)
            maxima["rollout_corr/log_prob_abs_diff_max"] = gap.abs().max()
        return ObjectiveOutput(loss, sums, means, maxima)

    def _aggregate(self, values: Tensor, mask: Tensor) -> Tensor:  # [B, T], [B, T] -> scalar
        scale = self._config.loss_scale_factor
        return agg_loss(values, mask, self._config.loss_agg_mode, loss_scale_factor=scale)


class TokenObjective:
    """Base of objectives over all policy tokens without statistics of the mini-batch."""

    needs_batch_statistics = False
    options = _NO_OPTIONS

    def mask(self, batch: DataProto) -> Tensor:
        return mask_without_padding(batch, "response_mask")

    def prepare(self, outputs: Mapping[str, Tensor], batch: DataProto) -> dict[str, Tensor]:
        return {}


class ValueObjective(TokenObjective):
    """The critic's clipped squared error over all policy tokens, even those that `loss_mask` excludes."""

    reads = ("response_mask", "returns", "values")

    def __init__(self, config: CriticConfig) -> None:
        self._config = config

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> ObjectiveOutput:
        config, mask = self._config, self.mask(batch)
        loss, clipfrac = compute_value_loss(
            outputs["values"],
            require(batch, "returns"),
            require(batch, "values"),
            mask,
            config.cliprange_value,
            config.loss_agg_mode,
            loss_scale_factor=config.loss_scale_factor,
        )
        value_mean = masked_mean(outputs["values"].detach(), mask)
        means = {"critic/vf_clipfrac": clipfrac, "critic/vpred_mean": value_mean}
        return ObjectiveOutput(loss, {"critic/vf_loss": loss.detach()}, means)


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
        is_correct = ((scores.detach() > 0) == (labels > 0.5)).float()
        return ObjectiveOutput(
            loss, {"train/loss": loss.detach()}, {"train/accuracy": masked_mean(is_correct, mask)}
        )


class PairObjective(TokenObjective):
    """Bradley–Terry loss −log σ(chosen − rejected − margin), mean over pairs.

    Rows alternate between the chosen and the rejected response, and each has one scored token.
    """

    reads = ("response_mask", "margin")

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> ObjectiveOutput:
        mask = self.mask(batch)
        if not mask.any():  # padding that only takes part in the collectives
            loss = gaps = outputs["scores"].sum() * 0.0
        else:
            gaps = score_gaps(outputs["scores"], mask)
            losses = F.softplus(require(batch, "margin")[::2] - gaps).repeat_interleave(2)
            loss = agg_loss(losses[:, None] * mask, mask, "token-mean")
        gaps = gaps.detach()
        means = {"train/accuracy": (gaps > 0).float().mean(), "train/score_gap": gaps.mean()}
        return ObjectiveOutput(loss, {"train/loss": loss.detach()}, means)


def score_gaps(scores: Tensor, mask: Tensor) -> Tensor:  # [B, T], [B, T] -> [B / 2]
    """Returns the score of the chosen response minus the score of the rejected one, for each pair."""
    chosen, rejected = (scores * mask).sum(1).view(-1, 2).unbind(1)
    return chosen - rejected


def minibatches(
    batch: DataProto,
    *,
    rows_per_update: int,
    epochs: int,
    shuffle_seed: int | None,
    num_step_rows: int | None = None,
    ranks: int = 1,
) -> Iterator[DataProto]:
    """Yields this rank's rows of each mini-batch; a rank may have no rows of some mini-batches.

    `num_step_rows` is the number of rows of the step on all ranks: mini-batches are drawn from all of these
    rows, by their numbers in the column `step_row`. If it is None, each of `ranks` ranks draws its part of
    every mini-batch from its own rows.
    """
    if num_step_rows is not None:
        row_numbers, total_rows = require(batch, "step_row"), num_step_rows
    else:
        row_numbers, total_rows = torch.arange(len(batch)), len(batch)
        rows_per_update //= ranks
    for epoch in range(epochs):
        positions = torch.arange(total_rows)  # the position of each row in this epoch's order
        if shuffle_seed is not None:
            generator = torch.Generator().manual_seed(shuffle_seed + epoch)
            positions = torch.randperm(total_rows, generator=generator).argsort()
        local_positions = positions[row_numbers]
        rows = local_positions.argsort(stable=True)
        for index in range(-(-total_rows // rows_per_update)):
            yield batch.select_idxs(rows[local_positions[rows] // rows_per_update == index])


def mean_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Averages metrics over the updates of a step; `skipped_updates` is a counter, so its maximum is used."""
    names = dict.fromkeys(name for metrics in updates for name in metrics)
    values = {name: [metrics[name] for metrics in updates if name in metrics] for name in names}
    return {
        name: max(numbers) if name == "skipped_updates" else sum(numbers) / len(numbers)
        for name, numbers in values.items()
    }
