"""The native engine of tensor-parallel ranks above 0, which execute the commands of rank 0."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from hone.rollout.contract import RolloutError, TokenOutput, Weights
from hone.rollout.native.engine import Core
from hone.rollout.native.peers import SHARDED_TRAITS, Command, Peers, Replica
from hone.rollout.requests import Request, RequestEngine
from hone.rollout.weights import load_weights

if TYPE_CHECKING:
    from hone.rollout.native.sharding import ShardedPolicy


class FollowerRollout(RequestEngine):
    """The engine of a rank above 0: `drive` executes commands until `release` or `close`.

    The worker of this rank calls only `begin_update`, `load` and `commit`; `begin_update` waits until rank 0
    has begun the same update. `drive`, in another thread, executes no command from then until `commit`.
    """

    name = "native"
    traits = SHARDED_TRAITS

    def __init__(self, core: Core, peers: Peers) -> None:
        super().__init__(core.rules)
        self._replica, self._peers = Replica(core), peers
        self._condition = threading.Condition()
        # Numbers of updates that rank 0 has announced, that this rank has begun, and that it has ended.
        self._updates_announced = self._updates_begun = self._updates_ended = 0
        self._update_error: str | None = None
        """Why rank 0 could not begin the announced update; None if it has begun it."""
        self._is_driven = False

    @property
    def version(self) -> int:
        return self._replica.core.version

    async def _decode_request(self, request: Request) -> TokenOutput:
        raise RolloutError(
            f"request {request.request_id} was sent to rank {self._peers.rank} of "
            f"{self._peers.size} tensor-parallel ranks; send requests to rank 0"
        )

    async def abort(self, request_ids: Collection[str] | None = None) -> None: ...

    async def pause(self, keep: bool = False) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake_up(self) -> None: ...

    async def begin_update(self) -> None:
        with self._condition:
            self._raise_if_stopped()
            while self._updates_announced == self._updates_begun:
                if self._is_driven and not self._update_pending:
                    self._wait_for_announcement()  # the thread in `drive` receives the commands
                else:
                    self._execute_all(self._receive())
            self._updates_begun += 1
            if self._update_error is not None:
                error, self._update_error = self._update_error, None
                self._updates_ended = self._updates_announced
                self._condition.notify_all()
                raise RolloutError(error)
            self._update.begin(0)

    async def load(self, weights: Weights) -> None:
        self._raise_if_stopped()
        policy = cast("ShardedPolicy", self._replica.core.policy)
        with self._update.loading():
            load_weights(policy, policy.shards(weights))

    async def commit(self, version: int) -> None:
        with self._condition:
            self._raise_if_stopped()
            self._update.commit()
            self._updates_ended = self._updates_announced
            self._condition.notify_all()

    async def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def drive(self, until: Callable[[], bool]) -> None:
        """Executes the commands of rank 0 until a command ends this call; `until` is ignored."""
        with self._condition:
            self._raise_if_stopped()
            self._is_driven = True
        try:
            while not self._stopped:
                commands = self._receive()
                with self._condition:
                    self._execute_all(commands)
                    if commands[-1]["do"] == "release":
                        return
                    self._condition.notify_all()
                    self._wait_for_update()
        finally:
            with self._condition:
                self._is_driven = False
                self._condition.notify_all()

    def notify(self) -> None: ...

    @property
    def _update_pending(self) -> bool:
        """Whether rank 0 has begun an update that this rank has not ended."""
        return self._updates_announced > self._updates_ended

    def _wait_for_announcement(self) -> None:
        timeout_s = self._peers.timeout_s
        if not self._condition.wait_for(
            lambda: self._stopped or not self._is_driven or self._update_pending, timeout_s
        ):
            raise RolloutError(f"rank 0 began no update within {timeout_s:g} s")
        self._raise_if_stopped()

    def _wait_for_update(self) -> None:
        """Waits until the worker of this rank has ended the update.

        The transfer of the weights may take one timeout, so this wait takes up to two timeouts.
        """
        timeout_s = 2 * self._peers.timeout_s
        if not self._condition.wait_for(
            lambda: self._stopped or not self._update_pending, timeout_s
        ):
            with self._close_group_on_error():
                raise RolloutError(
                    f"a weight update did not end on this rank within {timeout_s:g} s "
                    "(twice actor_rollout_ref.nccl_timeout)"
                )

    def _receive(self) -> list[Command]:
        with self._close_group_on_error():
            return self._peers.receive()

    def _execute_all(self, commands: Iterable[Command]) -> None:
        with self._close_group_on_error():
            for command in commands:
                if command["do"] == "update":
                    self._updates_announced += 1
                    self._update_error = command.get("refused")  # rank 0 could not begin it
                elif command["do"] == "close":
                    self._closed = True
                else:
                    self._replica.execute(command)

    @contextmanager
    def _close_group_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._failure is None and not self._closed:
                self._failure = cause = self._peers.fail(error)
                if cause is not error:
                    raise cause from error
            raise
