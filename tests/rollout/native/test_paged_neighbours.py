"""The other requests of a batch, before or beside a request, change none of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hone.models.policy import PolicyModel
from hone.rollout.native.decoder import ModuleDecoder
from hone.rollout.native.exact_decoder import ExactDecoder
from hone.rollout.native.paged_core import PagedCore
from hone.rollout.requests import Request

from ..models import VOCABULARY, policy, prompts, trainer_log_probs
from .paged import ask, finish, paged_core


def fewer() -> list[Request]:
    """Five rows, run in a batch of eight: three rows only fill it up."""
    return [ask(p, 40, 1000 + i) for i, p in enumerate(prompts(5, 20, 60))]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_rows_that_ended_together_leave_no_trace_in_a_smaller_batch(prefix_caching: bool) -> None:
    core = paged_core(policy(), prefix_caching=prefix_caching)
    finish(core, [ask(p, 5 + 3 * i, i) for i, p in enumerate(prompts(8, 10, 40))])
    expected = finish(paged_core(policy()), fewer())
    assert finish(core, fewer()) == expected


def test_aborted_rows_leave_no_trace_in_a_smaller_batch() -> None:
    core = paged_core(policy())
    for i, prompt in enumerate(prompts(8, 10, 40)):
        core.add(ask(prompt, 400, i))
    core.step()
    assert len(core.abort()) == 8
    assert finish(core, fewer()) == finish(paged_core(policy()), fewer())


def test_a_second_turn_of_some_rows_stays_exact() -> None:
    model = policy()
    model.exact = ExactDecoder(model)
    core = paged_core(model, exact=model.exact)
    first = [ask(p, 20, i) for i, p in enumerate(prompts(8, 10, 40))]
    finish(core, first)
    second = [ask([*r.prompt_ids, *r.token_ids, 5, 6], 40, 50 + i) for i, r in enumerate(first[:5])]
    finish(core, second)
    for r in second:
        assert r.log_probs == trainer_log_probs(model, r.prompt_ids, r.token_ids, 1.0)


@pytest.mark.parametrize(
    "more", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 4, "top_p": 0.7}]
)
def test_what_a_neighbour_cuts_off_changes_no_plain_request(more: dict[str, Any]) -> None:
    plain = [ask(p, 30, i) for i, p in enumerate(prompts(4))]
    finish(paged_core(policy()), plain)
    mixed = [ask(p, 30, i) for i, p in enumerate(prompts(4))]
    finish(paged_core(policy()), [*mixed, ask(prompts(1)[0], 25, 77, **more)])
    assert [r.token_ids for r in mixed] == [r.token_ids for r in plain]
    assert [r.log_probs for r in mixed] == [r.log_probs for r in plain]


def test_a_cut_that_keeps_every_token_draws_what_no_cut_draws() -> None:
    plain = finish(paged_core(policy()), [ask(p, 30, i) for i, p in enumerate(prompts(3))])
    all_tokens_allowed = [ask(p, 30, i, top_k=VOCABULARY) for i, p in enumerate(prompts(3))]
    assert finish(paged_core(policy()), all_tokens_allowed) == plain


@pytest.mark.parametrize(("tokens", "steps"), [(1, 0), (2, 1), (40, 39)])
def test_the_token_that_a_prompt_draws_needs_no_decode_step(tokens: int, steps: int) -> None:
    core = paged_core(policy())
    steps_run: list[int] = []
    run = core._decode_step.run
    core._decode_step.run = lambda rows, *, sample: (
        steps_run.append(rows),
        run(rows, sample=sample),
    )[1]  # type: ignore
    (tokens_sampled,) = finish(core, [ask(prompts(1)[0], tokens, 0)])
    assert (len(tokens_sampled), len(steps_run)) == (tokens, steps)


def move(model: PolicyModel) -> list[torch.Tensor]:
    """Moves the parameters; keeps the old memory allocated, so that no other tensor gets these addresses."""
    old_memory = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return old_memory


def through_modules(model: PolicyModel) -> PagedCore:
    core = paged_core(model)
    core._forward = core._decode_step._forward = ModuleDecoder(model)
    return core


def exactly(model: PolicyModel) -> PagedCore:
    model.exact = ExactDecoder(model)
    return paged_core(model, exact=model.exact)


@pytest.mark.parametrize("build", [paged_core, through_modules, exactly])
@pytest.mark.parametrize("trained_between", [False, True])
def test_recorded_steps_are_dropped_when_parameters_move(
    build: Callable[[PolicyModel], PagedCore], trained_between: bool
) -> None:
    model = policy()
    core, forgotten = build(model), []
    finish(core, [ask(prompts(1)[0], 3, 0)])
    core._decode_step.discard_graphs = lambda: forgotten.append(1)  # type: ignore[method-assign]
    finish(core, [ask(prompts(1)[0], 3, 0)])
    assert forgotten == []
    old_memory = move(model)
    if trained_between:  # the trainer reads the moved parameters first
        trainer_log_probs(model, prompts(1)[0], [3, 4, 5], 1.0)
    finish(core, [ask(prompts(1)[0], 3, 0)])
    assert forgotten == [1]
    del old_memory
