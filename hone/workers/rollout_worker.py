"""The rollout worker: agent loops beside their engine, and where the engine's weights come from.

In the actor's process an engine that decodes with the training module borrows it (`shared` on one rank,
`gathered` on several); an engine in another process has weights of its own (`streamed`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Literal

from torch import Tensor

from hone.agents.collate import collate_outputs, join_ranks
from hone.agents.contract import AgentLoopOutput
from hone.agents.runner import LoopRunner
from hone.agents.trajectory import loop_metrics
from hone.config import PPOTrainerConfig
from hone.controller import Dispatch, Worker, register
from hone.engine.contract import Lease
from hone.engine.facts import model_facts
from hone.event_loop import run_coroutine
from hone.models.from_config import build_tokenizer
from hone.models.load import eos_ids
from hone.protocol import DataProto
from hone.rollout.build import build_rollout, refuse_inexact
from hone.weights.contract import StreamAddress
from hone.weights.streamed import Standing, received
from hone.workers.actor import ActorWorker
from hone.workers.device import pick_device, pick_dtype
from hone.workers.loading import load_policy
from hone.workers.roofline import Roofline

WeightPath = Literal["shared", "gathered", "streamed"]


class RolloutWorker(Worker):
    """Trajectories of the published policy."""

    def __init__(self, config: PPOTrainerConfig) -> None:
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        whole, config = self.config, self.config.actor_rollout_ref
        self.device = pick_device(whole.trainer.device, self.local_rank)
        refuse_inexact(config.rollout, config.model.path)
        self.tokenizer = tokenizer = build_tokenizer(config.model)
        actor = self.colocated.get("actor")
        self.actor = actor if isinstance(actor, ActorWorker) else None
        if self.actor is None:
            dtype = pick_dtype(config.actor.fsdp_config.dtype, self.device)
            policy = load_policy(whole, dtype, self.device, adapters=True).requires_grad_(False)
            self._lease = Lease(policy.eval(), 0)
        with self._weights() as lease:
            self.facts = model_facts(lease.policy.lm)
            ends = tuple(dict.fromkeys((*self.facts.eos_ids, *eos_ids(None, None, tokenizer))))
            self.engine = build_rollout(config.rollout, lease.policy, tokenizer, ends, self.device)
        self.runner = LoopRunner(
            whole,
            self.engine,
            tokenizer,
            run_seed=whole.sampling_seed,
            vocabulary=self.facts.vocabulary,
        )

    # -- trajectories -------------------------------------------------------------------------

    @register(dispatch_mode=replace(Dispatch.DP_COMPUTE_PROTO, collect_fn=join_ranks))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One trajectory per row, through the row's agent loop."""
        run_coroutine(self.engine.wake_up())
        try:
            with self._weights():
                started = time.perf_counter()
                outputs = self.runner.run(prompts)
                batch = self._collated(outputs)
                batch.meta_info["metrics"] = loop_metrics(outputs) | self._metrics(
                    batch, time.perf_counter() - started
                )
                return batch
        finally:
            if self.config.actor_rollout_ref.rollout.free_cache_engine:
                run_coroutine(self.engine.sleep())

    def _collated(self, outputs: Sequence[AgentLoopOutput]) -> DataProto:
        """Padded as wide as the longest of all ranks."""
        width = max(len(output.prompt_ids) for output in outputs)
        length = max(len(output.response_ids) for output in outputs)
        if self.actor is not None:
            width, length = self.actor.engine.widest(width, length)
        batch = collate_outputs(
            outputs,
            pad_token_id=self.tokenizer.pad_token_id,
            prompt_width=width,
            response_width=length,
        )
        if not self.config.actor_rollout_ref.rollout.calculate_log_probs:
            batch.batch.pop("rollout_log_probs", None)
        return batch

    def _weights(self) -> AbstractContextManager[Lease]:
        """Inside, the engine's parameters are present and whole."""
        return self.actor.engine.lease() if self.actor else nullcontext(self._lease)

    def _metrics(self, batch: DataProto, seconds: float) -> dict[str, float]:
        """Share of the GPU's memory bandwidth that generation used."""
        roofline = Roofline.of(self.facts, self.device)
        if roofline is None:
            return {}
        width, mask = batch.batch["prompts"].shape[1], batch.batch["attention_mask"]
        lengths = mask[:, :width].sum(1).tolist(), mask[:, width:].sum(1).tolist()
        slots = self.config.actor_rollout_ref.rollout.max_num_seqs
        return {"perf/mbu": roofline.generation_share(*lengths, slots, seconds)}

    # -- weights ------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def weight_path(self) -> WeightPath:
        """How new weights get here."""
        if self.actor is None:
            return "streamed"
        return "shared" if self.world_size == 1 else "gathered"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def standing(self) -> Standing:
        """Where this process stands, for the choice of a transport."""
        return Standing.here(self.device, self.get_master_addr_port()[0])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def announce_weights(self, version: int) -> None:
        """The borrowed parameters are those of `version` from now on."""
        self._update((), version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, address: StreamAddress, version: int) -> None:
        """Take the tensors of one stream; only a stream that ended well changes the version."""
        timeout_s = self.config.actor_rollout_ref.nccl_timeout
        stream = received(address, self.rank, self.device, timeout_s)
        self._update(stream, version)

    def _update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        async def update() -> None:
            await self.engine.begin_update()
            await self.engine.load(weights)
            await self.engine.commit(version)

        run_coroutine(update())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Stop the engine, if `init_model` got that far."""
        if hasattr(self, "engine"):
            self.runner.close()
            run_coroutine(self.engine.close())
