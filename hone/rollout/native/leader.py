"""The native engine of tensor-parallel rank 0, which schedules for all ranks.

Requests arrive only here. Each change of the core is also sent to the other ranks as a command.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, cast

from hone.rollout.contract import RolloutError, Weights
from hone.rollout.native.engine import Core, NativeRollout
from hone.rollout.native.peers import SHARDED_TRAITS, Command, Peers, Replica
from hone.rollout.requests import Request, select

if TYPE_CHECKING:
    from hone.rollout.native.sharding import ShardedPolicy

_HEARTBEATS_PER_TIMEOUT = 4
"""Without work, `drive` sends this many commands per timeout, so that the other ranks do not time out."""


class LeaderCore:
    """The core of rank 0, which executes each command and sends it to the other ranks.

    The core that computes works on copies of the requests; a copy shares the token lists of its request.
    Only a command cancels a copy, so a cancellation takes effect on all ranks at the same step.
    """

    def __init__(self, core: Core, peers: Peers) -> None:
        self._replica, self._peers = Replica(core), peers
        self.policy, self.rules = core.policy, core.rules
        self._requests: dict[int, Request] = {}  # the engine's requests by number
        self._last_number = 0
        self._unsent_commands: list[Command] = []
        """Commands that are executed here and not sent yet, because other ranks listen only in `drive`."""

    @property
    def version(self) -> int:
        return self._replica.core.version

    @version.setter
    def version(self, version: int) -> None:
        self._queue_and_execute({"do": "version", "version": version})

    @property
    def busy(self) -> bool:
        return self._replica.core.busy

    def add(self, request: Request) -> None:
        self._last_number += 1
        number = self._last_number
        self._requests[number] = request
        copy = replace(
            request, request_id=str(number), cancelled=False, future=None, on_tokens=None
        )
        sampling = asdict(request.sampling)
        arguments = {"number": number, "prompt": request.prompt_ids, "sampling": sampling}
        self._unsent_commands.append({"do": "add", **arguments, "priority": request.priority})
        with self._peers.close_on_error():
            self._replica.add(number, copy)

    def step(self, should_return: Callable[[], bool]) -> list[Request]:
        replica = self._replica
        cancelled = [
            number
            for number, request in self._requests.items()
            if request.cancelled and not replica.requests[number].cancelled
        ]
        command: Command = {"do": "step", "cancelled": cancelled, "checksum": replica.checksum()}
        self.send(command)
        return self._execute(command)

    def abort(self, request_ids: Collection[str] | None = None) -> list[Request]:
        numbers = [
            number for number, request in self._requests.items() if select([request], request_ids)
        ]
        return self._queue_and_execute({"do": "abort", "numbers": numbers})

    def free_cache(self) -> None:
        self._queue_and_execute({"do": "free_cache"})

    def invalidate(self) -> None:
        self._queue_and_execute({"do": "invalidate"})

    def park(self) -> None:
        self._queue_and_execute({"do": "park"})

    def _queue_and_execute(self, command: Command) -> list[Request]:
        """Queues a command for the other ranks, and executes it here."""
        self._unsent_commands.append(command)
        return self._execute(command)

    def _execute(self, command: Command) -> list[Request]:
        """Executes a command and returns the requests that have finished."""
        copies = dict(self._replica.requests)
        with self._peers.close_on_error():
            return [
                self._finish(number, copies[number]) for number in self._replica.execute(command)
            ]

    def send(self, command: Command) -> None:
        """Sends the unsent commands and this one; the other ranks must be listening."""
        commands, self._unsent_commands = [*self._unsent_commands, command], []
        with self._peers.close_on_error():
            self._peers.send(commands)

    def _finish(self, number: int, copy: Request) -> Request:
        """Removes a request whose copy has finished; returns the request with the copy's results."""
        request = self._requests.pop(number)
        request.stop_reason, request.cached_tokens = copy.stop_reason, copy.cached_tokens
        request.num_preempted = copy.num_preempted
        return request


class LeaderRollout(NativeRollout):
    """The engine of rank 0."""

    traits = SHARDED_TRAITS

    def __init__(self, core: Core, peers: Peers, *, keep_stale_kv: bool = False) -> None:
        super().__init__(core, keep_stale_kv=keep_stale_kv)
        self._core = self._leader_core = LeaderCore(core, peers)
        self._peers = peers
        self._heartbeat_s = peers.timeout_s / _HEARTBEATS_PER_TIMEOUT
        self._followers_listen = False  # whether `drive` runs on the other ranks

    def drive(self, until: Callable[[], bool]) -> None:
        self._followers_listen = True
        super().drive(until)

    async def begin_update(self) -> None:
        try:
            await super().begin_update()
        except RolloutError as error:
            with self._between_steps():
                if not self._stopped:
                    self._leader_core.send({"do": "update", "refused": str(error)})
            raise
        with self._between_steps():
            self._leader_core.send({"do": "update"})

    async def load(self, weights: Weights) -> None:
        await super().load(cast("ShardedPolicy", self._core.policy).shards(weights))

    async def close(self) -> None:
        await super().close()
        with suppress(RolloutError):  # the other ranks may have exited
            self._send_final("close")

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        if not self._peers.failed:
            self._peers.fail(error)

    def release(self) -> None:
        """Ends `drive` on the other ranks."""
        self._send_final("release")

    def _send_final(self, command: str) -> None:
        """Sends a command that ends `drive` on the other ranks, if they are listening."""
        with self._between_steps():
            were_listening, self._followers_listen = self._followers_listen, False
            # The other ranks do not listen during an update.
            if were_listening and not (self._peers.failed or self._update.in_progress):
                self._leader_core.send({"do": command})

    def _wait_for_work(self) -> bool:
        while True:
            with self._condition:
                has_work = self._condition.wait_for(
                    lambda: self._stopped or self._notified or self._can_decode, self._heartbeat_s
                )
                if has_work:
                    notified, self._notified = self._notified, False
                    return not (self._stopped or notified)
            with self._between_steps():
                if not self._update.in_progress:
                    self._leader_core.send({"do": "wait"})
