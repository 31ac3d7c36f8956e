"""The critic: values before each token, and their regression to the returns."""

from __future__ import annotations

from pathlib import Path

from hone.config import PPOTrainerConfig
from hone.controller import Dispatch, Worker, register
from hone.engine.build import build_engine
from hone.engine.microbatch import MicroBatchRule
from hone.models.load import load_causal_lm
from hone.models.policy import ValueModel
from hone.protocol import DataProto
from hone.workers.device import pick_device, pick_dtype
from hone.workers.objectives import ValueObjective, update_in_minibatches


class CriticWorker(Worker):
    def __init__(self, config: PPOTrainerConfig) -> None:
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        whole, config = self.config, self.config.critic
        device = pick_device(whole.trainer.device, self.local_rank)
        lm = load_causal_lm(
            config.model.path or whole.actor_rollout_ref.model.path,
            dtype=pick_dtype(config.model.fsdp_config.dtype, device),
            trust_remote_code=config.model.trust_remote_code,
            override_config=config.model.override_config,
        )
        by_tokens = config.use_dynamic_bsz
        self.engine = build_engine(
            ValueModel(lm).to(device),
            optim=config.optim,
            grad_clip=config.grad_clip,
            fsdp=config.model.fsdp_config,
            train_rule=MicroBatchRule(
                None if by_tokens else config.ppo_micro_batch_size_per_gpu,
                config.ppo_max_token_len_per_gpu,
            ),
            infer_rule=MicroBatchRule(
                None if by_tokens else config.forward_micro_batch_size_per_gpu,
                config.forward_max_token_len_per_gpu,
            ),
            response_width=whole.actor_rollout_ref.rollout.response_length,
            world_size=self.world_size,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"values": self.engine.infer(data)["values"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        config = self.config.critic
        metrics = update_in_minibatches(
            self.engine,
            data,
            ValueObjective(config),
            rows_per_update=config.sequences_per_update() // self.world_size,
            epochs=config.ppo_epochs,
            shuffle_seed=config.data_loader_seed if config.shuffle else None,
        )
        assert self.engine.optimizer is not None
        self.engine.optimizer.advance_schedule()
        for name in ("grad_norm", "lr", "skipped_updates"):
            metrics[f"critic/{name}"] = metrics.pop(name)
        return DataProto(batch=None, meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        self.engine.save(Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        self.engine.load(Path(folder))
