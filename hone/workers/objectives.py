"""What each role minimises: the policy's, the critic's and the supervised objective.

An objective only combines named losses; how a mini-batch is cut is the engine's business.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hone.algorithms.advantages.estimator import needs_of
from hone.algorithms.aggregation import agg_loss
from hone.algorithms.correction_metrics import gap_metrics
from hone.algorithms.kl import kl_penalty
from hone.algorithms.policy_losses import get_policy_loss_fn
from hone.algorithms.value_loss import compute_value_loss
from hone.columns import require
from hone.config.actor import ActorConfig
from hone.config.algorithm import RolloutCorrectionConfig
from hone.config.critic import CriticConfig
from hone.engine.contract import Objective, Options, Terms, TrainEngine
from hone.ops.masked import masked_mean
from hone.protocol import PADDED_ROW, DataProto, real_rows
from hone.types import Function, Row

_PREPARED = "prepared/"


def counted_tokens(batch: DataProto, column: str) -> Tensor:  # [B, T]
    """A mask of the batch; rows that only even out the ranks teach nothing."""
    mask: Tensor = require(batch, column)
    if batch.has_column(PADDED_ROW):
        mask = mask * real_rows(batch).to(mask.device)[:, None]
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
        bypass = correction is not None and correction.bypass_mode
        self._loss = get_policy_loss_fn("bypass_mode" if bypass else config.policy_loss.loss_mode)
        self._correction = correction
        self._needs: tuple[str, ...] = needs_of(self._loss)
        # The entropy is always measured: a collapse must be seen, and its sum costs little.
        self.options: Options = {"temperature": temperature, "with_entropy": True}
        self._prepare: Function | None = getattr(self._loss, "prepare", None)
        self.needs_batch_statistics = bool(getattr(self._loss, "needs_batch_statistics", False))

    @property
    def reads(self) -> tuple[str, ...]:
        """`old_log_probs` where a pass before the update computed them, `loss_mask` where correction or
        a filter narrowed it."""
        policy = ("advantages", "old_log_probs", "rollout_log_probs", "rollout_is_weights")
        reference = ("ref_log_prob",) if self._config.use_kl_loss else ()
        return ("response_mask", "loss_mask", *policy, *reference, *self._needs)

    def mask(self, batch: DataProto) -> Tensor:
        narrowed = batch.has_column("loss_mask")
        return counted_tokens(batch, "loss_mask" if narrowed else "response_mask")

    def prepare(self, outputs: Mapping[str, Tensor], batch: DataProto) -> dict[str, Tensor]:
        columns, log_prob = batch.batch, outputs["log_probs"]
        assert self._prepare is not None, "needs_batch_statistics says that there is one"
        prepared = self._prepare(
            columns["old_log_probs"] if batch.has_column("old_log_probs") else log_prob,
            log_prob,
            require(batch, "advantages"),
            self.mask(batch),
            self._config,
        )
        return {_PREPARED + name: values for name, values in prepared.items()}

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> Terms:
        config, columns, mask = self._config, batch.batch, self.mask(batch)
        log_prob = outputs["log_probs"]
        names = set(columns.keys())
        # Where no pass before the update computed them, the update's own forward gives them.
        old = columns["old_log_probs"] if "old_log_probs" in names else log_prob.detach()
        extra: Row = {name: require(batch, name) for name in self._needs}
        if self._correction is not None and self._correction.bypass_mode:
            extra["rollout_correction"] = self._correction
        if self.needs_batch_statistics:
            extra["prepared"] = {
                n.removeprefix(_PREPARED): columns[n] for n in names if n.startswith(_PREPARED)
            }
        policy_loss, means = self._loss(
            old,
            log_prob,
            require(batch, "advantages"),
            mask,
            config.loss_agg_mode,
            config,
            columns["rollout_is_weights"] if "rollout_is_weights" in names else None,
            **extra,
        )
        means = dict(means)
        loss = policy_loss
        shares = {"actor/pg_loss": policy_loss.detach()}
        means["actor/entropy"] = masked_mean(outputs["entropy"].detach(), mask)
        if config.entropy_coeff != 0:
            entropy = self._aggregate(outputs["entropy"], mask)
            shares["actor/entropy_loss"] = entropy.detach()
            loss = loss - config.entropy_coeff * entropy
        if config.use_kl_loss:
            kl = self._aggregate(
                kl_penalty(log_prob, require(batch, "ref_log_prob"), config.kl_loss_type), mask
            )
            shares["actor/kl_loss"] = kl.detach()
            loss = loss + config.kl_loss_coef * kl
        maxima: dict[str, Tensor] = {}
        if "old_log_probs" not in names and "rollout_log_probs" in names:
            gaps = gap_metrics(log_prob.detach(), columns["rollout_log_probs"], mask)
            for named, measured in zip((means, maxima), gaps, strict=True):
                named |= {f"rollout_corr/{name}": value for name, value in measured.items()}
        return Terms(loss, shares, means, maxima)

    def _aggregate(self, values: Tensor, mask: Tensor) -> Tensor:
        return agg_loss(
            values,
            mask,
            self._config.loss_agg_mode,
            loss_scale_factor=self._config.loss_scale_factor,
        )


class WrittenTokens:
    """An objective over every token that the policy wrote, without statistics of the mini-batch."""

    needs_batch_statistics = False

    def mask(self, batch: DataProto) -> Tensor:
        return counted_tokens(batch, "response_mask")

    def prepare(self, outputs: Mapping[str, Tensor], batch: DataProto) -> dict[str, Tensor]:
        return {}


class ValueObjective(WrittenTokens):
    """The critic's clipped squared error; what the policy's loss rejects was still returned."""

    reads = ("response_mask", "returns", "values")

    def __init__(self, config: CriticConfig) -> None:
        self._config = config
        self.options: Options = {}

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> Terms:
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
        predicted = masked_mean(outputs["values"].detach(), mask)
        means = {"critic/vf_clipfrac": clipfrac, "critic/vpred_mean": predicted}
        return Terms(loss, {"critic/vf_loss": loss.detach()}, means)


class SupervisedObjective(WrittenTokens):
    """Mean negative log-likelihood of the learnt tokens."""

    reads = ("response_mask",)

    def __init__(self) -> None:
        self.options: Options = {"temperature": 1.0, "with_entropy": False}

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> Terms:
        loss = agg_loss(-outputs["log_probs"], self.mask(batch), "token-mean")
        return Terms(loss, {"train/loss": loss.detach()})


def minibatches(
    numbers: Tensor, total: int, rows_per_update: int, shuffle_seed: int | None
) -> list[Tensor]:
    """Where the rows of each mini-batch lie here; drawn over all rows of the step, on any rank.

    `numbers` [B] are these rows' numbers among `total`. A rank may hold no row of some mini-batch.
    """
    order = torch.arange(total)
    if shuffle_seed is not None:
        order = torch.randperm(total, generator=torch.Generator().manual_seed(shuffle_seed))
    place = torch.empty_like(order)
    place[order] = torch.arange(total)
    mine = place[numbers]
    rows = mine.argsort(stable=True)
    return [rows[mine[rows] // rows_per_update == k] for k in range(-(-total // rows_per_update))]


def update_in_minibatches(
    engine: TrainEngine,
    batch: DataProto,
    objective: Objective,
    *,
    step_rows: int | None = None,
    rows_per_update: int,
    epochs: int,
    shuffle_seed: int | None,
) -> dict[str, float]:
    """All updates of one step; metrics are means over the updates, counts their largest.

    With `step_rows` the column `step_row` numbers these rows among those of all ranks.
    """
    seen: dict[str, list[float]] = {}
    if step_rows is not None:
        numbers, total = require(batch, "step_row"), step_rows
    else:  # a loop that shares rows out itself: each rank takes its part of every mini-batch
        numbers, total = torch.arange(len(batch)), len(batch)
        rows_per_update //= engine.mesh.data_parallel_size
    for epoch in range(epochs):
        seed = None if shuffle_seed is None else shuffle_seed + epoch
        for rows in minibatches(numbers, total, rows_per_update, seed):
            metrics = engine.train_minibatch(batch.select_idxs(rows), objective)
            for name, value in metrics.items():
                seen.setdefault(name, []).append(value)
    largest = {"skipped_updates"}
    return {
        name: max(values) if name in largest else sum(values) / len(values)
        for name, values in seen.items()
    }
