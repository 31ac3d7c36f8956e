"""The policy: the workers that train it and compute reference log-probs, its objective and its updates.

`Roofline` measures how much of the GPU updates and generation use.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.kl import kl_penalty
from hone.algorithms.policy_losses import TABLE
from hone.algorithms.policy_losses.policy_loss import (
    PolicyLoss,
    agg_loss,
    call_custom_loss,
    log_prob_gap_metrics,
)
from hone.columns import require
from hone.config.actor import ActorConfig, CriticConfig
from hone.config.algorithm import RolloutCorrectionConfig
from hone.config.engine import CheckpointConfig
from hone.controller import Dispatch, register
from hone.engine.contract import ModelFacts, ObjectiveOutput, Options, TrainEngine
from hone.models.from_config import build_tokenizer, import_external
from hone.ops.rows import masked_mean, shared_prompt_lengths
from hone.plugins import needed_columns
from hone.protocol import PADDED_ROW, DataProto
from hone.protocol.padding import zero_padded_rows
from hone.types import Fields
from hone.workers.engine_specs import actor_spec, reference_spec
from hone.workers.train_worker import TrainWorker

_GIB = 2**30
_PREPARED_PREFIX = "prepared/"
"""The prefix of the columns that `PolicyObjective.prepare` computes once per mini-batch."""


class ActorWorker(TrainWorker):
    """The policy under training."""

    @property
    def checkpoint(self) -> CheckpointConfig:
        return self.config.actor_rollout_ref.actor.checkpoint

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        config = self.config.actor_rollout_ref
        self.tokenizer = build_tokenizer(config.model)
        fsdp_configs = (config.actor.fsdp_config, config.ref.fsdp_config)
        self.build_engine(config.actor.strategy, actor_spec, *fsdp_configs)
        self._minibatches = minibatches_of_role(config.actor, self.engine)
        self._objective = self._policy_objective(None)
        self._roofline = Roofline.for_device(self.engine.model_facts, self.engine.device)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(
        self,
        data: DataProto,
        *,
        with_sum_pi_squared: bool = False,
        temperature: float | None = None,
    ) -> DataProto:
        """Computes the log-prob and entropy of each token.

        `with_sum_pi_squared` adds the sum of the squared probabilities of the vocabulary. A `temperature` of
        None stands for the temperature of the rollout.
        """
        options: Options = {"temperature": self.temperature(temperature), "with_entropy": True}
        options["with_sum_pi_squared"] = with_sum_pi_squared
        if self.config.actor_rollout_ref.actor.router_replay.mode == "R2":
            options["with_routing"] = True
        outputs = self.engine.infer(data, **options)
        outputs["old_log_probs"] = outputs.pop("log_probs")
        outputs["entropys"] = outputs.pop("entropy")
        return DataProto.from_dict(outputs)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(
        self, data: DataProto, *, temperature: float | None = None
    ) -> DataProto:
        """Computes the reference log-probs of a LoRA run with the actor, its adapters disabled."""
        temperature = self.temperature(temperature)
        outputs = self.engine.infer(data, adapters=False, temperature=temperature)
        return DataProto.from_dict({"ref_log_prob": outputs["log_probs"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(
        self, data: DataProto, *, total_rows: int | None = None, temperature: float | None = None
    ) -> DataProto:
        """Runs all updates of this step; `total_rows` is the number of rows on all ranks."""
        start_time = time.perf_counter()
        objective = self._objective if temperature is None else self._policy_objective(temperature)
        updates = []
        with self.engine.on_device(optimizer=True):
            for minibatch in self._minibatches(data, total_rows=total_rows):
                updates.append(self.engine.train_minibatch(minibatch, objective))
        metrics = end_updates(self.engine, "actor", updates)
        metrics |= self._device_metrics(data, time.perf_counter() - start_time)
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def version(self) -> int:
        """Returns the version of the weights, which is the number of updates so far."""
        return self.engine.updates

    def _policy_objective(self, temperature: float | None) -> PolicyObjective:
        """Returns the objective at this temperature; None stands for the temperature of the rollout."""
        return PolicyObjective(
            self.config.actor_rollout_ref.actor,
            temperature=self.temperature(temperature),
            correction=self.config.algorithm.rollout_correction,
        )

    def _device_metrics(self, data: DataProto, seconds: float) -> dict[str, float]:
        """Returns the MFU of the updates and the peak memory."""
        device = self.engine.device
        if device.type != "cuda":
            return {}
        metrics = {
            "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(device) / _GIB,
            "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(device) / _GIB,
        }
        if self._roofline is not None:
            mask = data.batch["attention_mask"]
            shared_lengths = shared_prompt_lengths(data.batch["prompts"], mask)
            mfu = self._roofline.mfu(mask.sum(1).tolist(), shared_lengths, seconds)
            epochs = self.config.actor_rollout_ref.actor.ppo_epochs
            metrics["perf/mfu"] = epochs * mfu / self.engine.mesh.ranks_per_slot
        return metrics

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        with self.engine.on_device():
            super().save_checkpoint(folder)
            if "hf_model" in self.checkpoint.save_contents:
                self.engine.export(Path(folder), self.tokenizer)


class ReferenceWorker(TrainWorker):
    """The frozen initial policy."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        ref = self.config.actor_rollout_ref.ref
        import_external(self.config.actor_rollout_ref.model.external_lib)
        self.build_engine(ref.strategy, reference_spec, ref.fsdp_config)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(
        self, data: DataProto, *, temperature: float | None = None
    ) -> DataProto:
        outputs = self.engine.infer(data, temperature=self.temperature(temperature))
        return DataProto.from_dict({"ref_log_prob": outputs["log_probs"]})


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

    def mask(self, batch: DataProto) -> Tensor:  # [B, T]
        """Returns the tokens that the loss counts: `loss_mask`, else `response_mask`, without padded rows."""
        mask = require(batch, "loss_mask" if batch.has_column("loss_mask") else "response_mask")
        return zero_padded_rows(mask, batch) if batch.has_column(PADDED_ROW) else mask

    def prepare(self, outputs: Mapping[str, Tensor], batch: DataProto) -> dict[str, Tensor]:
        """Computes the statistics of the whole mini-batch, for a loss with `needs_batch_statistics`."""
        log_prob = outputs["log_probs"]
        old_log_prob = log_prob
        if batch.has_column("old_log_probs"):
            old_log_prob = batch.column("old_log_probs")
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
            loss, means = self._loss.reduce(tokens, losses, metrics, config.policy_loss_agg_mode)
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
            gaps = log_prob_gap_metrics(log_prob.detach(), columns["rollout_log_probs"], mask)
            maxima["rollout_corr/log_prob_abs_diff_max"] = gaps.pop("log_prob_abs_diff_max")
            means |= {f"rollout_corr/{name}": value for name, value in gaps.items()}
        return ObjectiveOutput(loss, sums, means, maxima)

    def _aggregate(self, values: Tensor, mask: Tensor) -> Tensor:  # [B, T], [B, T] -> scalar
        scale = self._config.loss_scale_factor
        return agg_loss(values, mask, self._config.loss_agg_mode, loss_scale_factor=scale)


def minibatches_of_role(
    config: ActorConfig | CriticConfig, engine: TrainEngine
) -> partial[Iterator[DataProto]]:
    """Returns the function `minibatches` with the settings of a role."""
    return partial(
        minibatches,
        rows_per_update=config.sequences_per_update,
        epochs=config.ppo_epochs,
        shuffle_seed=config.data_loader_seed if config.shuffle else None,
        ranks=engine.mesh.data_parallel_size,
    )


def minibatches(
    batch: DataProto,
    *,
    rows_per_update: int,
    epochs: int,
    shuffle_seed: int | None,
    total_rows: int | None = None,
    ranks: int = 1,
) -> Iterator[DataProto]:
    """Yields this rank's rows of each mini-batch; a rank may have no rows of some mini-batches.

    `total_rows` is the number of rows on all ranks: mini-batches are drawn from all of these rows, by
    their indices in the column `global_row`. If `total_rows` is None, each of `ranks` ranks draws its part of
    every mini-batch from its own rows.
    """
    if total_rows is not None:
        global_rows = require(batch, "global_row")
    else:
        global_rows, total_rows = torch.arange(len(batch)), len(batch)
        rows_per_update //= ranks
    num_updates = math.ceil(total_rows / rows_per_update)
    for epoch in range(epochs):
        positions = torch.arange(total_rows)  # the position of each row in this epoch's order
        if shuffle_seed is not None:
            generator = torch.Generator().manual_seed(shuffle_seed + epoch)
            positions = torch.randperm(total_rows, generator=generator).argsort()
        local_positions = positions[global_rows]
        row_order = local_positions.argsort(stable=True)
        update_of_row = local_positions[row_order] // rows_per_update
        for update in range(num_updates):
            yield batch.select_idxs(row_order[update_of_row == update])


def end_updates(
    engine: TrainEngine, role: str, updates: list[dict[str, float]]
) -> dict[str, float]:
    """Advances the learning-rate schedule; returns the mean metrics of the updates.

    The metrics of the optimizer get the prefix `role/`.
    """
    engine.advance_schedule()
    metrics = mean_metrics(updates)
    for name in ("grad_norm", "lr", "skipped_updates"):
        metrics[f"{role}/{name}"] = metrics.pop(name)
    return metrics


def mean_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Averages metrics over the updates of a step.

    `skipped_updates` counts all skipped updates of the run so far, so its maximum is returned.
    """
    values_by_name: defaultdict[str, list[float]] = defaultdict(list)
    for metrics in updates:
        for name, value in metrics.items():
            values_by_name[name].append(value)
    means = {name: sum(values) / len(values) for name, values in values_by_name.items()}
    if "skipped_updates" in means:
        means["skipped_updates"] = max(values_by_name["skipped_updates"])
    return means


_CEILINGS_BY_DEVICE = {
    "H200": (790e12, 4.25e12),
    "H100": (790e12, 3.0e12),
    "A100": (280e12, 1.7e12),
    "L40S": (300e12, 0.75e12),
    "4090": (150e12, 0.9e12),
}
"""Dense bf16 FLOP/s and bytes/s that large kernels reach in practice, by part of the device name."""


@dataclass(frozen=True)
class Roofline:
    """The GPU utilization of updates (MFU) and of generation (MBU): achieved over attainable throughput.

    MFU counts operations (6 × parameters × tokens, plus attention). MBU counts bytes that decoding reads: the
    weights once per decode step and, for each token, the keys and values of the tokens before it.
    """

    flops_per_s: float
    bytes_per_s: float
    model_facts: ModelFacts

    @staticmethod
    def for_device(model_facts: ModelFacts, device: torch.device) -> Roofline | None:
        """Returns the roofline of a model on a device, or None for an unknown device."""
        if device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(device)
        for part_of_name, ceilings in _CEILINGS_BY_DEVICE.items():
            if part_of_name in name:
                return Roofline(*ceilings, model_facts)
        return None

    def mfu(self, lengths: Sequence[int], shared_lengths: Sequence[int], seconds: float) -> float:
        """Returns the model FLOPs utilization of forward and backward over rows of these lengths.

        `shared_lengths` has the number of tokens that each row shares with the previous row; shared tokens
        are computed and counted once.
        """
        rows = list(zip(lengths, shared_lengths, strict=True))
        attention_pairs = sum(n * n - shared * shared for n, shared in rows)
        tokens = sum(n - shared for n, shared in rows)
        model_facts = self.model_facts
        operations = 6 * model_facts.parameters * tokens
        operations += 6 * model_facts.attention_width * model_facts.layers * attention_pairs
        return operations / seconds / self.flops_per_s

    def mbu(
        self,
        prompt_lengths: Sequence[int],
        response_lengths: Sequence[int],
        max_num_seqs: int,
        seconds: float,
    ) -> float:
        """Returns the memory bandwidth utilization of generating responses of these lengths."""
        decode_steps = max(max(response_lengths), sum(response_lengths) / max_num_seqs)
        rows = zip(prompt_lengths, response_lengths, strict=True)
        kv_bytes = sum(n * (p + n / 2) for p, n in rows) * self.model_facts.kv_bytes_per_token
        weight_bytes = decode_steps * self.model_facts.parameter_bytes
        return (weight_bytes + kv_bytes) / seconds / self.bytes_per_s
