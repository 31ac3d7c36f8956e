"""The critic: values before each token, and their regression to the returns."""

from __future__ import annotations

from hone.config.engine import CheckpointConfig
from hone.controller import Dispatch, register
from hone.engine.strategies import build_strategy
from hone.models.external import import_external
from hone.protocol import DataProto
from hone.workers.device import pick_device, prepare_process
from hone.workers.engine_specs import critic_spec
from hone.workers.objectives import ValueObjective
from hone.workers.train import TrainWorker, measured


class CriticWorker(TrainWorker):
    """The value model under training."""

    @property
    def checkpoint(self) -> CheckpointConfig:
        return self.config.critic.checkpoint

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        whole, config = self.config, self.config.critic
        device = pick_device(whole.trainer.device, self.local_rank)
        sharding = [config.model.fsdp_config]
        prepare_process(device, self.world_size, whole.actor_rollout_ref.nccl_timeout, sharding)
        import_external(config.model.external_lib)
        self.hold(build_strategy(config.strategy, critic_spec(whole, self, device)))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"values": self.engine.infer(data)["values"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto, *, step_rows: int | None = None) -> DataProto:
        """Every update of this step; `step_rows` is how many rows all ranks have together."""
        config = self.config.critic
        return measured(
            self.all_updates(data, ValueObjective(config), config, step_rows, role="critic")
        )
