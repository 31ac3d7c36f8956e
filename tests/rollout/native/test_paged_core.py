"""The paged core: shared prompts, prefix-cache hits, preemption and joined weights."""

from __future__ import annotations

import pytest
import torch

from hone.engine.offload import OffloadedTensors
from hone.rollout.contract import RolloutError
from hone.rollout.native.scheduler import BLOCK_SIZE, STEPS_PER_CHUNK, STEPS_PER_LONG_CHUNK

from ..models import policy, prompts
from .paged import ask, finish, paged_core


def test_a_group_computes_its_prompt_once_and_shares_its_full_blocks() -> None:
    core = paged_core(policy())
    prompt = prompts(1, 40, 40)[0]
    for i in range(6):
        core.add(ask(prompt, 40, seed=i))
    core.step()
    assert core.prefilled_tokens == 40
    tables = [row.blocks for row in core._scheduler.running]
    assert len({tuple(blocks[:2]) for blocks in tables}) == 1
    assert (
        len({blocks[2] for blocks in tables}) == 6
    )  # each sequence has a partial block of its own


def test_members_of_a_group_draw_as_they_would_alone() -> None:
    prompt = prompts(1, 37, 37)[0]
    together = finish(paged_core(policy()), [ask(prompt, seed=i) for i in range(5)])
    alone = [finish(paged_core(policy()), [ask(prompt, seed=i)])[0] for i in range(5)]
    assert together == alone
    assert len(set(map(tuple, together))) > 1


def test_a_later_turn_computes_only_what_is_new() -> None:
    core = paged_core(policy())
    first = ask(prompts(1, 40, 40)[0], 30)
    finish(core, [first])
    turn = [*first.prompt_ids, *first.token_ids, 5, 6, 7]
    before = core.prefilled_tokens
    again = ask(turn, 25, seed=3)
    finish(core, [again])
    known = (len(first.prompt_ids) + len(first.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert core.prefilled_tokens - before == len(turn) - known
    assert (first.output().cached_tokens, again.output().cached_tokens) == (0, known)
    assert again.token_ids == finish(paged_core(policy()), [ask(turn, 25, seed=3)])[0]


def test_without_prefix_caching_every_prompt_is_computed() -> None:
    core = paged_core(policy(), prefix_caching=False)
    prompt = prompts(1, 40, 40)[0]
    finish(core, [ask(prompt)])
    finish(core, [ask(prompt)])
    assert core.prefilled_tokens == 80


def test_new_weights_are_not_mixed_with_old_keys() -> None:
    core = paged_core(policy())
    prompt = prompts(1, 40, 40)[0]
    finish(core, [ask(prompt)])
    with torch.no_grad():
        for parameter in core.policy.parameters():
            parameter.mul_(0.9)
    core.invalidate()
    changed = finish(core, [ask(prompt)])
    other = policy()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    assert changed == finish(paged_core(other), [ask(prompt)])
    assert core.prefilled_tokens == 80


def test_a_sequence_that_saw_two_versions_is_not_remembered() -> None:
    core = paged_core(policy())
    request = ask(prompts(1, 40, 40)[0], 2 * STEPS_PER_CHUNK)
    core.add(request)
    core.step()
    core.invalidate()
    core.version = 1
    while core.busy:
        core.step()
    assert {0, 1} == set(request.versions)
    assert core.cache.pool.match_prefix([*request.prompt_ids, *request.token_ids]) == []


def test_too_few_blocks_preempt_the_newest_and_change_no_token() -> None:
    roomy, tight = paged_core(policy()), paged_core(policy(), blocks=26)
    plain, preempted = (
        [ask(p, 100, seed=i) for i, p in enumerate(prompts(8, 30, 40))] for _ in range(2)
    )
    assert finish(tight, preempted) == finish(roomy, plain)
    assert {request.output().num_preempted for request in plain} == {0}
    counts = [request.output().num_preempted or 0 for request in preempted]
    assert counts[0] == 0 < max(counts)
    assert tight.cache.pool.num_available == 25


def test_of_requests_that_arrive_together_the_longest_starts_first() -> None:
    core = paged_core(policy(), max_num_seqs=1)
    for seed, tokens in enumerate((2, 5, 2, 5, 9)):
        core.add(ask(prompts(1)[0], tokens, seed))
    finished = []
    while core.busy:
        finished += core.step()
    assert [(len(r.token_ids), r.sampling.seed) for r in finished] == [
        (9, 4), (5, 1), (5, 3), (2, 0), (2, 2)
    ]  # fmt: skip


def test_the_lowest_priority_starts_first_and_equals_in_order_of_arrival() -> None:
    core = paged_core(policy(), max_num_seqs=1)
    for seed, priority in enumerate((2, 0, 2, 0, -1)):  # the shortest is the last
        request = ask(prompts(1)[0], 9 - seed, seed)
        request.priority = priority
        core.add(request)
    finished = []
    while core.busy:
        finished += core.step()
    assert [r.sampling.seed for r in finished] == [4, 1, 3, 0, 2]


def test_the_order_of_arrival_changes_no_token_and_recomputes_no_shared_block() -> None:
    """Two groups of mixed lengths through three slots: their samples start at different times."""
    arguments = [(p, n) for p in prompts(2, 40, 40) for n in (9, 70, 33, 2, 50)]
    token_ids_by_run = []
    for order in (range(10), range(9, -1, -1)):
        core = paged_core(policy(), max_num_seqs=3)
        requests = {i: ask(*arguments[i], seed=i) for i in order}
        finish(core, list(requests.values()))
        token_ids_by_run.append([requests[i].token_ids for i in range(10)])
        assert core.prefilled_tokens <= 2 * 40 + 8 * (40 % BLOCK_SIZE)
    assert token_ids_by_run[0] == token_ids_by_run[1]


def test_a_prefill_that_fails_leaves_its_requests_to_be_aborted() -> None:
    core = paged_core(policy())
    core._forward = None  # so a prefill raises
    requests = [ask(p, seed=i) for i, p in enumerate(prompts(3))]
    for request in requests:
        core._scheduler.add(request)
    with pytest.raises(TypeError):
        core._prefill(core._scheduler.admit(1))
    assert core.abort() == requests
    assert core.cache.pool.num_available == core.cache.num_blocks - 1


def test_every_block_comes_back() -> None:
    core = paged_core(policy(), max_num_seqs=5)
    finish(core, [ask(p, 1 + i % 70, seed=i) for i, p in enumerate(prompts(23))])
    assert core.cache.pool.num_available == core.cache.num_blocks - 1


def test_aborting_gives_the_blocks_back() -> None:
    core = paged_core(policy())
    for i, prompt in enumerate(prompts(5)):
        core.add(ask(prompt, 100, seed=i))
    core.step()
    assert len(core.abort()) == 5
    assert core.cache.pool.num_available == core.cache.num_blocks - 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"max_model_len": 50}, "rollout.max_model_len"), ({"blocks": 4}, "gpu_memory_utilization")],
)
def test_what_can_never_fit_is_refused(options: dict[str, int], sentence: str) -> None:
    core = paged_core(policy(), **options)
    with pytest.raises(RolloutError, match=sentence):
        core.add(ask(prompts(1, 20, 20)[0], 60))


def test_the_parameters_stay_the_models_own_and_trainable() -> None:
    model = policy()
    names = [name for name, _ in model.named_parameters()]
    values = [p.detach().clone() for p in model.parameters()]
    core = paged_core(model)
    assert names == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True))
    attention = model.decoder.layers[0].self_attn  # type: ignore[index]
    attention.q_proj.weight.data.add_(1.0)
    joined = core._forward._layers[0].qkv[0]
    assert torch.equal(joined[: len(attention.q_proj.weight)], attention.q_proj.weight)
    assert attention.q_proj.weight.requires_grad


def test_moved_parameters_are_found_again() -> None:
    model = policy()
    core = paged_core(model)
    prompt = prompts(1, 20, 20)[0]
    expected = finish(core, [ask(prompt)])
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    core.invalidate()
    assert finish(core, [ask(prompt)]) == expected
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    core.invalidate()
    other = policy()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    assert finish(core, [ask(prompt)]) == finish(paged_core(other), [ask(prompt)]) != expected


def test_parameters_that_rested_on_the_host_are_found_again() -> None:
    """Joined weights are offloaded as one tensor; the CPU stands for the GPU."""
    model = policy()
    core = paged_core(model)
    prompt = prompts(1, 20, 20)[0]
    expected = finish(core, [ask(prompt)])
    offloaded = OffloadedTensors(model.parameters, device_types=("cpu",))
    offloaded.to_host()
    assert not any(p.untyped_storage().nbytes() for p in model.parameters())
    blockers = [torch.empty(1 << 16) for _ in range(8)]  # these may get the old addresses
    for _ in range(2):
        with offloaded.on_device():
            core.invalidate()
            assert finish(core, [ask(prompt)]) == expected
    del blockers


def test_chunks_follow_each_other_until_the_core_should_return_and_draw_the_same() -> None:
    arguments = list(zip(prompts(3, 20, 40), (200, 150, 190), strict=True))
    expected = finish(
        paged_core(policy()), [ask(p, n, seed=i) for i, (p, n) in enumerate(arguments)]
    )
    core = paged_core(policy())
    requests = [ask(p, n, seed=i) for i, (p, n) in enumerate(arguments)]
    for request in requests:
        core.add(request)
    looks = iter([False, True, *[False] * 9])
    assert core.step(lambda: next(looks)) == []
    assert [len(r.token_ids) for r in requests] == [STEPS_PER_CHUNK + STEPS_PER_LONG_CHUNK + 1] * 3
    assert core.step(lambda: next(looks)) == [
        requests[1]
    ]  # the step ends when a request has finished
    assert core.step(lambda: next(looks)) == [requests[0], requests[2]]
    assert not core.busy
    assert [r.token_ids for r in requests] == expected
    assert all(len(r.log_probs) == len(r.versions) == len(r.token_ids) for r in requests)


@pytest.mark.parametrize("reason", ["a stop string", "the caller left", "no blocks", "one waits"])
def test_chunks_do_not_follow_each_other_where_the_host_must_look(reason: str) -> None:
    more = {"no blocks": {"blocks": 20}, "one waits": {"max_num_seqs": 1}}.get(reason, {})
    core = paged_core(policy(), **more)
    stop = ("never written",) if reason == "a stop string" else ()
    request = ask(prompts(1, 20, 20)[0], 250, stop=stop)
    core.add(request)
    if reason == "one waits":
        core.add(ask(prompts(1, 20, 20)[0], 2, seed=1))
    request.cancelled = reason == "the caller left"
    core.step(lambda: False)
    assert len(request.token_ids) <= STEPS_PER_LONG_CHUNK + 1


def test_chunks_that_follow_each_other_draw_no_more_than_max_tokens() -> None:
    core = paged_core(policy())
    decode, steps = core._decode, list[int]()
    core._decode = lambda n: (steps.append(n), decode(n))[1]  # type: ignore[method-assign,func-returns-value]
    core.add(ask(prompts(1, 20, 20)[0], 120))
    core.step(lambda: False)
    assert not core.busy
    assert steps == [
        STEPS_PER_CHUNK,
        STEPS_PER_LONG_CHUNK,
        119 - STEPS_PER_CHUNK - STEPS_PER_LONG_CHUNK,
    ]
