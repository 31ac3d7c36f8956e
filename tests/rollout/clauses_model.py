"""An engine that decodes with a policy returns the tokens and log-probs of this policy."""

from __future__ import annotations

import pytest
import torch

from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutError, Sampling

from .engine_contract import Factory, ask, ask_all, clause, play, update
from .models import hf_greedy, policy, prompts, trainer_log_probs

GREEDY = Sampling(max_tokens=20, temperature=0.0, seed=0)
TOLERANCE = 1e-5


def check_greedy(factory: Factory, model: PolicyModel) -> None:
    rows = prompts(6)
    with factory.engine(model) as engine:
        for prompt, out in zip(rows, ask_all(engine, rows, [GREEDY] * len(rows)), strict=True):
            assert out.token_ids == hf_greedy(model, prompt, GREEDY.max_tokens)


def check_log_probs(factory: Factory, model: PolicyModel) -> None:
    rows = prompts(6, seed=1)
    for temperature in (1.0, 0.7, 0.0):
        sampling = [Sampling(16, temperature, seed=i, ignore_eos=True) for i in range(len(rows))]
        with factory.engine(model) as engine:
            outputs = ask_all(engine, rows, sampling)
        for prompt, out in zip(rows, outputs, strict=True):
            expected = trainer_log_probs(model, prompt, out.token_ids, temperature or 1.0)
            worst = max(abs(a - b) for a, b in zip(out.log_probs, expected, strict=True))
            assert worst < TOLERANCE, f"off by {worst:.2g} at temperature {temperature}"


@clause("model")
def greedy_decoding_equals_transformers_generate(factory: Factory) -> None:
    check_greedy(factory, policy())


@clause("model")
def log_probs_are_the_trainers(factory: Factory) -> None:
    check_log_probs(factory, policy())


@clause("model", "untruncated_log_probs")
def log_probs_are_those_before_truncation(factory: Factory) -> None:
    model = policy()
    rows = prompts(6, seed=2)
    for cut in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.4}):
        sampling = [Sampling(8, 1.0, i, ignore_eos=True, **cut) for i in range(6)]  # type: ignore[arg-type]
        with factory.engine(model) as engine:
            outputs = ask_all(engine, rows, sampling)
        for prompt, out in zip(rows, outputs, strict=True):
            expected = trainer_log_probs(model, prompt, out.token_ids, 1.0)
            worst = max(abs(a - b) for a, b in zip(out.log_probs, expected, strict=True))
            assert worst < TOLERANCE, f"off by {worst:.2g} with {cut}"


@clause("model")
def new_weights_are_used_from_the_next_token(factory: Factory) -> None:
    """An updated engine returns the tokens of a new engine with the same weights."""
    old, new = policy(seed=0), policy(seed=1)
    rows = prompts(4, seed=3)
    sampling = [Sampling(12, 1.0, seed=i) for i in range(4)]
    with factory.engine(old) as engine:
        before = ask_all(engine, rows, sampling)
        play(update(engine, new.lm.named_parameters(), 3))
        after = ask_all(engine, rows, sampling)
    with factory.engine(new) as engine:
        fresh = ask_all(engine, rows, sampling)
    assert [o.token_ids for o in after] == [o.token_ids for o in fresh]
    assert [o.log_probs for o in after] == [o.log_probs for o in fresh]
    assert [o.token_ids for o in before] != [o.token_ids for o in after]


@clause("model")
def weights_with_unknown_names_are_refused(factory: Factory) -> None:
    with factory.engine(policy()) as engine:
        name, tensor = next(iter(policy().lm.named_parameters()))
        for wrong in ((f"{name}_x", tensor), (name, tensor[:1])):
            with pytest.raises(RolloutError, match=name):
                play(update(engine, [wrong], 1))
            with pytest.raises(RolloutError, match="the update has failed"):
                play(engine.commit(1))


@clause("model")
def the_policys_parameters_are_not_touched_by_generating(factory: Factory) -> None:
    model = policy()
    before = [p.detach().clone() for p in model.parameters()]
    with factory.engine(model) as engine:
        ask(engine, prompts(1)[0], GREEDY)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


@clause("model", "prefill")
def a_groups_prompt_is_computed_once(factory: Factory) -> None:
    prompt = prompts(1, 20, 20)[0]
    with factory.engine(policy()) as engine:
        outputs = ask_all(engine, [prompt] * 8, [Sampling(6, 1.0, seed=i) for i in range(8)])
        assert factory.prefilled_tokens(engine) == len(prompt)
    with factory.engine(policy()) as engine:
        alone = ask(engine, prompt, Sampling(6, 1.0, seed=5))
    assert outputs[5].token_ids == alone.token_ids
