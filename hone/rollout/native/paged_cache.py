"""The paged key-value cache: the block pool with its prefix cache, and the tensor of all blocks.

Blocks are reference-counted, so the sequences of a group share the full blocks of their prompt.
Full blocks are inserted into the prefix cache, keyed by tokens, for later turns and for later
requests with the same prompt.
"""

from __future__ import annotations

import math
import mmap
import os
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from hone.models.policy import PolicyModel
from hone.protocol.rows import to_device
from hone.rollout.contract import RolloutError

NULL_BLOCK = 0
"""The block that empty rows of a batch write to; it belongs to no sequence."""
_BlockKey = tuple[int, bytes]
"""The id of the preceding block's prefix-cache entry, and the tokens of this block."""
_ROOT_ENTRY = -1
"""The entry id that precedes the first block of a sequence."""


class BlockPool:
    """Allocates blocks; released blocks stay in the prefix cache until they are evicted."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._reference_counts = [0] * num_blocks
        self._evictable: OrderedDict[int, None] = OrderedDict()  # unreferenced, oldest first
        self._block_by_key: dict[_BlockKey, int] = {}
        self._key_by_block: dict[int, _BlockKey] = {}
        self._entry_by_block: dict[int, int] = {}  # the id of the block's entry in the prefix cache
        self._last_entry_id = 0
        self._deferred_releases: list[tuple[Sequence[int], Sequence[int]]] = []
        """The arguments of `insert_and_release` calls that are not executed yet."""

    @property
    def num_available(self) -> int:
        """The number of blocks that can be allocated."""
        self._run_deferred_releases()
        return len(self._free) + len(self._evictable)

    def allocate(self, count: int) -> list[int]:
        """Returns `count` blocks with one reference each; the caller must check `num_available`."""
        self._run_deferred_releases()
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._evictable.popitem(last=False)
                del self._block_by_key[self._key_by_block.pop(block)]
                del self._entry_by_block[block]
            self._reference_counts[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """Adds one reference to each block, so that none of them is evicted."""
        for block in blocks:
            self._reference_counts[block] += 1
            self._evictable.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference to each block; the last blocks of a sequence are evicted first."""
        for block in reversed(blocks):
            self._reference_counts[block] -= 1
            if self._reference_counts[block] == 0:
                if block in self._key_by_block:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def insert_and_release(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Inserts the blocks of a finished sequence into the prefix cache and releases them.

        The pool does both at its next call. If that call clears the prefix cache, as after a rollout,
        nothing is inserted.
        """
        self._deferred_releases.append((tokens, blocks))

    def _run_deferred_releases(self) -> None:
        deferred, self._deferred_releases = self._deferred_releases, []
        for tokens, blocks in deferred:
            self.insert(tokens, blocks)
            self.release(blocks)

    def match_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Returns the cached blocks of the longest prefix of `tokens`, without the last token.

        The last token is always computed, because sampling needs its hidden state.
        """
        self._run_deferred_releases()
        blocks: list[int] = []
        entry_id = _ROOT_ENTRY
        for block_tokens in self._split_into_blocks(tokens, (len(tokens) - 1) // self.block_size):
            block = self._block_by_key.get((entry_id, block_tokens))
            if block is None:
                break
            blocks.append(block)
            entry_id = self._entry_by_block[block]
        return blocks

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Inserts the full blocks of a computed sequence into the prefix cache."""
        self._run_deferred_releases()
        entry_id = _ROOT_ENTRY
        num_full_blocks = min(len(tokens) // self.block_size, len(blocks))
        for block, block_tokens in zip(
            blocks, self._split_into_blocks(tokens, num_full_blocks), strict=False
        ):
            key = (entry_id, block_tokens)
            cached = self._block_by_key.get(key)
            if cached is None:
                if block in self._key_by_block:  # already cached under another key
                    return
                self._block_by_key[key], self._key_by_block[block] = block, key
                self._last_entry_id += 1
                self._entry_by_block[block] = self._last_entry_id
                cached = block
            entry_id = self._entry_by_block[cached]

    def clear_prefix_cache(self) -> None:
        """Clears the prefix cache after the weights or the memory have changed."""
        deferred, self._deferred_releases = self._deferred_releases, []
        for _, blocks in deferred:
            self.release(blocks)
        self._free += self._evictable
        self._evictable.clear()
        self._block_by_key.clear()
        self._key_by_block.clear()
        self._entry_by_block.clear()

    def _split_into_blocks(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """Returns the tokens of each of the first `count` blocks, as bytes."""
        size = self.block_size
        return [array("i", tokens[i : i + size]).tobytes() for i in range(0, count * size, size)]


class PagedCache:
    """Stores all blocks: [layers, 2, blocks, KV, block_size, D], allocated on first use."""

    def __init__(
        self,
        *,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_layers, self.kv_heads, self.head_dim = num_layers, kv_heads, head_dim
        self.num_blocks, self.block_size = num_blocks, block_size
        self._dtype, self._device = dtype, device
        self._memory: Tensor | None = None
        self.base_address = torch.zeros(1, dtype=torch.int64, device=device)
        """The address of the memory, in device memory, where captured graphs read the current address."""
        self.pool = BlockPool(num_blocks, block_size)

    @staticmethod
    def for_policy(
        policy: PolicyModel,
        *,
        num_blocks: int | None,
        max_blocks: int,
        block_size: int,
        memory_fraction: float,
    ) -> PagedCache:
        """Returns a cache of `num_blocks` blocks; None means as many as fit, up to `max_blocks`."""
        text_config = policy.lm.config.get_text_config()
        weight = next(policy.parameters())
        kv_heads, head_dim = policy.key_shape
        num_layers = text_config.num_hidden_layers
        block_bytes = num_layers * 2 * kv_heads * block_size * head_dim * weight.itemsize
        if num_blocks is None:
            blocks_that_fit = int(_usable_bytes(memory_fraction, weight.device)) // block_bytes
            num_blocks = min(max_blocks, blocks_that_fit)
        return PagedCache(
            num_layers=num_layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=weight.dtype,
            device=weight.device,
        )

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes if self._memory is not None else 0

    def free(self) -> None:
        """Frees the memory and clears the prefix cache."""
        self._memory = None
        self.base_address.zero_()
        self.pool.clear_prefix_cache()

    def reserve(self) -> None:
        """Allocates the memory if it is not allocated."""
        if self._memory is not None:
            return
        shape = (self.num_layers, 2, self.num_blocks, self.kv_heads, self.block_size, self.head_dim)
        try:
            # Zeros, because a masked key has weight 0, and 0 times uninitialized memory may be NaN.
            self._memory = zeros(shape, self._dtype, self._device)
        except (torch.OutOfMemoryError, OSError) as error:
            raise RolloutError(
                f"out of memory for a key-value cache of {self.num_blocks} blocks; lower "
                "rollout.gpu_memory_utilization or rollout.max_num_seqs"
            ) from error
        self.base_address.fill_(self._memory.data_ptr())

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of one layer, each [blocks, KV, block_size, D]."""
        assert self._memory is not None
        return self._memory[index, 0], self._memory[index, 1]

    def gather(self, layer: int, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """Copies keys and values of block tables [R, W] to tensors [R, KV, W · block_size, D]."""
        rows, width = block_table.shape
        shape = (rows, self.kv_heads, width * self.block_size, self.head_dim)
        keys, values = self.layer(layer)
        blocks = block_table.long()
        return (
            keys[blocks].permute(0, 2, 1, 3, 4).reshape(shape),
            values[blocks].permute(0, 2, 1, 3, 4).reshape(shape),
        )

    def check_shape(self, k: Tensor, v: Tensor) -> None:
        """Raises if keys and values [N, KV, D] do not have the shape of the cache."""
        expected = (self.kv_heads, self.head_dim)
        if k.shape[1:] != expected or v.shape[1:] != expected:
            raise RolloutError(
                f"the model's keys have (heads, head_dim) {tuple(k.shape[1:])} and its values "
                f"{tuple(v.shape[1:])}, but its config says {expected}; correct its config.json"
            )

    def kv_offsets(self, layer: int) -> tuple[int, int]:
        """Returns the offsets of a layer's keys and values from `base_address`, in elements."""
        tensor_size = self.num_blocks * self.kv_heads * self.block_size * self.head_dim
        return 2 * layer * tensor_size, (2 * layer + 1) * tensor_size

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies blocks in every layer (copy-on-write of a shared partial block)."""
        if not sources:
            return
        assert self._memory is not None
        source = to_device(torch.tensor(sources), self._device)
        target = to_device(torch.tensor(targets), self._device)
        self._memory[:, :, target] = self._memory[:, :, source]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros; on a CPU, they take memory only once they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _usable_bytes(fraction: float, device: torch.device) -> float:
    if device.type != "cuda":  # `zeros` takes no memory yet, so free memory does not matter
        return fraction * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    unused_reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(fraction * total_bytes, 0.9 * (free_bytes + unused_reserved))
