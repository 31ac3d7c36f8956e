"""The rollout worker: agent loops beside their engine, and where the engine's weights come from.

In the actor's process an engine that decodes with the training module borrows it (`shared` on one rank,
`gathered` on several), one with weights of its own gets them there (`copied`); an engine in another
process has weights of its own (`streamed`). In the actor's process the thread that asks for finished
groups decodes; an engine apart decodes in a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from hone.agents.runner import FinishedGroup, LoopRunner
from hone.config import PPOTrainerConfig
from hone.controller import Dispatch, Worker, register
from hone.engine.build import load_module
from hone.engine.contract import Lease
from hone.engine.model_state import model_facts
from hone.event_loop import run_coroutine
from hone.models.from_config import build_tokenizer
from hone.models.load import eos_ids
from hone.models.policy import PolicyModel
from hone.protocol import DataProto
from hone.rollout.build import build_rollout, refuse_inexact
from hone.rollout.contract import RolloutSpec
from hone.weights.contract import StreamAddress
from hone.weights.streamed import Standing, received
from hone.workers.actor import ActorWorker
from hone.workers.device import pick_device
from hone.workers.engine_specs import actor_spec
from hone.workers.roofline import Roofline

WeightPath = Literal["shared", "gathered", "copied", "streamed"]


@dataclass(frozen=True)
class Finished:
    """Groups that have ended on one rank, and what the rank measured while it decoded them."""

    groups: list[FinishedGroup] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class RolloutWorker(Worker):
    """Trajectories of the published policy."""

    def __init__(self, config: PPOTrainerConfig) -> None:
        super().__init__()
        self.config = config
        policy = config.actor_rollout_ref
        refuse_inexact(policy.rollout, policy.model.path)  # before any role loads its model

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        whole, config = self.config, self.config.actor_rollout_ref
        self.device = pick_device(whole.trainer.device, self.local_rank)
        tokenizer = build_tokenizer(config.model)
        actor = self.colocated.get("actor")
        self.actor = actor if isinstance(actor, ActorWorker) else None
        model = replace(actor_spec(whole, self, self.device), optim=None)
        if self.actor is None:
            policy = load_module(model)
            assert isinstance(policy, PolicyModel)
            self._lease = Lease(policy.eval(), 0)
            self.facts = model_facts(policy.lm)
        else:
            self.facts = self.actor.engine.facts
        with ExitStack() as held:
            spec = RolloutSpec(
                config.rollout,
                model_path=config.model.path,
                load_policy=lambda: held.enter_context(self._borrowed()).policy,
                dtype=model.dtype,
                device=self.device,
                tokenizer=tokenizer,
                eos_ids=tuple(
                    dict.fromkeys((*self.facts.eos_ids, *eos_ids(None, None, tokenizer)))
                ),
            )
            self.engine = build_rollout(spec)
        self._generation: int | None = None  # of the lease the engine last woke up to
        self.runner = LoopRunner(
            whole,
            self.engine,
            tokenizer,
            run_seed=whole.sampling_seed,
            vocabulary=self.facts.vocabulary,
        )
        if self.actor is None:
            self.runner.start()

    # -- trajectories -------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def submit(self, rows: DataProto | None) -> None:
        """Start a loop for each row; returns at once. None: there is nothing for this rank."""
        if rows is not None:
            self.runner.submit(rows)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finished(self, n_groups: int | None, wait_s: float) -> Finished:
        """Groups that have ended, each handed out once: `n_groups` of them, or all (None).

        With a borrowed module this decodes until there are so many; apart it waits up to `wait_s`.
        """
        if self.actor is None:
            return Finished(self.runner.finished(n_groups, wait_s))
        runner, started = self.runner, time.perf_counter()
        with self._weights() as generation:  # on several ranks all begin here together
            if generation != self._generation:
                run_coroutine(self.engine.wake_up())
                self._generation = generation
            runner.run_until(lambda: n_groups is not None and runner.ready() >= n_groups)
        groups = runner.finished(n_groups)
        if self.config.actor_rollout_ref.rollout.free_cache_engine and not runner.pending():
            run_coroutine(self.engine.sleep())
            self._generation = None
        return Finished(groups, self._bandwidth(groups, time.perf_counter() - started))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def abort(self, uids: Collection[str] | None = None) -> None:
        """Drop these groups, or all; they are never handed out."""
        self.runner.abort(uids)

    @contextmanager
    def _weights(self) -> Iterator[int]:
        """Inside, the engine's parameters are present and whole. Gives the lease's generation, or 0 where
        the engine has weights of its own."""
        if not self.engine.traits.decodes_with_module:
            yield 0
            return
        with self._borrowed() as lease:
            yield lease.generation

    def _borrowed(self) -> AbstractContextManager[Lease]:
        return self.actor.engine.lease() if self.actor else nullcontext(self._lease)

    def _bandwidth(self, groups: Iterable[FinishedGroup], seconds: float) -> dict[str, float]:
        """Share of the GPU's memory bandwidth that generation used."""
        roofline = Roofline.of(self.facts, self.device)
        outputs = [output for group in groups for output in group.outputs]
        if roofline is None or not outputs:
            return {}
        prompts = [len(output.prompt_ids) for output in outputs]
        responses = [len(output.response_ids) for output in outputs]
        slots = self.config.actor_rollout_ref.rollout.max_num_seqs
        return {"perf/mbu": roofline.generation_share(prompts, responses, slots, seconds)}

    # -- weights ------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def weight_path(self) -> WeightPath:
        """How new weights get here."""
        if self.actor is None:
            return "streamed"
        if not self.engine.traits.decodes_with_module:
            return "copied"
        return "shared" if self.world_size == 1 else "gathered"

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def takes_adapters(self) -> bool:
        """Whether LoRA tensors alone may be streamed here."""
        return self.engine.traits.adapters

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def standing(self) -> Standing:
        """Where this process stands, for the choice of a transport."""
        return Standing.here(self.device, self.get_master_addr_port()[0])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def announce_weights(self, version: int) -> int:
        """The actor's parameters are those of `version` from now on: borrowed, or copied where the engine
        has weights of its own. Returns the bytes that were copied."""
        if self.actor is None or self.engine.traits.decodes_with_module:
            run_coroutine(self._update((), version))
            return 0
        sizes: list[int] = []

        def copied(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                sizes.append(tensor.nbytes)
                yield name, tensor

        with self.actor.engine.present():
            weights = self.actor.engine.named_hf_weights()
            run_coroutine(self._update(copied(weights), version))
        return sum(sizes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, address: StreamAddress, version: int) -> None:
        """Take the tensors of one stream; after one that broke off the engine gives no token."""
        timeout_s = self.config.actor_rollout_ref.nccl_timeout
        stream = received(address, self.rank, self.device, timeout_s)
        run_coroutine(self._update(stream, version))

    async def _update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        await self.engine.pause(keep=self.engine.traits.partial_keep)
        await self.engine.begin_update()
        await self.engine.load(weights)
        await self.engine.commit(version)
        await self.engine.resume()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Stop loops and engine, if `init_model` got that far."""
        if hasattr(self, "runner"):
            self.runner.close()
            run_coroutine(self.engine.close())
