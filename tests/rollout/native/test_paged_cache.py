"""Blocks are shared, released and found by prefix, and no block is lost or allocated twice."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.rollout.native.core import SlotCache
from hone.rollout.native.paged_cache import NULL_BLOCK, BlockPool, PagedCache

CPU = torch.device("cpu")


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def test_the_spare_block_is_never_handed_out() -> None:
    pool = BlockPool(8, 4)
    assert NULL_BLOCK not in pool.allocate(7)
    assert pool.num_available == 0


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(2)
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.num_available == 1
    pool.release(blocks)
    assert pool.num_available == 3


def test_a_known_prefix_is_found_in_whole_blocks_and_never_whole() -> None:
    pool = BlockPool(10, 4)
    tokens = list(range(12))
    blocks = pool.allocate(3)
    pool.insert(tokens, blocks)
    assert pool.match_prefix([*tokens, 99]) == blocks
    assert pool.match_prefix(tokens) == blocks[:2]  # its last token must be computed
    assert pool.match_prefix([*tokens[:8], 7, 7, 7, 7, 7]) == blocks[:2]
    assert pool.match_prefix([5, *tokens]) == []


def test_the_same_tokens_behind_another_beginning_are_not_found() -> None:
    pool = BlockPool(10, 2)
    pool.insert([1, 2, 3, 4], pool.allocate(2))
    assert pool.match_prefix([9, 9, 3, 4, 5]) == []


def test_an_ended_sequence_is_found_and_its_blocks_are_free() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(3)
    pool.insert_and_release([1, 2, 3, 4, 5], blocks)
    assert pool.num_available == 3
    assert pool.match_prefix([1, 2, 3, 4, 5, 6]) == blocks[:2]
    assert sorted(pool.allocate(3)) == sorted(blocks)


def test_an_ended_sequence_is_not_found_once_all_is_forgotten() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(3)
    pool.insert_and_release([1, 2, 3, 4, 5], blocks)
    pool.clear_prefix_cache()
    assert pool.match_prefix([1, 2, 3, 4, 5, 6]) == []
    assert sorted(pool.allocate(pool.num_available)) == sorted(blocks)


def test_a_released_prefix_is_found_until_its_room_is_needed() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(2)
    pool.insert([1, 2, 3, 4], blocks)
    pool.release(blocks)
    assert pool.num_available == 3
    assert pool.match_prefix([1, 2, 3, 4, 5]) == blocks
    pool.allocate(2)  # one free block, then the idle one that was released last in its sequence
    assert pool.match_prefix([1, 2, 3, 4, 5]) == blocks[:1]


def test_new_weights_make_every_prefix_unknown_but_keep_held_blocks() -> None:
    pool = BlockPool(6, 2)
    held, let_go = pool.allocate(1), pool.allocate(1)
    pool.insert([1, 2], held)
    pool.insert([3, 4], let_go)
    pool.release(let_go)
    pool.clear_prefix_cache()
    assert pool.match_prefix([1, 2, 0]) == []
    assert pool.num_available == 4
    pool.release(held)
    assert pool.num_available == 5


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_no_block_is_lost_or_held_by_two_that_do_not_share(seed: int) -> None:
    chooser = random.Random(seed)
    pool = BlockPool(12, 2)
    live: list[tuple[list[int], list[int]]] = []
    for _ in range(60):
        if live and chooser.random() < 0.45:
            tokens, blocks = live.pop(chooser.randrange(len(live)))
            if chooser.random() < 0.7:
                pool.insert(tokens, blocks)
            pool.release(blocks)
        else:
            tokens = [chooser.randrange(2) for _ in range(chooser.randint(1, 8))]
            cached_blocks = pool.match_prefix(tokens)
            pool.acquire(cached_blocks)
            num_new_blocks = -(-len(tokens) // 2) - len(cached_blocks)
            if num_new_blocks > pool.num_available:
                pool.release(cached_blocks)
                continue
            live.append((tokens, [*cached_blocks, *pool.allocate(num_new_blocks)]))
        owned = [block for _, blocks in live for block in blocks]
        assert pool.num_available + len(set(owned)) == 11
        for block in set(owned):
            assert pool._reference_counts[block] == owned.count(block)
    for _, blocks in live:
        pool.release(blocks)
    assert pool.num_available == 11


def test_memory_comes_and_goes_and_its_address_is_known() -> None:
    cache = PagedCache(
        num_layers=2, kv_heads=1, head_dim=4, num_blocks=3, block_size=2, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert cache.nbytes == 0
    cache.reserve()
    assert cache.nbytes == 2 * 2 * 3 * 1 * 2 * 4 * 4
    keys, values = cache.layer(1)
    at = (
        int(cache.base_address[0]) + 4 * cache.kv_offsets(1)[0],
        int(cache.base_address[0]) + 4 * cache.kv_offsets(1)[1],
    )
    assert (keys.data_ptr(), values.data_ptr()) == at
    cache.free()
    assert (cache.nbytes, int(cache.base_address[0])) == (0, 0)


def test_copied_blocks_are_equal_in_every_layer() -> None:
    cache = PagedCache(
        num_layers=2, kv_heads=1, head_dim=4, num_blocks=5, block_size=2, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    cache.reserve()
    for layer in range(2):
        for part in cache.layer(layer):
            part.normal_()
    cache.copy_blocks([1, 1], [3, 4])
    for layer in range(2):
        for part in cache.layer(layer):
            assert torch.equal(part[1], part[3])
            assert torch.equal(part[1], part[4])
            assert not torch.equal(part[1], part[2])


def test_a_cache_takes_no_memory_before_keys_are_written() -> None:
    before = resident_mib()
    paged = PagedCache(
        num_layers=1, kv_heads=2, head_dim=64, num_blocks=4096, block_size=16,
        dtype=torch.bfloat16, device=CPU,
    )  # fmt: skip
    paged.reserve()
    slots = SlotCache(num_layers=1, num_slots=256)
    key = torch.ones(1, 2, 64)
    for length in (256, 400):
        slots.reserve(length, num_used_slots=1)
        for tensor in slots.layer(0, key):
            tensor[0, :, :200] = 1
    assert paged.nbytes + slots.nbytes > 100 * 2**20
    assert resident_mib() - before < 30
    assert all(bool((t[0, :, :200] == 1).all()) and not t[1:].any() for t in slots.layer(0, key))
