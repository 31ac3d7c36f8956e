"""Key-value memory in pages: who holds which page, and the tensor behind them.

Pages are counted references, so the sequences of a group share their prompt's full pages, and a prefix
that was computed once is found again by its tokens (a later turn, a later sample of the same prompt).
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from hone.ops.transfer import send
from hone.rollout.contract import RolloutError

SPARE_PAGE = 0
"""Belongs to no sequence: idle rows of a batch write here."""
_Key = tuple[int, bytes]
_ROOT = -1


class PagePool:
    """Hands out pages; keeps released ones findable by their tokens until the room is needed."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._free = list(range(pages - 1, SPARE_PAGE, -1))
        self._references = [0] * pages
        self._idle: OrderedDict[int, None] = OrderedDict()  # findable, held by no one; oldest first
        self._page_of: dict[_Key, int] = {}
        self._key_of: dict[int, _Key] = {}
        self._name_of: dict[
            int, int
        ] = {}  # a page's content has a number no other content ever had
        self._names = 0
        self._ended: list[tuple[Sequence[int], Sequence[int]]] = []  # see release_known

    @property
    def available(self) -> int:
        self._settle()
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """`count` pages of one reference each; the caller has checked `available`."""
        self._settle()
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._forget(page)
            self._references[page] = 1
            pages.append(page)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._references[page] += 1
            self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """One reference less each; the end of a sequence is forgotten before its beginning."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def release_known(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Release the pages of a sequence that ended, findable by its tokens.

        Done when somebody next asks: at the end of a rollout nobody does before all is forgotten.
        """
        self._ended.append((tokens, pages))

    def _settle(self) -> None:
        ended, self._ended = self._ended, []
        for tokens, pages in ended:
            self.remember(tokens, pages)
            self.release(pages)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Pages that hold the longest known prefix of `tokens`, in whole pages, and not all of it:
        the last token is always computed, because its hidden state is wanted."""
        self._settle()
        found: list[int] = []
        name = _ROOT
        for piece in self._pieces(tokens, (len(tokens) - 1) // self.page_size):
            page = self._page_of.get((name, piece))
            if page is None:
                break
            found.append(page)
            name = self._name_of[page]
        return found

    def remember(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Make the full pages of a computed sequence findable."""
        self._settle()
        name = _ROOT
        whole = min(len(tokens) // self.page_size, len(pages))
        for page, piece in zip(pages, self._pieces(tokens, whole), strict=False):
            key = (name, piece)
            known = self._page_of.get(key)
            if known is None:
                if page in self._key_of:  # findable as something else: it stays that
                    return
                self._page_of[key], self._key_of[page] = page, key
                self._names += 1
                self._name_of[page] = self._names
                known = page
            name = self._name_of[known]

    def forget_all(self) -> None:
        """No prefix is known any more: the weights, or the memory, have changed."""
        ended, self._ended = self._ended, []
        for _, pages in ended:
            self.release(pages)
        self._free += self._idle
        self._idle.clear()
        self._page_of.clear()
        self._key_of.clear()
        self._name_of.clear()

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
        del self._name_of[page]

    def _pieces(self, tokens: Sequence[int], count: int) -> list[bytes]:
        raw = array("i", tokens[: count * self.page_size]).tobytes()
        step = array("i").itemsize * self.page_size
        return [raw[i : i + step] for i in range(0, len(raw), step)]


class PagedCache:
    """The memory of all pages: [layers, 2, pages, KV, page_size, D], allocated on first use."""

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.pages, self.page_size = pages, page_size
        self._dtype, self._device = dtype, device
        self._memory: Tensor | None = None
        self.base = torch.zeros(1, dtype=torch.int64, device=device)
        """The memory's address, for kernels inside graphs that outlive the memory."""
        self.pool = PagePool(pages, page_size)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes if self._memory is not None else 0

    def free(self) -> None:
        """Give the memory back; what was cached is forgotten."""
        self._memory = None
        self.base.zero_()
        self.pool.forget_all()

    def reserve(self) -> None:
        """Have the memory."""
        if self._memory is not None:
            return
        shape = (self.layers, 2, self.pages, self.kv_heads, self.page_size, self.head_dim)
        try:
            # Zeros: a masked key has weight 0, and 0 times what lay there before could be NaN.
            self._memory = torch.zeros(shape, dtype=self._dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            raise RolloutError(
                f"no room for a key-value cache of {self.pages} pages; lower "
                "rollout.gpu_memory_utilization or rollout.max_num_seqs"
            ) from error
        self.base.fill_(self._memory.data_ptr())

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [pages, KV, page_size, D]."""
        assert self._memory is not None
        return self._memory[index, 0], self._memory[index, 1]

    def check(self, k: Tensor, v: Tensor) -> None:
        """Kernels go by the cache's shape alone: keys and values [N, KV, D] of another would be misread."""
        expected = (self.kv_heads, self.head_dim)
        if k.shape[1:] != expected or v.shape[1:] != expected:
            raise RolloutError(
                f"the model's keys are {tuple(k.shape[1:])} and values {tuple(v.shape[1:])} (heads, "
                f"width), but its config says {expected}; correct the model's config.json"
            )

    def planes(self, layer: int) -> tuple[int, int]:
        """Where a layer's keys and values begin, in elements from `base`."""
        plane = self.pages * self.kv_heads * self.page_size * self.head_dim
        return 2 * layer * plane, (2 * layer + 1) * plane

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Page contents of every layer: a shared partial page becomes one's own before it is written."""
        if not sources:
            return
        assert self._memory is not None
        source = send(torch.tensor(sources), self._device)
        target = send(torch.tensor(targets), self._device)
        self._memory[:, :, target] = self._memory[:, :, source]


def pages_for(*, wanted: int, bytes_per_page: int, share: float, device: torch.device) -> int:
    """`wanted` pages, or as many as the share of the device's memory holds."""
    if device.type != "cuda":  # the system gives memory when it is first written
        room = share * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(wanted, int(room) // bytes_per_page)
    free, total = torch.cuda.mem_get_info(device)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    room = min(share * total, 0.9 * (free + reusable))
    return min(wanted, int(room) // bytes_per_page)
