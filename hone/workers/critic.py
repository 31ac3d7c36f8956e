"""The critic worker: values before each token, and their regression to the returns."""

from __future__ import annotations

from hone.config.engine import CheckpointConfig
from hone.controller import Dispatch, register
from hone.models.from_config import import_external
from hone.protocol import DataProto
from hone.workers.engine_specs import critic_spec
from hone.workers.objectives import ValueObjective
from hone.workers.train import TrainWorker


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

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"values": self.engine.infer(data)["values"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto, *, num_step_rows: int | None = None) -> DataProto:
        """Runs all updates of this step; `num_step_rows` is the number of rows on all ranks."""
        config = self.config.critic
        objective = ValueObjective(config)
        updates = []
        with self.engine.on_device(optimizer=True):
            for minibatch in self.minibatches(data, config, num_step_rows):
                updates.append(self.engine.train_minibatch(minibatch, objective))
        return DataProto(meta_info={"metrics": self.end_updates("critic", updates)})
