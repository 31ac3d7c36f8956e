"""The scheduler without a model: order of waiting requests, shared blocks and preemption."""

from __future__ import annotations

from hone.rollout.contract import Sampling, StopReason
from hone.rollout.native.paged_cache import BlockPool
from hone.rollout.native.scheduler import BLOCK_SIZE, PagedRules, Scheduler
from hone.rollout.requests import Request

LONGEST = 400


def schedule(blocks: int = 200, max_num_seqs: int = 1) -> Scheduler:
    return Scheduler(
        BlockPool(blocks, BLOCK_SIZE),
        PagedRules(frozenset({1}), max_model_len=LONGEST, num_blocks=blocks),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=1000,
        prefix_caching=True,
    )


def ask(name: str, tokens: int, prompt: int = 40, priority: int = 0) -> Request:
    ids = [ord(letter) for letter in name[0]] * prompt
    return Request(ids, Sampling(tokens, 1.0, 0), name, priority)


def names(requests: list[Request]) -> list[str]:
    return [request.request_id for request in requests]


def running_names(line: Scheduler) -> list[str]:
    return names([row.request for row in line.running])


def drained(line: Scheduler) -> list[str]:
    """Admits and finishes all requests; returns them in the order in which they started."""
    started = []
    while line.busy:
        line.admit(1)
        started += running_names(line)
        for row in line.running:
            row.request.token_ids.append(7)
            row.request.stop_reason = StopReason.LENGTH
        line.remove_finished()
    return started


def test_of_requests_that_arrive_together_the_longest_starts_first() -> None:
    line = schedule()
    for name, tokens in {"a": 2, "b": 5, "c": 2, "d": 5, "e": 9}.items():
        line.add(ask(name, tokens))
    assert drained(line) == ["e", "b", "d", "a", "c"]


def test_one_that_arrives_later_waits_behind_shorter_ones() -> None:
    line = schedule()
    for name, tokens in {"a": 5, "b": 5, "c": 6}.items():
        line.add(ask(name, tokens))
        line.admit(1)
    assert drained(line) == ["a", "b", "c"]


def test_the_lowest_priority_starts_first_and_equals_in_order_of_arrival() -> None:
    line = schedule()
    for name, priority in {"a": 2, "b": 0, "c": 2, "d": 0, "e": -1}.items():
        line.add(ask(name, 5, priority=priority))
    assert drained(line) == ["e", "b", "d", "a", "c"]


def test_a_second_turn_of_an_old_group_overtakes_first_turns_that_wait() -> None:
    line = schedule()
    line.add(ask("a", 9, priority=1))
    line.admit(1)
    line.add(ask("b", 9, priority=2))
    line.add(ask("a", 4, priority=1))
    assert drained(line) == ["a", "a", "b"]


def test_a_group_stays_together_behind_an_older_one() -> None:
    line = schedule(max_num_seqs=4)
    for name in ("a1", "a2", "b1", "b2", "c1"):
        line.add(ask(name, 5, priority=0 if name == "c1" else 1))
    line.admit(1)
    assert running_names(line) == ["c1", "a1", "a2", "b1"]


def test_samples_of_a_group_hold_the_same_full_blocks() -> None:
    line = schedule(max_num_seqs=3)
    for name in ("a1", "a2", "a3"):
        line.add(ask(name, 5))
    tables = [row.blocks for row in line.admit(1)]
    assert len({tuple(blocks[:2]) for blocks in tables}) == 1
    assert len({blocks[2] for blocks in tables}) == 3


def test_samples_of_a_group_that_start_apart_find_the_same_full_blocks() -> None:
    line = schedule(max_num_seqs=2)
    for name, tokens in {"a1": 99, "b1": 50, "a2": 10}.items():
        line.add(ask(name, tokens))
    first, other = line.admit(1)
    for row in (first, other):
        line.insert_prefix(row, row.request.prompt_ids)
    other.request.stop_reason = StopReason.STOP
    line.remove_finished()
    [second] = line.admit(1)
    assert second.request.request_id == "a2"
    assert second.cached_tokens == 2 * BLOCK_SIZE
    assert second.blocks[:2] == first.blocks[:2]


def test_preempted_ones_go_first_in_their_old_order() -> None:
    line = schedule(blocks=18, max_num_seqs=3)  # three rows of 5 blocks at first, then one of 10
    requests = [ask(name, 150, prompt=5 * BLOCK_SIZE - 2) for name in ("a", "b", "c")]
    for request in requests:
        line.add(request)
    assert len(line.admit(1)) == 3
    for row in line.running:
        row.request.token_ids += [7] * 40
    line.extend_block_tables(40)
    assert running_names(line) == ["a"]
    assert [request.num_preempted for request in requests] == [0, 1, 1]
    line.add(ask("d", 230))
    assert drained(line) == ["a", "b", "c", "d"]


def test_the_request_that_would_start_last_is_preempted_first() -> None:
    line = schedule(blocks=18, max_num_seqs=3)
    prompt = 5 * BLOCK_SIZE - 2
    requests = [ask(n, 150, prompt, priority=p) for n, p in {"a": 3, "b": 1, "c": 2}.items()]
    for request in requests:  # each starts before the next arrives
        line.add(request)
        assert len(line.admit(1)) == 1
    for row in line.running:
        row.request.token_ids += [7] * 40
    line.extend_block_tables(40)
    assert running_names(line) == ["b"]
    line.add(ask("d", 5, priority=0))
    assert drained(line) == ["b", "d", "c", "a"]


def test_an_abort_gives_every_block_back() -> None:
    line = schedule(max_num_seqs=2)
    for name in ("a", "b", "c"):
        line.add(ask(name, 20))
    line.admit(1)
    assert names(line.abort()) == ["a", "b", "c"]
    assert not line.busy
    assert line._pool.num_available == 199
