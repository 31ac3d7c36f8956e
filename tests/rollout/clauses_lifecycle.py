"""How requests begin, end and fail; what sleep and close do to them."""

from __future__ import annotations

import asyncio

import pytest

from hone.rollout.contract import (
    RolloutEngine,
    RolloutError,
    Sampling,
    StopReason,
    TokenOutput,
)

from .engine_contract import Factory, ask, ask_all, clause, driving, play
from .models import EOS, POSITIONS, TOKENIZER, VOCABULARY, policy, prompts

LONG = Sampling(max_tokens=900, temperature=1.0, seed=1, ignore_eos=True)
PROMPT = prompts(1, 7, 7, seed=9)[0]


def free_text(factory: Factory, tokens: int = 24, seed: int = 2) -> list[int]:
    """Returns the tokens of a request that nothing stops."""
    with factory.engine(policy()) as engine:
        return ask(engine, PROMPT, Sampling(tokens, 1.0, seed, ignore_eos=True)).token_ids


@clause()
def tokens_come_back_as_integers_with_one_log_prob_and_version_each(factory: Factory) -> None:
    with factory.engine(policy()) as engine:
        for out in ask_all(engine, prompts(3), [Sampling(9, 1.0, i) for i in range(3)]):
            assert isinstance(out, TokenOutput)
            assert all(type(t) is int and 0 <= t < VOCABULARY for t in out.token_ids)
            assert all(isinstance(x, float) and x <= 0 for x in out.log_probs)
            assert 1 <= len(out.token_ids) == len(out.log_probs) == len(out.versions)


@clause()
def the_prompt_is_not_echoed(factory: Factory) -> None:
    long = prompts(1, 40, 40)[0]
    with factory.engine(policy()) as engine:
        out = ask(engine, long, Sampling(6, 1.0, 0, ignore_eos=True))
    assert len(out.token_ids) == 6
    assert out.token_ids != long[:6]


@clause()
def max_tokens_ends_a_response_with_reason_length(factory: Factory) -> None:
    text = free_text(factory)
    with factory.engine(policy()) as engine:
        for n in (1, 2, 7):
            out = ask(engine, PROMPT, Sampling(n, 1.0, 2, ignore_eos=True))
            assert out.token_ids == text[:n]
            assert out.stop_reason is StopReason.LENGTH


@clause()
def a_stop_token_is_the_last_token(factory: Factory) -> None:
    text = free_text(factory)
    stop = next(t for i, t in enumerate(text) if i >= 3 and t != EOS)
    with factory.engine(policy()) as engine:
        sampling = Sampling(24, 1.0, 2, stop_token_ids=(stop,), ignore_eos=True)
        out = ask(engine, PROMPT, sampling)
    assert out.token_ids == text[: text.index(stop) + 1]
    assert out.stop_reason is StopReason.STOP


@clause()
def the_end_token_ends_a_response_unless_ignored(factory: Factory) -> None:
    """Finds a seed whose unstopped response has an end token; then the request stops at this token."""
    rows = prompts(16, 3, 12, seed=8)
    with factory.engine(policy()) as engine:
        free = ask_all(engine, rows, [Sampling(24, 1.0, i, ignore_eos=True) for i in range(16)])
        ended = ask_all(engine, rows, [Sampling(24, 1.0, i) for i in range(16)])
    indices = [i for i, out in enumerate(free) if EOS in out.token_ids[:-1]]
    assert indices, "no response had an end token to go past: ignore_eos did nothing"
    for i in indices:
        text = free[i].token_ids
        assert len(text) == 24
        assert ended[i].token_ids == text[: text.index(EOS) + 1]
        assert ended[i].stop_reason is StopReason.STOP


@clause()
def the_token_that_completes_a_stop_string_is_the_last(factory: Factory) -> None:
    """The stop string may span several tokens."""
    text = free_text(factory)
    begin = next(i for i in range(2, 20) if EOS not in text[i : i + 3])
    for length in (1, 3):
        stop = TOKENIZER.decode(text[begin : begin + length])
        prefixes = [TOKENIZER.decode(text[:n]) for n in range(1, len(text) + 1)]
        end = next(n for n, prefix in enumerate(prefixes, 1) if stop in prefix)
        with factory.engine(policy()) as engine:
            sampling = Sampling(24, 1.0, 2, stop=("never said!", stop), ignore_eos=True)
            out = ask(engine, PROMPT, sampling)
        assert out.token_ids == text[:end]
        assert out.stop_reason is StopReason.STOP


@clause("memory")
def sleep_gives_memory_back_and_waking_restores(factory: Factory) -> None:
    sampling = Sampling(8, 1.0, 3)
    with factory.engine(policy()) as engine:
        before = ask(engine, PROMPT, sampling)
        assert factory.held_bytes(engine) > 0
        play(engine.sleep())
        assert factory.held_bytes(engine) == 0
        play(engine.wake_up())
        assert ask(engine, PROMPT, sampling).token_ids == before.token_ids


@clause()
def a_cancelled_request_does_not_keep_an_engine_awake(factory: Factory) -> None:
    async def cancel_and_sleep(engine: RolloutEngine) -> None:
        job = asyncio.create_task(engine.generate(PROMPT, LONG, "cancelled"))
        await asyncio.sleep(0.01)
        job.cancel()
        await asyncio.wait([job])
        await engine.sleep()
        await engine.wake_up()

    with factory.engine(policy(), driven=False) as engine:
        play(cancel_and_sleep(engine))
        assert len(ask(engine, PROMPT, Sampling(3, 1.0, 0, ignore_eos=True))) == 3


@clause()
def a_wrong_request_fails_alone_with_a_sentence(factory: Factory) -> None:
    good, few = PROMPT, Sampling(4, 1.0, 0)
    wrong = [([], few, "empty prompt")]
    if "model" in factory.traits:
        wrong += [
            (PROMPT, Sampling(POSITIONS, 1.0, 0), f"{POSITIONS} positions"),
            ([5, VOCABULARY], few, f"token id {VOCABULARY}"),
        ]
    with factory.engine(policy()) as engine:

        async def mixed() -> list[TokenOutput | BaseException]:
            jobs = [engine.generate(good, few, "good-1")]
            jobs += [engine.generate(p, s, f"bad-{i}") for i, (p, s, _) in enumerate(wrong)]
            jobs += [engine.generate(good, few, "good-2")]
            return list(await asyncio.gather(*jobs, return_exceptions=True))

        first, *failed, last = play(mixed())
    assert isinstance(first, TokenOutput)
    assert isinstance(last, TokenOutput)
    assert first.token_ids == last.token_ids
    for i, (error, (_, _, words)) in enumerate(zip(failed, wrong, strict=True)):
        assert isinstance(error, RolloutError), f"expected a refusal about {words!r}, got {error}"
        assert words in str(error)
        assert f"bad-{i}" in str(error)


@clause()
def closing_leaves_nobody_waiting(factory: Factory) -> None:
    engine = factory.build(policy())

    async def closed_under() -> list[TokenOutput | BaseException]:
        with factory.slow_motion():
            jobs = [asyncio.create_task(engine.generate(PROMPT, LONG, f"c{i}")) for i in range(2)]
            await asyncio.sleep(0.02)
            await engine.close()
        jobs.append(asyncio.create_task(engine.generate(PROMPT, Sampling(2, 1.0, 0), "late")))
        return list(await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 60))

    with driving(engine):
        *running, late = play(closed_under())
    for out in running:
        ended = isinstance(out, TokenOutput) and out.stop_reason is StopReason.ABORT
        assert ended or isinstance(out, RolloutError)
    assert isinstance(late, RolloutError)
    assert "closed" in str(late)
    play(engine.close())


@clause("text_only")
def images_are_refused_by_engines_that_read_text(factory: Factory) -> None:
    with factory.engine(policy()) as engine:
        with pytest.raises(RolloutError, match="image"):
            play(
                engine.generate(
                    PROMPT, Sampling(2, 1.0, 0), "pic", multi_modal_data={"image": [object()]}
                )
            )
