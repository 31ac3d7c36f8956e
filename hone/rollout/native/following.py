"""The native engine of every other rank with one model: it carries out the commands of the first rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from hone.rollout.contract import OnTokens, RolloutError, Sampling, TokenOutput
from hone.rollout.native.engine import Core
from hone.rollout.native.peers import Command, Peers
from hone.rollout.native.replica import TRAITS, Replica
from hone.rollout.requests import engine_failed
from hone.rollout.weights import WeightUpdate, load_weights
from hone.types import Settings


class FollowingRollout:
    """The engine of every other rank: `drive` follows the first rank until it releases or closes.

    Only the weights come from this rank's own worker: `begin_update` waits for the first rank's, and `drive`
    makes no step before `commit`.
    """

    traits = TRAITS

    def __init__(self, core: Core, peers: Peers) -> None:
        self._replica, self._peers = Replica(core), peers
        self._condition = threading.Condition()
        self._update = WeightUpdate()
        # Updates that the first rank has begun, that this rank has begun, and that it has ended.
        self._announced = self._begun = self._ended = 0
        self._refusal: str | None = None
        self._driven = self._closed = False
        self._failure: BaseException | None = None

    @property
    def version(self) -> int:
        return self._replica.core.version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        *,
        on_tokens: OnTokens | None = None,
        multi_modal_data: Settings | None = None,
    ) -> TokenOutput:
        raise RolloutError(
            f"request {request_id} came to rank {self._peers.rank} of {self._peers.size} "
            "tensor-parallel ranks; requests go to the first rank"
        )

    async def abort(self, request_ids: Collection[str] | None = None) -> None: ...

    async def pause(self, keep: bool = False) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake_up(self) -> None: ...

    async def begin_update(self) -> None:
        with self._condition:
            self._raise_if_stopped()
            self._begun += 1
            while self._announced < self._begun:
                if self._driven and not self._updating:  # `drive` receives
                    self._wait_for_announcement()
                else:
                    self._obey(self._receive())
            if self._refusal is not None:
                refusal, self._refusal, self._ended = self._refusal, None, self._announced
                self._condition.notify_all()
                raise RolloutError(refusal)
            self._update.begin(0)

    async def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._raise_if_stopped()
        policy = self._replica.policy
        with self._update.loading():
            load_weights(policy, policy.shards(weights))

    async def commit(self, version: int) -> None:
        with self._condition:
            self._raise_if_stopped()
            self._update.commit()
            self._ended = self._announced
            self._condition.notify_all()

    async def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def drive(self, until: Callable[[], bool]) -> None:
        """Follows the first rank, which decides when this ends; `until` is not called."""
        with self._condition:
            self._raise_if_stopped()
            self._driven = True
        try:
            while not self._stopped:
                commands = self._receive()
                with self._condition:
                    self._obey(commands)
                    if commands[-1]["do"] == "release":
                        return
                    self._condition.notify_all()
                    self._wait_for_update()
        finally:
            with self._condition:
                self._driven = False
                self._condition.notify_all()

    def notify(self) -> None: ...

    @property
    def _stopped(self) -> bool:
        return self._closed or self._failure is not None

    @property
    def _updating(self) -> bool:
        """Whether the first rank has begun an update that this rank has not ended."""
        return self._announced > self._ended

    def _raise_if_stopped(self) -> None:
        if self._stopped:
            raise engine_failed(self._failure)

    def _wait_for_announcement(self) -> None:
        timeout_s = self._peers.timeout_s
        if not self._condition.wait_for(
            lambda: self._stopped or not self._driven or self._updating, timeout_s
        ):
            raise RolloutError(f"the first rank began no update within {timeout_s:g} s")
        self._raise_if_stopped()

    def _wait_for_update(self) -> None:
        """Waits until this rank's worker has ended the update; its transfer has the same timeout."""
        limit_s = 2 * self._peers.timeout_s
        if not self._condition.wait_for(lambda: self._stopped or not self._updating, limit_s):
            with self._failing():
                raise RolloutError(
                    f"a weight update did not end on this rank within {limit_s:g} s "
                    "(twice actor_rollout_ref.nccl_timeout)"
                )

    def _receive(self) -> list[Command]:
        with self._failing():
            return self._peers.receive()

    def _obey(self, commands: Iterable[Command]) -> None:
        with self._failing():
            for command in commands:
                self._change(command)

    def _change(self, command: Command) -> None:
        if command["do"] == "update":
            self._announced += 1
            self._refusal = command.get("refused")
        elif command["do"] == "close":
            self._closed = True
        else:
            self._replica.change(command)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._failure is None and not self._closed:
                self._failure = cause = self._peers.failure(error)
                if cause is not error:
                    raise cause from error
            raise
