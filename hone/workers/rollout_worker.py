"""The rollout worker: runs agent loops and their rollout engine, and updates the engine's weights.

In the actor's process, the engine decodes in the thread that calls `pop_finished_groups`, with the
training module (`shared` on one rank, `gathered` on several) or with a copy of its weights (`copied`). An
engine in another process receives weights (`streamed`) and decodes in its own thread. With
`rollout.tensor_model_parallel_size` above 1, each rank gathers or receives full tensors and keeps a shard.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from hone.agents.groups import FinishedGroup, GroupRequest
from hone.agents.loop_thread import run_with_engine
from hone.agents.runner import LoopRunner
from hone.config import PPOTrainerConfig
from hone.controller import Dispatch, Worker, register
from hone.controller.contract import DEFAULT_MESH
from hone.engine.build import load_module
from hone.engine.contract import EngineSpec, Lease, ModelFacts
from hone.event_loop import run_coroutine
from hone.models.from_config import build_tokenizer
from hone.models.load import eos_ids
from hone.models.policy import PolicyModel
from hone.rollout.build import build_rollout, check_exact_mode
from hone.rollout.contract import RolloutSpec, Sampling, TokenOutput
from hone.weights.contract import StreamAddress
from hone.weights.streamed import Location, receive
from hone.workers.actor import ActorWorker, Roofline
from hone.workers.device import pick_device, prepare_process
from hone.workers.engine_specs import actor_spec
from hone.workers.shared_count import SharedCount

WeightTransfer = Literal["shared", "gathered", "copied", "streamed"]
"""How new weights reach the rollout engine; the docstring of this module explains each way."""


@dataclass(frozen=True)
class FinishedGroups:
    """The finished groups of one rank, and the metrics of their generation."""

    groups: list[FinishedGroup] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class RolloutWorker(Worker):
    """Generates trajectories with the published policy."""

    def __init__(self, config: PPOTrainerConfig) -> None:
        super().__init__()
        self.config = config
        rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        check_exact_mode(rollout, model.path)  # an error here comes before any model loads
        # Engines other than the native one shard their model themselves.
        size = rollout.tensor_model_parallel_size if rollout.name == "native" else 1
        if size > 1:
            from hone.rollout.native.sharding import check_sharding

            check_sharding(size, self.world_size, model)
        self._tensor_parallel_size = size
        self.is_leader = self.rank % size == 0
        """Whether agent loops run on this rank, the first of the ranks that share one model."""
        self.register_mesh(DEFAULT_MESH, self.rank // size, self.is_leader)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        run_config, config = self.config, self.config.actor_rollout_ref
        self.device = pick_device(run_config.trainer.device, self.local_rank)
        tokenizer = build_tokenizer(config.model)
        actor = self.colocated.get("actor")
        self.actor = actor if isinstance(actor, ActorWorker) else None
        model_spec = replace(actor_spec(run_config, self, self.device), optim=None)
        if self.actor is None:
            policy = self._load_policy(model_spec)
            self._lease = Lease(policy, address_version=0)
            self.model_facts = ModelFacts.of(policy.lm)
        else:
            self.model_facts = self.actor.engine.model_facts
        self._roofline = Roofline.for_device(self.model_facts, self.device)
        all_eos_ids = (*self.model_facts.eos_ids, *eos_ids(None, None, tokenizer))
        with ExitStack() as stack:
            spec = RolloutSpec(
                config.rollout,
                model_path=config.model.path,
                load_policy=lambda: stack.enter_context(self._lease_policy()).policy,
                dtype=model_spec.dtype,
                device=self.device,
                tokenizer=tokenizer,
                eos_ids=tuple(dict.fromkeys(all_eos_ids)),
                rank=self.rank,
                world_size=self.world_size,
                has_adapters=config.model.uses_lora and not config.rollout.merge_lora,
            )
            if self._tensor_parallel_size > 1:
                spec = self._tensor_parallel_spec(spec, model_spec)
            elif self.actor is not None and self.world_size == 1:
                spec = replace(spec, current_weights=self.actor.engine.named_hf_weights)
            self.engine = build_rollout(spec)
        if self.actor is None and not self.engine.traits.uses_policy_module:
            del self._lease  # the engine has its own weights; only the facts were needed
        self._num_counts = 0
        self._lease_address_version: int | None = None
        """`Lease.address_version` at the engine's last wake_up; None before the first and during sleep."""
        self._is_paused_outside_lease = False
        """Whether requests wait for the next lease; an engine with its own thread would go on without it."""
        self.runner = LoopRunner(
            run_config,
            self.engine,
            tokenizer,
            run_seed=run_config.sampling_seed,
            vocab_size=self.model_facts.vocab_size,
        )
        if self.actor is None:
            self.runner.start()

    def _load_policy(self, model_spec: EngineSpec) -> PolicyModel:
        """Loads the module of a worker that has no actor in its process."""
        is_sharded = self._tensor_parallel_size > 1
        if is_sharded:
            model_spec = replace(model_spec, adapters=None)
        if is_sharded or self.config.actor_rollout_ref.rollout.name in ("vllm", "sglang"):
            # The engine has its own copy of the weights on the device, so this module stays on the host.
            model_spec = replace(model_spec, device=torch.device("cpu"))
        policy = load_module(model_spec)
        assert isinstance(policy, PolicyModel)
        return policy.eval()

    def _tensor_parallel_spec(self, spec: RolloutSpec, model_spec: EngineSpec) -> RolloutSpec:
        """Returns the spec of an engine whose model is sharded over several ranks."""
        from hone.models.load import empty_causal_lm
        from hone.rollout.native.peers import connect

        timeout_s = self.config.actor_rollout_ref.nccl_timeout
        prepare_process(self.device, self.world_size, timeout_s, ())

        def load_empty_policy() -> PolicyModel:
            lm = empty_causal_lm(
                model_spec.model_path,
                dtype=model_spec.dtype,
                override_config=model_spec.override_config,
                device=self.device,
            )
            return PolicyModel(lm)

        if self.actor is None:
            current_weights = self._lease.policy.lm.named_parameters
        else:
            current_weights = self.actor.engine.named_hf_weights
        size = self._tensor_parallel_size
        return replace(
            spec,
            load_policy=load_empty_policy,
            current_weights=current_weights,
            peers=connect(self.rank, self.world_size, size, self.device, timeout_s),
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Starts the agent loops of these groups and returns immediately."""
        if requests:
            self.runner.submit(requests)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pop_finished_groups(
        self, n_groups: int | None, wait_s: float, numbers: Collection[int] | None = None
    ) -> FinishedGroups:
        """Returns up to `n_groups` finished groups (None: all); each group is returned once.

        With `numbers`, only these groups count. In the actor's process, the call decodes until the ranks
        together have finished enough groups; in another process, the call waits up to `wait_s` seconds.
        """
        if self.actor is None:
            return FinishedGroups(self.runner.pop_finished(n_groups, wait_s, numbers))
        if self._tensor_parallel_size == 1:
            return self._decode(n_groups, numbers)
        from hone.rollout.native.leader import LeaderRollout

        if not isinstance(self.engine, LeaderRollout):
            # This rank has no agent loops: it follows the leader's steps until the leader calls `release`.
            self.runner.run_until(lambda: True)
            return FinishedGroups()
        try:
            return self._decode(n_groups, numbers)
        finally:
            self.engine.release()

    def _decode(self, n_groups: int | None, numbers: Collection[int] | None) -> FinishedGroups:
        """Decodes in this thread until `n_groups` groups are finished (None: all), and returns them.

        With several leaders, `n_groups` is the sum over them.
        """
        runner, start_time = self.runner, time.perf_counter()
        shared_count: SharedCount | None = None
        if n_groups is not None and self.world_size > self._tensor_parallel_size:
            self._num_counts += 1  # as on the other ranks, which get the same calls
            key = f"hone/finished_groups/{self._num_counts}"
            shared_count = SharedCount(_get_default_store(), key, n_groups)
        elif n_groups is None and numbers is not None:
            n_groups = len({*numbers} & {*runner.pending_numbers()})

        def is_enough() -> bool:
            num_ready = runner.num_ready(numbers)
            if shared_count is not None:
                return shared_count.is_reached(num_ready)
            return n_groups is not None and num_ready >= n_groups

        watched = nullcontext() if shared_count is None else shared_count.watched(runner.notify)
        with self._serving(), watched:
            runner.run_until(is_enough)
            is_enough()  # tells the other ranks what has finished last
        groups = runner.pop_finished(n_groups if shared_count is None else None, numbers=numbers)
        frees_cache = self.config.actor_rollout_ref.rollout.free_cache_engine
        if frees_cache and not runner.pending_numbers():
            run_coroutine(self.engine.sleep())
            self._lease_address_version = None
        return FinishedGroups(groups, self._utilization(groups, time.perf_counter() - start_time))

    def _utilization(self, groups: Sequence[FinishedGroup], seconds: float) -> dict[str, float]:
        """Returns how much of the memory bandwidth the decoding of these groups used, if it is known."""
        outputs = [output for group in groups for output in group.outputs]
        if self._roofline is None or not outputs:
            return {}
        prompt_lengths = [len(output.prompt_ids) for output in outputs]
        response_lengths = [len(output.response_ids) for output in outputs]
        max_num_seqs = self.config.actor_rollout_ref.rollout.max_num_seqs
        mbu = self._roofline.mbu(prompt_lengths, response_lengths, max_num_seqs, seconds)
        return {"perf/mbu": mbu}

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """Lends the parameters to the engine, which may decode in the block; kept requests wait outside."""
        traits = self.engine.traits
        with ExitStack() as stack:
            address_version = 0  # an engine with its own weights needs no lease
            if traits.uses_policy_module:  # all ranks enter together
                address_version = stack.enter_context(self._lease_policy()).address_version
            if address_version != self._lease_address_version:
                run_coroutine(self.engine.wake_up())
                self._lease_address_version = address_version
            if self._is_paused_outside_lease:
                run_coroutine(self.engine.resume())
                self._is_paused_outside_lease = False
            yield
            is_pausable = traits.uses_policy_module and traits.pause_keeps_requests
            if is_pausable and self.runner.pending_numbers():
                run_coroutine(self.engine.pause(keep=True))
                self._is_paused_outside_lease = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def probe(self, prompt_ids: Sequence[int], sampling: Sampling) -> TokenOutput | None:
        """Returns the engine's response to a prompt, outside the agent loops.

        Returns None on a rank that follows a leader, and if the log-probs are not those of the weights.
        """
        if not self.engine.traits.log_probs_of_weights:
            return None
        if not self.is_leader:
            if self.actor is not None:
                self.runner.run_until(lambda: True)  # until the leader calls `release`
            return None
        response = self.engine.generate(prompt_ids, sampling, "publish-probe", priority=-1)
        if self.actor is None:  # another thread drives the engine
            return run_coroutine(response)
        try:
            with self._serving():
                return run_with_engine(self.engine, response)
        finally:
            if self._tensor_parallel_size > 1:
                from hone.rollout.native.leader import LeaderRollout

                assert isinstance(self.engine, LeaderRollout)
                self.engine.release()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def abort(self, numbers: Collection[int] | None = None) -> None:
        """Drops these groups, or all groups; they are never returned."""
        self.runner.abort(numbers)

    def _lease_policy(self) -> AbstractContextManager[Lease]:
        """Lends the module for decoding: the actor's, or this worker's own."""
        return self.actor.engine.lease() if self.actor else nullcontext(self._lease)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def weight_transfer(self) -> WeightTransfer:
        """Returns how new weights reach this worker."""
        if self.actor is None:
            return "streamed"
        if not self.engine.traits.uses_policy_module and self._tensor_parallel_size == 1:
            return "copied"
        return "shared" if self.world_size == 1 else "gathered"

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def takes_adapters(self) -> bool:
        """Whether the engine accepts LoRA tensors without the base weights."""
        return self.engine.traits.loads_adapters

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def location(self) -> Location:
        """Returns the machine, device and address of this process, which decide the transport."""
        return Location.of_this_process(self.device, self.get_master_addr_port()[0])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def switch_to_actor_weights(self, version: int) -> int:
        """Switches the engine to this version of the actor's weights; returns the number of copied bytes.

        Nothing is copied if the engine decodes with the training module.
        """
        if self.actor is None or self.engine.traits.uses_policy_module:
            run_coroutine(self._update((), version))
            return 0
        num_bytes, weights = 0, self.actor.named_weights(self.engine.traits.loads_adapters)

        def counted_weights() -> Iterator[tuple[str, Tensor]]:
            nonlocal num_bytes
            for name, tensor in weights:
                num_bytes += tensor.nbytes
                yield name, tensor

        with self.actor.engine.on_device():
            run_coroutine(self._update(counted_weights(), version))
        return num_bytes

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, address: StreamAddress, version: int) -> None:
        """Loads the tensors of one stream; if the stream is interrupted, the engine stops generating."""
        timeout_s = self.config.actor_rollout_ref.nccl_timeout
        stream = receive(address, self.rank, self.device, timeout_s)
        run_coroutine(self._update(stream, version))

    async def _update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Pauses the engine, loads the weights as this version, and resumes unless a lease is needed."""
        await self.engine.pause(keep=self.engine.traits.pause_keeps_requests)
        await self.engine.begin_update()
        await self.engine.load(weights)
        await self.engine.commit(version)
        if not self._is_paused_outside_lease:
            await self.engine.resume()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Stops the agent loops and the engine, if `init_model` has created them."""
        if hasattr(self, "runner"):
            self.runner.close()
        if hasattr(self, "engine"):
            run_coroutine(self.engine.close())
