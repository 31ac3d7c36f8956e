"""The ranks of a tensor-parallel slot as threads of one process, over gloo."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hone.config.rollout import RolloutConfig
from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutEngine, RolloutSpec
from hone.rollout.native.engine import Core
from hone.rollout.native.follower import FollowerRollout
from hone.rollout.native.leader import LeaderRollout
from hone.rollout.native.peers import SHARDED_TRAITS, Peers
from hone.rollout.native.sharding import ShardedPolicy, build_cpu_shard, build_paged_shard
from hone.rollout.weights import load_weights

from ..engine_contract import Place
from ..factories import NativeFactory
from ..models import EOS, POSITIONS, TOKENIZER
from .paged import PagedFactory

T = TypeVar("T")
TIMEOUT_S = 20.0
BLOCKS = 700


def hollow(lm: Any) -> Any:
    """A copy with its parameters on the meta device, as a run builds it from a config."""
    lm = copy.deepcopy(lm)
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(lm.named_parameters(remove_duplicate=False)):
        meta = made.setdefault(
            id(parameter), nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        )
        owner, _, attribute = name.rpartition(".")
        setattr(lm.get_submodule(owner), attribute, meta)
    return lm


def on_ranks(size: int, work: Callable[[int], T]) -> list[T]:
    """Runs `work(rank)` on every rank at once."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result(60) for future in [pool.submit(work, r) for r in range(size)]]


def peers_of(size: int, timeout_s: float = TIMEOUT_S) -> list[Peers]:
    store = dist.HashStore()

    def join(rank: int) -> Peers:
        timeout = timedelta(seconds=timeout_s)
        group: Any = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, size, timeout)
        return Peers(rank, size, group, group, dist.PrefixStore("cause", store), timeout_s)

    return on_ranks(size, join)


def shards_of(policy: PolicyModel, peers: list[Peers]) -> list[ShardedPolicy]:
    made = [ShardedPolicy(hollow(policy.lm), p, torch.device("cpu")) for p in peers]
    for shard in made:
        load_weights(shard, shard.shards(policy.lm.named_parameters()))
    return made


def cores_of(shards: list[ShardedPolicy], *, paged: bool = False, **settings: Any) -> list[Core]:
    config = RolloutConfig(**{"max_num_batched_tokens": 256, "max_model_len": POSITIONS} | settings)
    spec = RolloutSpec(
        config,
        model_path="",
        load_policy=lambda: shards[0],
        dtype=torch.float32,
        device=torch.device("cpu"),
        tokenizer=TOKENIZER,
        eos_ids=(EOS,),
    )

    def build(rank: int) -> Core:
        if paged:
            return build_paged_shard(spec, shards[rank], BLOCKS)
        return build_cpu_shard(spec, shards[rank])

    return on_ranks(len(shards), build)


class Slot:
    """The engines of the ranks of one model; every rank above 0 runs in a thread."""

    def __init__(self, policy: PolicyModel, size: int = 2, **options: Any) -> None:
        self.peers = peers_of(size, options.pop("timeout_s", TIMEOUT_S))
        self.cores = cores_of(shards_of(policy, self.peers), **options)
        self.leader = LeaderRollout(self.cores[0], self.peers[0])
        self.followers = [
            FollowerRollout(core, peers)
            for core, peers in zip(self.cores[1:], self.peers[1:], strict=True)
        ]
        self.errors: list[BaseException] = []
        self.threads: list[threading.Thread] = []

    def follow(self) -> None:
        self.threads = [threading.Thread(target=self._follow, args=(f,)) for f in self.followers]
        for thread in self.threads:
            thread.start()

    def _follow(self, follower: FollowerRollout) -> None:
        try:
            follower.drive(lambda: False)
        except BaseException as error:
            self.errors.append(error)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()


class SlotRollout:
    """All ranks of one model behind the engine interface: requests go to rank 0, weights to all ranks."""

    def __init__(self, slot: Slot) -> None:
        self.slot, self.leader = slot, slot.leader
        self.traits = slot.leader.traits
        self._core = slot.cores[0]
        self._is_driven = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.leader, name)

    def notify(
        self,
    ) -> None:  # from Python 3.12 on, isinstance of a protocol does not ask __getattr__
        self.leader.notify()

    def drive(self, until: Callable[[], bool]) -> None:
        self._is_driven = True
        self.slot.follow()
        try:
            self.leader.drive(until)
        finally:
            self.leader.release()
            if self.leader._update.in_progress:  # the update will not end
                for follower in self.slot.followers:
                    asyncio.run(follower.close())
            self.slot.join()
            self._is_driven = False

    async def _all(self, leading: Any, *following: Any) -> None:
        ranks = [asyncio.to_thread(asyncio.run, call) for call in (leading, *following)]
        first, *results = await asyncio.gather(*ranks, return_exceptions=True)
        for result in (first, *results):
            if isinstance(result, BaseException):
                assert isinstance(first, BaseException)  # if a rank raises, rank 0 raises too
                raise result

    async def begin_update(self) -> None:
        await self._all(
            self.leader.begin_update(), *(f.begin_update() for f in self.slot.followers)
        )

    async def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        tensors = list(weights)
        await self._all(self.leader.load(tensors), *(f.load(tensors) for f in self.slot.followers))

    async def commit(self, version: int) -> None:
        await self._all(
            self.leader.commit(version), *(f.commit(version) for f in self.slot.followers)
        )

    async def close(self) -> None:
        await self.leader.close()
        for follower in self.slot.followers:
            await follower.close()


class SlotFactory(NativeFactory):
    """The native engine over two tensor-parallel ranks."""

    name = "native-tp2"
    engine_traits = SHARDED_TRAITS
    paged = False
    draws = 200
    long_tokens = 100

    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine:
        engine: Any = SlotRollout(Slot(policy, max_num_seqs=max_num_seqs, paged=self.paged))
        return engine

    def phases(self, engine: Any) -> dict[str, Place]:
        places = (PagedFactory() if self.paged else NativeFactory()).phases(engine)
        return places | {"deliver": (engine.leader, "_deliver")}


class PagedSlotFactory(SlotFactory):
    name = "paged-tp2"
    paged = True
