"""After new weights, no cache has old values; and closed event loops block nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hone.models.lora import AdapterSettings, adapter_weights, init_lora
from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutError, Sampling
from hone.rollout.native.core import NativeCore
from hone.rollout.native.decoder import ModuleDecoder
from hone.rollout.native.engine import NativeRollout
from hone.rollout.native.paged_core import PagedCore
from hone.rollout.requests import Request

from ..engine_contract import Factory, ask_all, drive, play, update
from ..factories import HFFactory, NativeFactory
from ..models import EOS, policy, prompts
from .paged import paged_core


def sampling(tokens: int = 20, seed: int = 0) -> Sampling:
    return Sampling(tokens, 1.0, seed, ignore_eos=True)


def scaled(model: PolicyModel) -> list[tuple[str, torch.Tensor]]:
    return [(name, p.detach() * 0.9) for name, p in model.lm.named_parameters()]


def test_a_refused_update_is_begun_again_and_leaves_no_keys_of_the_old_weights() -> None:
    core = paged_core(policy())
    engine = NativeRollout(core)
    prompt = prompts(1, 40, 40)[0]
    drive(engine, engine.generate(prompt, sampling(), "before"))
    new = scaled(core.policy)
    with pytest.raises(RolloutError, match="nope"):
        play(update(engine, [*new, ("nope", torch.zeros(1))], 1))
    with pytest.raises(RolloutError, match="half of the new weights"):
        play(engine.generate(prompt, sampling(), "too early"))
    play(update(engine, new, 1))
    output = drive(engine, engine.generate(prompt, sampling(), "after"))
    assert core.prefilled_tokens == 80
    assert set(output.versions) == {1}
    play(engine.close())
    fresh = NativeRollout(paged_core(core.policy))
    assert drive(fresh, fresh.generate(prompt, sampling(), "fresh")).token_ids == output.token_ids
    play(fresh.close())


def test_a_loop_that_closed_before_its_turn_holds_up_no_other_request() -> None:
    engine = NativeFactory().build(policy())
    closed_loop = asyncio.new_event_loop()

    async def ask_and_leave() -> asyncio.Task[Any]:
        task = closed_loop.create_task(engine.generate(prompts(1)[0], sampling(4), "left"))
        await asyncio.sleep(0)
        closed_loop.stop()
        return task

    task = closed_loop.run_until_complete(ask_and_leave())
    closed_loop.close()
    assert not task.done()
    task._log_destroy_pending = False  # type: ignore[attr-defined]

    async def ask() -> Any:
        return await asyncio.wait_for(engine.generate(prompts(1)[0], sampling(4), "next"), 60)

    assert len(drive(engine, ask()).token_ids) == 4
    play(engine.close())


def running_core(model: PolicyModel, forward: Callable[[PolicyModel], Any] | None) -> NativeCore:
    core = NativeCore(model, eos_ids=(EOS,), max_num_seqs=8, max_num_batched_tokens=256)
    if forward is not None:
        core._forward = forward(model)
    return core


def test_a_running_request_takes_new_weights_from_its_next_token() -> None:
    """The model's own modules cache nothing of the old weights, so their result is the reference."""
    requests = []
    for forward in (None, ModuleDecoder):
        core = running_core(policy(), forward)
        request = Request(prompts(1, 9, 9)[0], sampling(30), "r")
        core.add(request)
        for _ in range(10):
            core.step()
        play(update(NativeRollout(core), scaled(core.policy), 1))
        while core.busy:
            core.step()
        assert request.versions == [0] * 10 + [1] * 20
        requests.append(request)
    ours, expected = requests
    assert ours.token_ids == expected.token_ids
    assert ours.log_probs == pytest.approx(expected.log_probs, abs=1e-4)
    with_old_weights = Request(prompts(1, 9, 9)[0], sampling(30), "old weights")
    core = running_core(policy(), None)
    core.add(with_old_weights)
    while core.busy:
        core.step()
    assert with_old_weights.token_ids[:10] == ours.token_ids[:10]
    assert with_old_weights.log_probs[11:] != pytest.approx(ours.log_probs[11:], abs=1e-2)


@pytest.mark.parametrize("factory", [NativeFactory(), HFFactory()], ids=["native", "hf"])
def test_adapters_alone_are_loaded_over_the_base(factory: Factory) -> None:
    def adapted(seed: int) -> PolicyModel:
        model = policy()
        adapters = AdapterSettings(4, 8.0, 0.0, "all-linear", None, None)
        model.lm = init_lora(model.lm, adapters, seed)
        with torch.no_grad():
            for name, parameter in model.lm.named_parameters():
                if "lora_" in name:
                    parameter.normal_(generator=torch.Generator().manual_seed(seed), std=0.3)
        return model.eval()

    assert factory.engine_traits.loads_adapters
    rows, samplings = prompts(3, seed=2), [sampling(12, i) for i in range(3)]
    new = adapted(2)
    with factory.engine(adapted(1)) as engine:
        before = ask_all(engine, rows, samplings)
        play(update(engine, adapter_weights(new.lm), 1))
        after = ask_all(engine, rows, samplings)
    with factory.engine(new) as engine:
        expected = ask_all(engine, rows, samplings)
    assert [o.token_ids for o in after] == [o.token_ids for o in expected]
    assert [o.log_probs for o in after] == [o.log_probs for o in expected]
    assert [o.token_ids for o in before] != [o.token_ids for o in after]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    "build", [lambda: running_core(policy(), None), lambda: paged_core(policy())]
)
def test_stale_keys_stay_with_their_request_if_they_are_to_be_kept(
    build: Callable[[], NativeCore | PagedCore], keep: bool
) -> None:
    core, prompt = build(), prompts(1, 40, 40)[0]
    request = Request(prompt, sampling(200), "r")
    core.add(request)
    core.step()
    tokens = len(request.token_ids)
    play(update(NativeRollout(core, keep_stale_kv=keep), scaled(core.policy), 1))
    later = Request(prompt, sampling(20), "later")
    core.add(later)
    while core.busy:
        core.step()
    assert request.versions == [0] * tokens + [1] * (200 - tokens)
    assert not later.cached_tokens, "a later request attends to keys of old weights"
    assert core.prefilled_tokens == 40 + (0 if keep else 40 + tokens) + 40
    again = Request(prompt, sampling(20), "again")
    core.add(again)
    while core.busy:
        core.step()
    assert again.token_ids == later.token_ids
