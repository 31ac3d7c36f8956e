"""The critic: values before each token, and their regression to the returns."""

from __future__ import annotations

from typing import Any

import torch

from hone.config.engine import CheckpointConfig
from hone.controller import Dispatch, register
from hone.engine.build import build_engine
from hone.engine.microbatch import MicroBatchRule
from hone.models.external import import_external
from hone.models.load import load_causal_lm
from hone.models.lora import wrap_lora
from hone.models.policy import ValueModel
from hone.protocol import DataProto
from hone.workers.device import pick_device, pick_dtype, prepare_process
from hone.workers.objectives import ValueObjective, update_in_minibatches
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
        lm: Any = load_causal_lm(
            config.model.path or whole.actor_rollout_ref.model.path,
            dtype=pick_dtype(config.model.fsdp_config.dtype, device),
            override_config=config.model.override_config,
            device=device,
        )
        if config.model.enable_gradient_checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        model = ValueModel(lm)
        if config.model.lora_rank > 0:
            with torch.random.fork_rng():  # new weights follow from the run's seed
                torch.manual_seed(whole.trainer.seed)
                model.lm = wrap_lora(
                    model.lm,
                    rank=config.model.lora_rank,
                    alpha=config.model.lora_alpha,
                    dropout=0.0,
                    target_modules=config.model.target_modules,
                    exclude_modules=None,
                    adapter_path=None,
                )
        self.engine = build_engine(
            model.to(device),
            optim=config.optim,
            grad_clip=config.grad_clip,
            fsdp=config.model.fsdp_config,
            train_rule=MicroBatchRule(
                config.sequences_per_micro_batch(self.world_size),
                config.ppo_max_token_len_per_gpu,
            ),
            infer_rule=MicroBatchRule(
                config.value_sequences_per_micro_batch(self.world_size),
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
        with self.engine.present(optimizer=True):
            metrics = update_in_minibatches(
                self.engine,
                data,
                ValueObjective(config),
                rows_per_update=config.sequences_per_update(),
                epochs=config.ppo_epochs,
                shuffle_seed=config.data_loader_seed if config.shuffle else None,
            )
        self.engine.advance_schedule()
        for name in ("grad_norm", "lr", "skipped_updates"):
            metrics[f"critic/{name}"] = metrics.pop(name)
        return measured(metrics)
