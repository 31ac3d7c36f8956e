"""Records routed experts by cache slot, so that tokens that hit the prefix cache have experts too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.models.attention import Layout
from hone.models.policy import PolicyModel
from hone.models.routing import EXPERT_DTYPE, Routing
from hone.ops.device import send
from hone.rollout.native.decoder import ModuleDecoder
from hone.rollout.native.paged_layouts import PagedDecode, PagedPrefill


class ExpertCache:
    """The routed experts of all slots of a paged cache: [blocks, block_size, layers, k]."""

    def __init__(
        self, routing: Routing, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self._block_size, self._device = block_size, device
        shape = (num_blocks, block_size, routing.layers, routing.top_k)
        self._memory = torch.zeros(shape, dtype=EXPERT_DTYPE, device=device)
        self._slots = self._memory.flatten(0, 1)

    def write(self, slots: Tensor, layer: int, experts: Tensor) -> None:
        self._slots[:, layer].index_copy_(0, slots.long(), experts.to(EXPERT_DTYPE))

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if sources:
            target = send(torch.tensor(targets), self._device)
            source = send(torch.tensor(sources), self._device)
            self._memory[target] = self._memory[source]

    def read(self, blocks: Sequence[int], num_tokens: int) -> Tensor:
        """Returns the experts [num_tokens, layers, k] of a sequence's first tokens, on the CPU."""
        num_blocks = -(-num_tokens // self._block_size)
        block_ids = send(torch.tensor(list(blocks[:num_blocks])), self._device)
        return self._memory[block_ids].flatten(0, 1)[:num_tokens].cpu()


class RecordingDecoder(ModuleDecoder):
    """Runs the policy's modules and writes the routed experts of every token to the cache."""

    def __init__(self, policy: PolicyModel, cache: ExpertCache) -> None:
        super().__init__(policy)
        self._cache = cache
        assert policy.routing is not None
        self._routing = policy.routing

    def __call__(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        assert isinstance(layout, PagedPrefill | PagedDecode)
        slots = layout.slots
        routing = self._routing
        routing.replay = None
        routing.record = lambda layer, experts: self._cache.write(slots, layer, experts)
        try:
            return super().__call__(ids, positions, layout)
        finally:
            routing.record = None
