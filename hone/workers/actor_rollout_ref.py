"""The actor, its rollout engine and its reference in one process, over one set of parameters.

The native engine decodes with the training module itself, so publishing new weights costs nothing.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hone.agents.collate import join_ranks
from hone.agents.runner import LoopRunner
from hone.config import PPOTrainerConfig
from hone.controller import Dispatch, Worker, register
from hone.engine.build import build_engine
from hone.engine.contract import TrainEngine
from hone.engine.microbatch import MicroBatchRule
from hone.models.from_config import build_lora, build_tokenizer
from hone.models.load import eos_ids, load_causal_lm
from hone.models.policy import PolicyModel
from hone.ops.packing import shared_with_the_row_before
from hone.protocol import DataProto
from hone.rollout.build import build_rollout, refuse_inexact
from hone.workers.device import pick_device, pick_dtype, prepare_process
from hone.workers.objectives import PolicyObjective, update_in_minibatches
from hone.workers.roofline import Roofline


class ActorRolloutRefWorker(Worker):
    """`role` is `actor_rollout`, `actor_rollout_ref` (keeps a reference too) or `ref`."""

    def __init__(self, config: PPOTrainerConfig, role: str = "actor_rollout_ref") -> None:
        super().__init__()
        self.config = config
        self.roles = role
        self.version = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        whole, config = self.config, self.config.actor_rollout_ref
        self.device = pick_device(whole.trainer.device, self.local_rank)
        sharding = [config.actor.fsdp_config, config.ref.fsdp_config]
        prepare_process(self.device, self.world_size, config.nccl_timeout, sharding)
        self.tokenizer = build_tokenizer(config.model)
        if "actor" in self.roles:
            self._build_actor()
        if "ref" in self.roles:
            self.reference = self._build_reference()

    def _load_policy(self, dtype: torch.dtype) -> PolicyModel:
        model = self.config.actor_rollout_ref.model
        lm: Any = load_causal_lm(
            model.path,
            dtype=dtype,
            override_config=model.override_config,
            device=self.device,
        )
        if model.enable_gradient_checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        return PolicyModel(lm.to(self.device))

    def _build_actor(self) -> None:
        config, rollout = self.config.actor_rollout_ref, self.config.actor_rollout_ref.rollout
        actor = config.actor
        refuse_inexact(rollout, config.model.path)
        policy = self._load_policy(pick_dtype(actor.fsdp_config.dtype, self.device))
        if config.model.uses_lora:
            policy.lm = build_lora(policy.lm, config.model, self.config.trainer.seed)
        self.engine: TrainEngine = build_engine(
            policy,
            optim=actor.optim,
            grad_clip=actor.grad_clip,
            fsdp=actor.fsdp_config,
            train_rule=MicroBatchRule(
                actor.sequences_per_micro_batch(self.world_size), actor.ppo_max_token_len_per_gpu
            ),
            infer_rule=MicroBatchRule(
                rollout.log_prob_sequences_per_micro_batch(self.world_size),
                rollout.log_prob_max_token_len_per_gpu,
            ),
            response_width=rollout.response_length,
            world_size=self.world_size,
            compile_blocks=actor.use_torch_compile,
        )
        facts = self.engine.facts
        ends = tuple(dict.fromkeys((*facts.eos_ids, *eos_ids(None, None, self.tokenizer))))
        with self.engine.present():
            self.rollout = build_rollout(rollout, policy, self.tokenizer, ends, self.device)
        run_seed = self.config.sampling_seed
        self.runner = LoopRunner(
            self.config,
            self.rollout,
            self.tokenizer,
            run_seed=run_seed,
            vocabulary=facts.vocabulary,
        )

    def _build_reference(self) -> TrainEngine | None:
        """The policy as it was loaded, or the actor with its adapters off."""
        config, ref = self.config.actor_rollout_ref, self.config.actor_rollout_ref.ref
        if config.model.uses_lora and "actor" in self.roles:
            return None
        policy = self._load_policy(pick_dtype(ref.fsdp_config.dtype, self.device))
        policy.requires_grad_(False)
        rule = MicroBatchRule(
            ref.sequences_per_micro_batch(self.world_size), ref.log_prob_max_token_len_per_gpu
        )
        return build_engine(
            policy,
            optim=None,
            grad_clip=0.0,
            fsdp=ref.fsdp_config,
            train_rule=rule,
            infer_rule=rule,
            response_width=config.rollout.response_length,
            world_size=self.world_size,
            compile_blocks=ref.use_torch_compile,
        )

    @register(dispatch_mode=replace(Dispatch.DP_COMPUTE_PROTO, collect_fn=join_ranks))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One trajectory a row, through the row's agent loop."""
        self.rollout.wake_up()
        try:
            with self.engine.lease():
                started = time.perf_counter()
                batch = self.runner.run(prompts, widths=self.engine.widest)
                batch.meta_info["metrics"] |= self._rollout_metrics(
                    batch, time.perf_counter() - started
                )
                return batch
        finally:
            if self.config.actor_rollout_ref.rollout.free_cache_engine:
                self.rollout.sleep()

    def _rollout_metrics(self, batch: DataProto, seconds: float) -> dict[str, float]:
        """Share of the GPU's memory bandwidth that generation used."""
        roofline = Roofline.of(self.engine.facts, self.device)
        if roofline is None:
            return {}
        width, mask = batch.batch["prompts"].shape[1], batch.batch["attention_mask"]
        lengths = mask[:, :width].sum(1).tolist(), mask[:, width:].sum(1).tolist()
        slots = self.config.actor_rollout_ref.rollout.max_num_seqs
        return {"perf/mbu": roofline.generation_share(*lengths, slots, seconds)}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Log-probs and entropies; with `meta_info["with_sum_pi_squared"]` also Σπ² a token."""
        out = self.engine.infer(
            data,
            temperature=data.meta_info["temperature"],
            with_entropy=True,
            with_sum_pi_squared=bool(data.meta_info.get("with_sum_pi_squared")),
        )
        names = {"log_probs": "old_log_probs", "entropy": "entropys"}
        return DataProto.from_dict({names.get(name, name): x for name, x in out.items()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        temperature = data.meta_info["temperature"]
        if self.reference is not None:
            out = self.reference.infer(data, temperature=temperature)
        else:
            out = self.engine.infer(data, adapters=False, temperature=temperature)
        return DataProto.from_dict({"ref_log_prob": out["log_probs"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        """Every update of this step, then the new weights are the rollout's too."""
        actor = self.config.actor_rollout_ref.actor
        started = time.perf_counter()
        objective = PolicyObjective(
            actor,
            temperature=data.meta_info["temperature"],
            correction=self.config.algorithm.rollout_correction,
        )
        with self.engine.present(optimizer=True):
            metrics = update_in_minibatches(
                self.engine,
                data,
                objective,
                rows_per_update=actor.sequences_per_update(),
                epochs=actor.ppo_epochs,
                shuffle_seed=actor.data_loader_seed if actor.shuffle else None,
            )
        self.engine.advance_schedule()
        self.version = self.engine.updates
        self.rollout.update_weights((), self.version)
        for name in ("grad_norm", "lr", "skipped_updates"):
            metrics[f"actor/{name}"] = metrics.pop(name)
        metrics |= self._device_metrics(data, time.perf_counter() - started)
        return DataProto(batch=None, meta_info={"metrics": metrics})

    def _device_metrics(self, data: DataProto, seconds: float) -> dict[str, float]:
        """Share of the GPU's arithmetic that the updates used, and the most memory held so far."""
        if self.device.type != "cuda":
            return {}
        gib = 2**30
        measured = {
            "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(self.device) / gib,
            "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(self.device) / gib,
        }
        if (roofline := Roofline.of(self.engine.facts, self.device)) is not None:
            seen = data.batch["attention_mask"]
            shared = shared_with_the_row_before(data.batch["prompts"], seen)
            epochs = self.config.actor_rollout_ref.actor.ppo_epochs
            share = roofline.update_share(seen.sum(1).tolist(), shared, seconds)
            measured["perf/mfu"] = epochs * share
        return measured

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        contents = self.config.actor_rollout_ref.actor.checkpoint.save_contents
        with self.engine.present():
            self.engine.save(Path(folder), contents)
            if "hf_model" in contents:
                self.engine.export(Path(folder), self.tokenizer)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        self.engine.load(Path(folder), self.config.actor_rollout_ref.actor.checkpoint.load_contents)
        self.version = self.engine.updates
        self.rollout.update_weights((), self.version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Stop the rollout engine, if `init_model` got that far."""
        if hasattr(self, "rollout"):
            self.rollout.close()
