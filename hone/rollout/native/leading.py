"""The native engine of the first of several ranks with one model: it schedules, and the others follow.

Requests arrive here only. Each change of the core is also a command to the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict

from torch import Tensor

from hone.rollout.contract import RolloutError
from hone.rollout.native.engine import Core, NativeRollout
from hone.rollout.native.peers import Command, Peers
from hone.rollout.native.replica import TRAITS, Replica
from hone.rollout.requests import Request, select

_BEATS = 4
"""Commands per timeout that the first rank sends at least while it decodes."""


class _LeadingCache:
    def __init__(self, core: LeadingCore) -> None:
        self._core = core

    def free(self) -> None:
        self._core.everywhere("free")


class LeadingCore:
    """The core of the first rank: it sends each change to the other ranks and makes it here.

    The inner core works on copies of the requests, which share their token lists: a cancellation takes
    effect between two steps, on all ranks at once.
    """

    def __init__(self, core: Core, peers: Peers) -> None:
        self._replica, self._peers = Replica(core), peers
        self.policy, self.rules = core.policy, core.rules
        self.cache = _LeadingCache(self)
        self._requests: dict[int, Request] = {}  # of the engine, by number
        self._number = 0
        self._queue: list[Command] = []
        """Changes made here and not yet sent: between two calls of `drive` no other rank listens."""
        self.failed = False

    @property
    def inner(self) -> Core:
        return self._replica.core

    @property
    def version(self) -> int:
        return self.inner.version

    @version.setter
    def version(self, version: int) -> None:
        self.everywhere("version", version=version)

    @property
    def busy(self) -> bool:
        return self.inner.busy

    def add(self, request: Request) -> None:
        self._number += 1
        self._requests[self._number] = request
        copy = Request(
            request.prompt_ids,
            request.sampling,
            str(self._number),
            request.token_ids,
            request.log_probs,
            request.versions,
        )
        sampling = asdict(request.sampling)
        arguments = {"number": self._number, "prompt": request.prompt_ids, "sampling": sampling}
        self._queue.append({"do": "add", **arguments})
        with self._failing():
            self._replica.add(self._number, copy)

    def step(self, must_yield: Callable[[], bool]) -> list[Request]:
        replica, copies = self._replica, dict(self._replica.requests)
        cancelled = [
            n for n, r in self._requests.items() if r.cancelled and not copies[n].cancelled
        ]
        command: Command = {"do": "step", "cancelled": cancelled, "digest": replica.digest()}
        self.send(command)
        with self._failing():
            return [self._end(n, copies[n]) for n in replica.change(command)]

    def abort(self, request_ids: Collection[str] | None = None) -> list[Request]:
        numbers = [n for n, request in self._requests.items() if select([request], request_ids)]
        copies = dict(self._replica.requests)
        command: Command = {"do": "abort", "numbers": numbers}
        self._queue.append(command)
        with self._failing():
            return [self._end(n, copies[n]) for n in self._replica.change(command)]

    def invalidate(self) -> None:
        self.everywhere("invalidate")

    def shards(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return self._replica.policy.shards(weights)

    def everywhere(self, change: str, **arguments: int) -> None:
        """Makes a change that has no result on all ranks."""
        command: Command = {"do": change, **arguments}
        self._queue.append(command)
        with self._failing():
            self._replica.change(command)

    def send(self, command: Command) -> None:
        """Sends this command and those before it; the other ranks must be listening."""
        commands, self._queue = [*self._queue, command], []
        with self._failing():
            self._peers.send(commands)

    def end(self, error: BaseException) -> None:
        """Ends all ranks after a failure outside the core."""
        if not self.failed:
            self.failed = True
            self._peers.failure(error)

    def _end(self, number: int, copy: Request) -> Request:
        request = self._requests.pop(number)
        request.stop_reason, request.cached_tokens = copy.stop_reason, copy.cached_tokens
        return request

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Ends all ranks with the cause of a failure."""
        try:
            yield
        except BaseException as error:
            if self.failed:
                raise
            self.failed = True
            cause = self._peers.failure(error)
            if cause is error:
                raise
            raise cause from error


class LeadingRollout(NativeRollout):
    """The engine of the first rank."""

    traits = TRAITS

    def __init__(self, core: Core, peers: Peers) -> None:
        super().__init__(core)
        self._core = self._leading = LeadingCore(core, peers)
        self._beat_s = peers.timeout_s / _BEATS
        self._leads = False  # whether the other ranks are in `drive`

    def drive(self, until: Callable[[], bool]) -> None:
        self._leads = True
        super().drive(until)

    async def begin_update(self) -> None:
        try:
            await super().begin_update()
        except RolloutError as error:
            with self._between_steps():
                if not self._stopped:
                    self._leading.send({"do": "update", "refused": str(error)})
            raise
        with self._between_steps():
            self._leading.send({"do": "update"})

    async def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        await super().load(self._leading.shards(weights))

    async def close(self) -> None:
        await super().close()
        with suppress(RolloutError):  # the other ranks may have gone
            self._tell_once("close")

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        self._leading.end(error)

    def release(self) -> None:
        """Ends `drive` on the other ranks."""
        self._tell_once("release")

    def _tell_once(self, command: str) -> None:
        with self._between_steps():
            leads, self._leads = self._leads, False
            # In an update the other ranks do not listen.
            if leads and not (self._leading.failed or self._update.in_progress):
                self._leading.send({"do": command})

    def _wait_for_work(self) -> bool:
        while True:
            with self._condition:
                awake = self._condition.wait_for(
                    lambda: self._stopped or self._notified or self._can_decode, self._beat_s
                )
                if awake:
                    notified, self._notified = self._notified, False
                    return not (self._stopped or notified)
            with self._between_steps():
                if not self._update.in_progress:
                    self._leading.send({"do": "wait"})
