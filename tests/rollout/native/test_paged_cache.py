"""Pages: sharing, releasing, finding prefixes again, and never losing or doubling one."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.rollout.native.paged_cache import SPARE_PAGE, PagedCache, PagePool


def test_the_spare_page_is_never_handed_out() -> None:
    pool = PagePool(8, 4)
    assert SPARE_PAGE not in pool.take(7)
    assert pool.available == 0


def test_a_shared_page_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = PagePool(4, 4)
    pages = pool.take(2)
    pool.hold(pages)
    pool.release(pages)
    assert pool.available == 1
    pool.release(pages)
    assert pool.available == 3


def test_a_known_prefix_is_found_in_whole_pages_and_never_whole() -> None:
    pool = PagePool(10, 4)
    tokens = list(range(12))
    pages = pool.take(3)
    pool.remember(tokens, pages)
    assert pool.find([*tokens, 99]) == pages
    assert pool.find(tokens) == pages[:2]  # its last token must be computed
    assert pool.find([*tokens[:8], 7, 7, 7, 7, 7]) == pages[:2]
    assert pool.find([5, *tokens]) == []


def test_the_same_tokens_behind_another_beginning_are_not_found() -> None:
    pool = PagePool(10, 2)
    pool.remember([1, 2, 3, 4], pool.take(2))
    assert pool.find([9, 9, 3, 4, 5]) == []


def test_an_ended_sequence_is_found_and_its_pages_are_free() -> None:
    pool = PagePool(4, 2)
    pages = pool.take(3)
    pool.release_known([1, 2, 3, 4, 5], pages)
    assert pool.available == 3
    assert pool.find([1, 2, 3, 4, 5, 6]) == pages[:2]
    assert sorted(pool.take(3)) == sorted(pages)


def test_an_ended_sequence_is_not_found_once_all_is_forgotten() -> None:
    pool = PagePool(4, 2)
    pages = pool.take(3)
    pool.release_known([1, 2, 3, 4, 5], pages)
    pool.forget_all()
    assert pool.find([1, 2, 3, 4, 5, 6]) == []
    assert sorted(pool.take(pool.available)) == sorted(pages)


def test_a_released_prefix_is_found_until_its_room_is_needed() -> None:
    pool = PagePool(4, 2)
    pages = pool.take(2)
    pool.remember([1, 2, 3, 4], pages)
    pool.release(pages)
    assert pool.available == 3
    assert pool.find([1, 2, 3, 4, 5]) == pages
    pool.take(2)  # one free page, then the idle one that was released last in its sequence
    assert pool.find([1, 2, 3, 4, 5]) == pages[:1]


def test_new_weights_make_every_prefix_unknown_but_keep_held_pages() -> None:
    pool = PagePool(6, 2)
    held, let_go = pool.take(1), pool.take(1)
    pool.remember([1, 2], held)
    pool.remember([3, 4], let_go)
    pool.release(let_go)
    pool.forget_all()
    assert pool.find([1, 2, 0]) == []
    assert pool.available == 4
    pool.release(held)
    assert pool.available == 5


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_no_page_is_lost_or_held_by_two_that_do_not_share(seed: int) -> None:
    chooser = random.Random(seed)
    pool = PagePool(12, 2)
    live: list[tuple[list[int], list[int]]] = []
    for _ in range(60):
        if live and chooser.random() < 0.45:
            tokens, pages = live.pop(chooser.randrange(len(live)))
            if chooser.random() < 0.7:
                pool.remember(tokens, pages)
            pool.release(pages)
        else:
            tokens = [chooser.randrange(2) for _ in range(chooser.randint(1, 8))]
            found = pool.find(tokens)
            pool.hold(found)
            need = -(-len(tokens) // 2) - len(found)
            if need > pool.available:
                pool.release(found)
                continue
            live.append((tokens, [*found, *pool.take(need)]))
        owned = [page for _, pages in live for page in pages]
        assert pool.available + len(set(owned)) == 11
        for page in set(owned):
            assert pool._references[page] == owned.count(page)
    for _, pages in live:
        pool.release(pages)
    assert pool.available == 11


def test_memory_comes_and_goes_and_its_address_is_known() -> None:
    cache = PagedCache(
        layers=2, kv_heads=1, head_dim=4, pages=3, page_size=2, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert cache.nbytes == 0
    cache.reserve()
    assert cache.nbytes == 2 * 2 * 3 * 1 * 2 * 4 * 4
    keys, values = cache.layer(1)
    at = (int(cache.base[0]) + 4 * cache.planes(1)[0], int(cache.base[0]) + 4 * cache.planes(1)[1])
    assert (keys.data_ptr(), values.data_ptr()) == at
    cache.free()
    assert (cache.nbytes, int(cache.base[0])) == (0, 0)


def test_copied_pages_are_equal_in_every_layer() -> None:
    cache = PagedCache(
        layers=2, kv_heads=1, head_dim=4, pages=5, page_size=2, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    cache.reserve()
    for layer in range(2):
        for part in cache.layer(layer):
            part.normal_()
    cache.copy_pages([1, 1], [3, 4])
    for layer in range(2):
        for part in cache.layer(layer):
            assert torch.equal(part[1], part[3])
            assert torch.equal(part[1], part[4])
            assert not torch.equal(part[1], part[2])
