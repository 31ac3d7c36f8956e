"""Routes requests to servers or engine processes by trajectory, prefix and load."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from hone.rollout.requests import Request

_PREFIX_TOKENS = 256
"""Requests with equal prefixes go to the same target; a prefix has at most this many prompt tokens."""
_MAX_IMBALANCE = 8
"""A target is overloaded if it has over this many more open requests than the least loaded target."""
_MAX_KEYS = 8192
"""Maximum number of trajectories and prefixes whose last target is stored."""


class Target(Protocol):
    """A server or engine process that decodes requests."""

    @property
    def num_open_requests(self) -> int: ...


T = TypeVar("T", bound=Target)


class Router(Generic[T]):
    """Routes a request to the target whose KV cache probably has the first tokens of the prompt."""

    def __init__(
        self, targets: Sequence[T], is_healthy: Callable[[T], bool] = lambda target: True
    ) -> None:
        self._targets, self._is_healthy = list(targets), is_healthy
        self._num_routed: Counter[int] = Counter()  # requests by id(target)
        self.target_by_key: OrderedDict[object, T] = OrderedDict()

    def route(self, request: Request) -> T:
        """Returns the target of a request.

        A request of a known trajectory goes to the trajectory's target. Else a request with a known prefix
        goes to the prefix's target, unless that target is overloaded. Else a request goes to the target with
        the fewest open requests, and among these to the target that has got the fewest requests so far.
        """
        healthy_targets = list(filter(self._is_healthy, self._targets)) or self._targets
        least_loaded = min(
            healthy_targets,
            key=lambda target: (target.num_open_requests, self._num_routed[id(target)]),
        )
        # All requests of a trajectory have the same id.
        trajectory, prefix = request.request_id, tuple(request.prompt_ids[:_PREFIX_TOKENS])
        target = self.target_by_key.get(trajectory)
        if target not in healthy_targets:
            target = self.target_by_key.get(prefix)
            if (
                target not in healthy_targets
                or target.num_open_requests > least_loaded.num_open_requests + _MAX_IMBALANCE
            ):
                target = least_loaded
        self._num_routed[id(target)] += 1
        for key in (trajectory, prefix):
            self.target_by_key[key] = target
            self.target_by_key.move_to_end(key)
        while len(self.target_by_key) > _MAX_KEYS:
            self.target_by_key.popitem(last=False)
        return target
