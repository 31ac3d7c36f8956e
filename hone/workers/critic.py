"""The critic's worker and its objective."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hone.algorithms.value_loss import compute_value_loss
from hone.columns import require
from hone.config.actor import CriticConfig
from hone.config.engine import CheckpointConfig
from hone.controller import Dispatch, register
from hone.engine.contract import ObjectiveOutput
from hone.models.from_config import import_external
from hone.ops.rows import masked_mean
from hone.protocol import DataProto
from hone.workers.actor import end_updates, minibatches_of_role
from hone.workers.engine_specs import critic_spec
from hone.workers.objectives import TokenObjective
from hone.workers.train_worker import TrainWorker


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


class CriticWorker(TrainWorker):
    """The value model under training."""

    @property
    def checkpoint(self) -> CheckpointConfig:
        return self.config.critic.checkpoint

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        config = self.config.critic
        import_external(config.model.external_lib)
        self.build_engine(config.strategy, critic_spec, config.model.fsdp_config)
        self._minibatches = minibatches_of_role(config, self.engine)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"values": self.engine.infer(data)["values"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto, *, total_rows: int | None = None) -> DataProto:
        """Runs all updates of this step; `total_rows` is the number of rows on all ranks."""
        objective = ValueObjective(self.config.critic)
        with self.engine.on_device(optimizer=True):
            batches = self._minibatches(data, total_rows=total_rows)
            updates = [self.engine.train_minibatch(batch, objective) for batch in batches]
        metrics = end_updates(self.engine, "critic", updates)
        return DataProto(meta_info={"metrics": metrics})
