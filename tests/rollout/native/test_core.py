"""The native core step by step: cases whose timing a test of the engine cannot control."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from hone.ops.attention import AttentionOptions
from hone.rollout.contract import Sampling, StopReason
from hone.rollout.native.core import DecodeLayout, JointLayout, NativeCore, PrefillLayout, SlotCache
from hone.rollout.requests import Request

from ..models import EOS, TOKENIZER, policy, prompts
from .attention import HEAD_DIM, KV_HEADS, OPTIONS, assert_close, qkv, reference


def core(max_num_seqs: int = 8, max_num_batched_tokens: int = 256) -> NativeCore:
    return NativeCore(
        policy(),
        eos_ids=(EOS,),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        tokenizer=TOKENIZER,
    )


def request(prompt: list[int], tokens: int = 6, seed: int = 0) -> Request:
    return Request(prompt, Sampling(tokens, 1.0, seed, ignore_eos=True), f"seed-{seed}")


def drain(engine: NativeCore) -> list[Request]:
    finished = []
    while engine.busy:
        finished += engine.step()
    return finished


def test_weights_that_change_midway_show_in_the_versions_of_tokens() -> None:
    engine, one = core(), request(prompts(1)[0])
    engine.add(one)
    for version in (0, 0, 3, 3, 5, 5):
        engine.version = version
        engine.step()
    assert one.versions == [0, 0, 3, 3, 5, 5]
    assert one.stop_reason is StopReason.LENGTH


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "count",
    [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)],
)
def test_log_probs_agree_to_the_last_bit_alone_and_in_any_batch(
    threads: Callable[[int], None], count: int
) -> None:
    """Stronger than the contract, which asks for tokens only; threads split the rows of a product."""
    threads(count)
    rows = prompts(14, 1, 40, seed=6)
    chooser = random.Random(0)
    lengths = [chooser.randint(1, 8) for _ in rows]
    together, alone = core(64), []
    batch = [request(p, n, i) for i, (p, n) in enumerate(zip(rows, lengths, strict=True))]
    for one in batch:
        together.add(one)
    drain(together)
    single = core(1)
    for i, (p, n) in enumerate(zip(rows, lengths, strict=True)):
        alone.append(request(p, n, i))
        single.add(alone[-1])
        drain(single)
    for a, b in zip(batch, alone, strict=True):
        assert a.token_ids == b.token_ids
        assert a.log_probs == b.log_probs


def test_a_prefill_takes_no_more_distinct_tokens_than_allowed() -> None:
    engine = core(max_num_seqs=8, max_num_batched_tokens=20)
    for i, prompt in enumerate([*prompts(4, 8, 8), prompts(1, 30, 30)[0]]):
        engine.add(request(prompt, 9, i))
    prefilled_tokens_by_step = []
    for _ in range(3):
        before = engine.prefilled_tokens
        engine.step()
        prefilled_tokens_by_step.append(engine.prefilled_tokens - before)
    assert prefilled_tokens_by_step == [16, 16, 30]


def test_slots_freed_by_finished_sequences_are_filled_at_once() -> None:
    engine = core(max_num_seqs=2)
    for i, (prompt, n) in enumerate(zip(prompts(6), (1, 5, 2, 2, 1, 1), strict=True)):
        engine.add(request(prompt, n, i))
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    assert steps == 6  # twelve tokens over two slots


def test_a_cancelled_request_leaves_at_its_next_token() -> None:
    engine, one = core(), request(prompts(1)[0], 500)
    engine.add(one)
    engine.step()
    one.cancelled = True
    assert engine.step() == [one]
    assert one.stop_reason is StopReason.ABORT
    assert not engine.busy


def test_an_abort_returns_running_and_waiting_requests() -> None:
    engine = core(max_num_seqs=1)
    two = [request(p, 50, i) for i, p in enumerate(prompts(2))]
    for one in two:
        engine.add(one)
    engine.step()
    assert engine.abort() == two
    assert [len(r.token_ids) for r in two] == [1, 0]
    assert not engine.busy


@pytest.mark.parametrize("slots", [1, 3])
def test_long_responses_outgrow_the_first_cache(slots: int) -> None:
    prompt = prompts(1, 5, 5)[0]
    engine, complete = core(slots), request(prompt, 150)
    engine.add(complete)
    drain(engine)
    short = core(slots)
    continuation = request(prompt + complete.token_ids[:100], 50)
    short.add(continuation)
    drain(short)
    assert continuation.token_ids == complete.token_ids[100:]


def test_parameters_changed_in_place_are_decoded_with_at_once() -> None:
    """Packed copies of the weights are made again."""
    engine, prompt = core(), [3, 5, 7, 9]
    other = policy(seed=1)
    engine.add(request(prompt))
    before = drain(engine)[0].token_ids
    with torch.no_grad():
        for mine, theirs in zip(engine.policy.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    engine.add(request(prompt))
    after = drain(engine)[0].token_ids
    fresh = core()
    fresh.policy.load_state_dict(other.state_dict())
    fresh.add(request(prompt))
    assert after == drain(fresh)[0].token_ids != before


def test_weights_forgotten_midway_are_read_again_by_running_sequences() -> None:
    engine, untouched, prompt = core(), core(), [3, 5, 7, 9]
    engine.add(request(prompt))
    engine.step()
    engine.invalidate()
    untouched.add(request(prompt))
    assert drain(engine)[0].log_probs == drain(untouched)[0].log_probs


def test_of_requests_that_arrive_together_the_longest_starts_first() -> None:
    engine = core(max_num_seqs=1)
    for seed, tokens in enumerate((2, 5, 2, 5, 9)):
        engine.add(request(prompts(1)[0], tokens, seed))
    assert [(len(r.token_ids), r.sampling.seed) for r in drain(engine)] == [
        (9, 4), (5, 1), (5, 3), (2, 0), (2, 2)
    ]  # fmt: skip


def test_the_lowest_priority_starts_first_and_equals_in_order_of_arrival() -> None:
    engine = core(max_num_seqs=1)
    for seed, priority in enumerate((2, 0, 2, 0, -1)):  # the shortest is the last
        one = request(prompts(1)[0], 9 - seed, seed)
        one.priority = priority
        engine.add(one)
    assert [r.sampling.seed for r in drain(engine)] == [4, 1, 3, 0, 2]


PLAIN = AttentionOptions(0, 0.3)
Prompt = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def prefilled(
    lengths: list[int], options: AttentionOptions
) -> tuple[SlotCache, list[Prompt], torch.Tensor]:
    """A cache with one prompt per slot, the prompts, and the attention of all prompt tokens."""
    cache = SlotCache(num_layers=1, num_slots=8)
    cache.reserve(max(lengths) + 1, 0)
    prompts = [qkv(length) for length in lengths]
    q, k, v = (torch.cat(parts) for parts in zip(*prompts, strict=True))
    layout = PrefillLayout(cache, list(range(len(lengths))), lengths)
    return cache, prompts, layout.attend(q, k, v, options)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", [[5, 17, 1], [6, 6]])
def test_prefill_attends_within_each_prompt(lengths: list[int], options: AttentionOptions) -> None:
    _, prompts, out = prefilled(lengths, options)
    assert_close(out, torch.cat([reference(*prompt, options) for prompt in prompts]))


@pytest.mark.parametrize("options", OPTIONS)
def test_a_decoded_token_attends_to_its_whole_slot(options: AttentionOptions) -> None:
    lengths = [5, 17, 1]
    cache, prompts, _ = prefilled(lengths, options)
    q, k, v = qkv(3)
    out = DecodeLayout(cache, torch.tensor(lengths)).attend(q, k, v, options)
    for row, (_, keys, values) in enumerate(prompts):
        keys, values = (
            torch.cat([old, new[row : row + 1]]) for old, new in ((keys, k), (values, v))
        )
        assert_close(out[row : row + 1], reference(q[row : row + 1], keys, values, options))


def test_a_joint_batch_is_its_parts_and_zeros_for_padding() -> None:
    cache, prompts, _ = prefilled([4, 9], PLAIN)
    q, k, v = qkv(2 + 3 + 1)  # two running sequences, a new prompt, one row of padding
    decode = DecodeLayout(cache, torch.tensor([4, 9]))
    out = JointLayout(decode, PrefillLayout(cache, [2], [3])).attend(q, k, v, PLAIN)
    for row, (_, keys, values) in enumerate(prompts):
        one = slice(row, row + 1)
        expected = reference(q[one], torch.cat([keys, k[one]]), torch.cat([values, v[one]]), PLAIN)
        assert_close(out[one], expected)
    assert_close(out[2:5], reference(q[2:5], k[2:5], v[2:5], PLAIN))
    assert torch.equal(out[5:], torch.zeros_like(out[5:]))


def test_growing_keeps_the_used_slots() -> None:
    cache, prompts, _ = prefilled([5, 7], PLAIN)
    before = cache.nbytes
    cache.reserve(200, num_used_slots=2)
    assert cache.nbytes > before
    keys, values = cache.layer(0, prompts[0][1])
    for slot, (_, k, v) in enumerate(prompts):
        assert torch.equal(keys[slot, :, : len(k)], k.transpose(0, 1))
        assert torch.equal(values[slot, :, : len(v)], v.transpose(0, 1))


def test_a_copied_slot_has_the_first_tokens_and_a_freed_cache_no_memory() -> None:
    cache, prompts, _ = prefilled([5, 7], PLAIN)
    cache.copy(1, 4, 6)
    keys, _ = cache.layer(0, prompts[0][1])
    assert keys.shape[1:] == (KV_HEADS, keys.shape[2], HEAD_DIM)
    assert torch.equal(keys[4, :, :6], keys[1, :, :6])
    assert not keys[4, :, 6:].any()
    cache.free()
    assert cache.nbytes == 0
