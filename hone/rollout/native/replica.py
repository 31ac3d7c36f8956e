"""A core that executes the same commands as the cores of the other tensor-parallel ranks.

All ranks run the same sequences and sample the same tokens, because each change (a new request, a
step, an abort, a new weight version) is a command that all ranks execute in the same order.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable

from hone.rollout.contract import RolloutError, Sampling, Traits
from hone.rollout.native.engine import Core
from hone.rollout.native.peers import Command
from hone.rollout.native.sharded_policy import ShardedPolicy
from hone.rollout.requests import Request

SHARDED_TRAITS = Traits(uses_training_module=False)


class Replica:
    """A core, and the requests of the core by number."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.requests: dict[int, Request] = {}

    @property
    def policy(self) -> ShardedPolicy:
        assert isinstance(self.core.policy, ShardedPolicy)
        return self.core.policy

    def checksum(self) -> int:
        """Returns a checksum of each request's newest token, to compare between ranks."""
        tokens = (r.token_ids[-1] if r.token_ids else -1 for r in self.requests.values())
        return zlib.crc32(array("q", tokens).tobytes())

    def execute(self, command: Command) -> list[int]:
        """Executes a command and returns the numbers of the requests that have finished."""
        kind, core = command["do"], self.core
        if kind == "add":
            number, sampling = command["number"], Sampling(**command["sampling"])
            self.add(number, Request(command["prompt"], sampling, str(number)))
        elif kind == "step":
            return self._step(command["cancelled"], command["checksum"])
        elif kind == "abort":
            return self._remove(core.abort({str(number) for number in command["numbers"]}))
        elif kind == "free_cache":
            core.free_cache()
        elif kind == "invalidate":
            core.invalidate()
        elif kind == "version":
            core.version = command["version"]
        return []

    def add(self, number: int, request: Request) -> None:
        self.requests[number] = request
        self.core.add(request)

    def _step(self, cancelled: Iterable[int], checksum: int) -> list[int]:
        if checksum != self.checksum():
            raise RolloutError(
                "the tensor-parallel ranks have sampled different tokens; this is a defect"
            )
        for number in cancelled:
            self.requests[number].cancelled = True
        return self._remove(self.core.step(lambda: True))

    def _remove(self, requests: Iterable[Request]) -> list[int]:
        numbers = [int(request.request_id) for request in requests]
        for number in numbers:
            del self.requests[number]
        return numbers
