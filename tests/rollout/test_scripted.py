"""The scripted engine returns its answers, keeps the rollout contract, and records every request."""

from __future__ import annotations

import asyncio

import pytest
import torch

from hone.rollout.contract import RolloutEngine, RolloutError, Sampling, StopReason
from hone.rollout.scripted import ScriptedAnswer, ScriptedRollout

from .engine_contract import ask, ask_all, play, update
from .models import EOS, TOKENIZER

FEW = Sampling(16, 1.0, 0)
ONE = torch.ones(1)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_it_is_an_engine() -> None:
    assert isinstance(ScriptedRollout([]), RolloutEngine)


def test_lines_are_said_in_the_order_of_the_requests_and_end_like_a_models() -> None:
    engine = ScriptedRollout(["abc", "de"], tokenizer=TOKENIZER)
    first, second = ask_all(engine, [[5], [6]], [FEW, FEW])
    assert first.token_ids == [*ids("abc"), EOS]
    assert second.token_ids == [*ids("de"), EOS]
    assert first.stop_reason is StopReason.STOP
    assert first.log_probs == [0.0] * 4


def test_a_function_answers_by_the_prompt() -> None:
    engine = ScriptedRollout(lambda prompt: prompt[::-1])
    assert ask(engine, [5, 6, 7], FEW).token_ids == [7, 6, 5]


def test_log_probs_can_be_scripted() -> None:
    engine = ScriptedRollout([ScriptedAnswer([5, 6], [-0.5, -1.5])])
    assert ask(engine, [4], FEW).log_probs == [-0.5, -1.5]
    with pytest.raises(ValueError, match="2 tokens but 1 log_probs"):
        ScriptedAnswer([5, 6], [-0.5])


def test_limits_and_stops_cut_a_line() -> None:
    engine = ScriptedRollout(lambda _: "abcdef", tokenizer=TOKENIZER)
    cut = ask(engine, [5], Sampling(2, 1.0, 0))
    assert (cut.token_ids, cut.stop_reason) == (ids("ab"), StopReason.LENGTH)
    stopped = ask(engine, [5], Sampling(9, 1.0, 0, stop=("cd",)))
    assert (stopped.token_ids, stopped.stop_reason) == (ids("abcd"), StopReason.STOP)


def test_requests_are_remembered_with_their_sampling() -> None:
    engine = ScriptedRollout(lambda _: [9])
    play(engine.generate([1, 2], Sampling(3, 0.5, seed=8), "mine"))
    (request,) = engine.requests
    assert (request.request_id, request.prompt_ids, request.token_ids) == ("mine", [1, 2], [9])
    assert request.sampling.seed == 8


def test_weights_are_remembered_by_name() -> None:
    engine = ScriptedRollout(lambda _: [9])
    play(update(engine, [("a.weight", ONE), ("b.weight", ONE)], 2))
    assert engine.loaded_names == ["a.weight", "b.weight"]
    assert ask(engine, [1], FEW).versions == [2]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ScriptedRollout([]), "the script has no answer"),
        (lambda: ScriptedRollout(["text"]), "with a tokenizer"),
    ],
)
def test_a_script_that_cannot_answer_says_so(build: object, words: str) -> None:
    with pytest.raises(RolloutError, match=words):
        ask(build(), [1], FEW)  # type: ignore[operator]


def test_asking_a_sleeping_engine_is_an_error_in_a_test() -> None:
    engine = ScriptedRollout(lambda _: [9])
    play(engine.sleep())
    with pytest.raises(RolloutError, match="the engine sleeps"):
        ask(engine, [1], FEW)
    play(engine.wake_up())
    assert ask(engine, [1], FEW).token_ids == [9]


def test_pause_and_resume_work_over_several_event_loops() -> None:
    engine = ScriptedRollout(lambda _: [9])
    for _ in range(2):
        play(engine.pause())

        async def held() -> list[int]:
            import asyncio

            job = asyncio.create_task(engine.generate([1], FEW, "x"))
            await asyncio.sleep(0.01)
            await engine.resume()
            return (await job).token_ids

        assert play(held()) == [9]


def test_a_script_that_exits_fails_its_request() -> None:
    """Otherwise asyncio would end the event loop of the engine, and the request would wait forever."""

    def script(prompt: list[int]) -> str:
        raise SystemExit(3)

    async def generate() -> None:
        engine = ScriptedRollout(script)
        with pytest.raises(RolloutError, match=r"the script raised SystemExit\(3\)"):
            await asyncio.wait_for(engine.generate([1], Sampling(2, 1.0, 0), "r"), 60)
        await engine.close()

    asyncio.run(generate())
