"""The server engine against a server that breaks its interface: handled, or one sentence; never silent."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hone.rollout.contract import RolloutError, Sampling, StopReason, TokenOutput
from hone.rollout.server import ServerRollout

from .contract_server import ContractServer
from .factories import server_engine
from .models import policy, prompts, trainer_log_probs

PROMPT = prompts(1, 7, 7, seed=9)[0]
SHORT = Sampling(max_tokens=24, temperature=1.0, seed=1, ignore_eos=True)


@pytest.fixture
def servers() -> Iterator[list[ContractServer]]:
    """Servers that a test starts; they are closed after it."""
    started: list[ContractServer] = []
    yield started
    for server in started:
        server.close()


@asynccontextmanager
async def opened(
    servers: list[ContractServer], count: int = 1, *, call_s: float = 30.0, **options: Any
) -> AsyncIterator[ServerRollout]:
    traits = {k: options.pop(k) for k in ("deterministic", "incremental") if k in options}
    servers += [ContractServer(policy(), **traits) for _ in range(count)]
    engine = await asyncio.to_thread(server_engine, servers, call_s=call_s, **options)
    try:
        yield engine
    finally:
        await engine.close()


async def updated(engine: ServerRollout, version: int, seed: int = 1) -> None:
    await engine.pause(keep=True)
    await engine.begin_update()
    await engine.load(policy(seed=seed).lm.named_parameters())
    await engine.commit(version)
    await engine.resume()


HANDLED = [
    "500 at the start",
    "connection is reset",
    "stream ends early",
    "error in the stream",
    "json is truncated",
    "server aborts the request",
    "an event comes twice",
    "stream stalls",
    "the first token comes too late",
    "abort is ignored",
]
REPORTED = {
    "count is wrong": "counts",
    "log-probs are missing": "without output_ids, completion_tokens or output_token_logprobs",
    "log-prob is nan": "nan as log-prob",
    "log-prob is positive": "1.5 as log-prob",
    "a log-prob is null": "None as log-prob",
    "another request is answered": "in the stream of",
    "ids differ from log-probs": "their ids differ",
    "id is outside the vocabulary": "token id 1000000",
    "finish reason is wrong": "the last is no end token",
    "finish reason is unknown": "ended a request for",
    "meta is missing": "without meta_info",
}


@pytest.mark.parametrize("fault", HANDLED)
def test_a_fault_of_the_connection_loses_no_token(
    fault: str, servers: list[ContractServer]
) -> None:
    async def asked() -> tuple[TokenOutput, TokenOutput, list[int]]:
        async with opened(servers, call_s=0.4) as engine:
            whole = await engine.generate(PROMPT, SHORT, "whole")
            servers[0].faults[fault] = 1
            streamed: list[int] = []
            again = await engine.generate(
                PROMPT, SHORT, "again", on_tokens=lambda delta: streamed.extend(delta.token_ids)
            )
            if fault == "abort is ignored":
                await engine.abort()
            else:
                assert servers[0].faults[fault] == 0, "the fault did not happen"
            return whole, again, streamed

    whole, again, streamed = asyncio.run(asked())
    assert again.token_ids == streamed == whole.token_ids
    assert again.log_probs == pytest.approx(whole.log_probs, abs=1e-4)
    assert again.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize(("fault", "words"), REPORTED.items())
def test_a_false_event_fails_its_request_in_one_sentence(
    fault: str, words: str, servers: list[ContractServer]
) -> None:
    async def asked() -> None:
        async with opened(servers) as engine:
            servers[0].faults[fault] = 1
            with pytest.raises(RolloutError, match=words):
                await engine.generate(PROMPT, SHORT, "wrong")
            assert servers[0].faults[fault] == 0
            assert len(await engine.generate(PROMPT, SHORT, "after")) == SHORT.max_tokens

    asyncio.run(asked())


def test_tokens_after_the_end_are_dropped(servers: list[ContractServer]) -> None:
    async def asked() -> None:
        async with opened(servers) as engine:
            servers[0].faults["tokens come after the end"] = 100
            four = Sampling(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
            out = await engine.generate(PROMPT, four, "four")
            assert len(out) == 4
            assert out.stop_reason is StopReason.LENGTH

    asyncio.run(asked())


def test_events_with_all_tokens_so_far_are_understood(servers: list[ContractServer]) -> None:
    async def asked() -> None:
        async with opened(servers, incremental=False) as engine:
            out = await engine.generate(PROMPT, SHORT, "all so far")
            assert len(out) == SHORT.max_tokens
            expected = trainer_log_probs(policy(), PROMPT, out.token_ids, 1.0)
            assert out.log_probs == pytest.approx(expected, abs=1e-4)
            servers[0].faults["sent tokens change"] = 1
            with pytest.raises(RolloutError, match="changed tokens that it had sent"):
                await engine.generate(PROMPT, SHORT, "changes")

    asyncio.run(asked())


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("update fails", "no space left"),
        ("update does not succeed", "3 of 12 tensors"),
        ("version stays old", "acknowledged weights .* but has 'default'"),
        ("weights are applied in part", "was applied in part"),
        ("pause is not acknowledged", "not acknowledged"),
    ],
)
@pytest.mark.parametrize("direct", [False, True], ids=["disk", "tensor"])
def test_a_refused_update_leaves_no_doubt(
    fault: str, words: str, direct: bool, servers: list[ContractServer]
) -> None:
    """The version stays, no token is drawn from half an update, and the next update is taken."""

    async def asked() -> None:
        async with opened(servers, direct=direct) as engine:
            servers[0].faults[fault] = 1
            with pytest.raises(RolloutError, match=words):
                await updated(engine, 1)
            assert engine.version == 0
            await updated(engine, 2)
            out = await engine.generate(PROMPT, SHORT, "new")
            assert out.versions == [2] * SHORT.max_tokens
            expected = trainer_log_probs(policy(seed=1), PROMPT, out.token_ids, 1.0)
            assert out.log_probs == pytest.approx(expected, abs=1e-4)

    asyncio.run(asked())


def test_a_refused_flush_fails_the_update(servers: list[ContractServer]) -> None:
    """Otherwise tokens would attend to keys of the old weights."""

    async def asked() -> None:
        async with opened(servers, direct=True) as engine:
            servers[0].faults["flush is refused"] = 1
            with pytest.raises(RolloutError, match=r"flush_cache.* answered 400"):
                await updated(engine, 1)

    asyncio.run(asked())


def test_an_old_version_in_an_answer_is_repaired_or_reported(
    servers: list[ContractServer],
) -> None:
    async def asked() -> None:
        async with opened(servers) as engine:
            await updated(engine, 1)
            servers[0].faults["version is old"] = 1
            out = await engine.generate(PROMPT, SHORT, "once")
            expected = trainer_log_probs(policy(seed=1), PROMPT, out.token_ids, 1.0)
            assert out.log_probs == pytest.approx(expected, abs=1e-4)
            servers[0].faults["version is old"] = 10**6
            with pytest.raises(RolloutError, match="has weights 'default' instead of"):
                await engine.generate(PROMPT, SHORT, "always")

    asyncio.run(asked())


@pytest.mark.parametrize("direct", [False, True], ids=["disk", "tensor"])
def test_a_server_that_dies_and_returns_gets_its_weights_again(
    direct: bool, servers: list[ContractServer]
) -> None:
    async def asked() -> None:
        async with opened(servers, direct=direct) as engine:
            await updated(engine, 1)
            long = Sampling(max_tokens=150, temperature=1.0, seed=1, ignore_eos=True)
            whole = await engine.generate(PROMPT, long, "whole")
            some = asyncio.Event()
            job = asyncio.create_task(
                engine.generate(PROMPT, long, "job", on_tokens=lambda delta: some.set())
            )
            for _ in range(3):
                some.clear()
                await some.wait()
                servers[0].die()
                await asyncio.sleep(0.05)
                await asyncio.to_thread(servers[0].come_back)
            out = await job
            assert out.token_ids == whole.token_ids
            assert out.log_probs == pytest.approx(whole.log_probs, abs=1e-4)
            assert out.versions == [1] * 150

    asyncio.run(asked())


def test_a_server_that_dies_in_an_update_is_updated_when_it_returns(
    servers: list[ContractServer],
) -> None:
    async def asked() -> None:
        async with opened(servers) as engine:
            servers[0].faults["dies in an update"] = 1
            update = asyncio.create_task(updated(engine, 1))
            while not servers[0].dead:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(servers[0].come_back)
            await update
            out = await engine.generate(PROMPT, SHORT, "new")
            expected = trainer_log_probs(policy(seed=1), PROMPT, out.token_ids, 1.0)
            assert out.log_probs == pytest.approx(expected, abs=1e-4)

    asyncio.run(asked())


def test_a_server_that_does_not_return_is_reported_at_the_deadline(
    servers: list[ContractServer],
) -> None:
    async def asked() -> None:
        async with opened(servers, call_s=0.3) as engine:
            for server in engine._servers:
                server.limits = type(server.limits)(start_s=0.5, call_s=0.3)
            servers[0].die()
            with pytest.raises(RolloutError, match=r"is not healthy after 0.5 s"):
                await engine.generate(PROMPT, SHORT, "lost")
            servers[0].dead = False

    asyncio.run(asked())


def test_a_healthy_server_that_cannot_generate_is_reported(servers: list[ContractServer]) -> None:
    async def asked() -> None:
        async with opened(servers) as engine:
            servers[0].faults["500 at the start"] = 10**6
            with pytest.raises(RolloutError, match=r"broke off 4 times.*500 to /generate"):
                await engine.generate(PROMPT, SHORT, "health lies")

    asyncio.run(asked())


def test_requests_of_a_prefix_and_a_trajectory_stay_on_one_server(
    servers: list[ContractServer],
) -> None:
    async def asked() -> None:
        async with opened(servers, 2) as engine:
            for group in prompts(4, 6, 9, seed=12):
                jobs = (engine.generate(group, SHORT, f"{group}-{i}") for i in range(4))
                await asyncio.gather(*jobs)
                later = [*group, 4, 5]  # the next turn of one of them
                await engine.generate(later, SHORT, f"{group}-0")
                holders = [
                    server
                    for server in servers
                    if any(body["input_ids"][: len(group)] == group for body in server.bodies)
                ]
                assert len(holders) == 1
            few = Sampling(4, 1.0, 0, ignore_eos=True)
            many = [engine.generate(p, few, f"{i}") for i, p in enumerate(prompts(40, 5, 9))]
            before = [len(server.bodies) for server in servers]
            await asyncio.gather(*many)
            shares = [len(s.bodies) - b for s, b in zip(servers, before, strict=True)]
            assert min(shares) >= 8, "the load is not spread"

    asyncio.run(asked())


def test_the_requests_of_a_lost_server_go_to_another(servers: list[ContractServer]) -> None:
    async def asked() -> None:
        async with opened(servers, 2) as engine:
            await updated(engine, 1)
            servers[0].die()
            jobs = [engine.generate(p, SHORT, f"{i}") for i, p in enumerate(prompts(8, 5, 9))]
            outputs = await asyncio.gather(*jobs)
            assert [len(out) for out in outputs] == [SHORT.max_tokens] * 8
            await asyncio.to_thread(servers[0].come_back)
            await updated(engine, 2, seed=0)
            assert servers[0].version == servers[1].version

    asyncio.run(asked())


def test_without_deterministic_inference_the_weaker_law_is_a_trait(
    servers: list[ContractServer],
) -> None:
    async def asked() -> None:
        async with opened(servers, deterministic=False) as engine:
            assert not engine.traits.seeded
            assert not engine.traits.positional
            await engine.generate(PROMPT, SHORT, "unseeded")
            assert "sampling_seed" not in servers[0].bodies[-1]["sampling_params"]

    asyncio.run(asked())


def test_sleep_frees_the_weights_and_waking_restores_them(servers: list[ContractServer]) -> None:
    async def asked() -> None:
        async with opened(servers) as engine:
            await engine.sleep()
            assert servers[0].released == {"kv_cache"}, "nothing could restore the weights"
            await engine.wake_up()
            await updated(engine, 1)
            before = await engine.generate(PROMPT, SHORT, "before")
            await engine.sleep()
            assert servers[0].released == {"kv_cache", "weights"}
            await engine.wake_up()
            after = await engine.generate(PROMPT, SHORT, "after")
            assert after.token_ids == before.token_ids
            await engine.sleep()
            await updated(engine, 2, seed=0)
            assert servers[0].released == {"kv_cache"}
            await engine.wake_up()
            out = await engine.generate(PROMPT, SHORT, "new")
            expected = trainer_log_probs(policy(), PROMPT, out.token_ids, 1.0)
            assert out.log_probs == pytest.approx(expected, abs=1e-4)

    asyncio.run(asked())


def test_an_incomplete_update_is_refused(servers: list[ContractServer]) -> None:
    async def asked() -> None:
        async with opened(servers) as engine:
            await engine.begin_update()
            await engine.load(list(copy.deepcopy(policy()).lm.named_parameters())[1:])
            with pytest.raises(RolloutError, match="lacks"):
                await engine.commit(1)

    asyncio.run(asked())


def test_the_api_key_comes_from_the_environment_and_is_never_shown(
    servers: list[ContractServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.rollout.http_server import Limits
    from hone.rollout.sglang_server import SGLangServer

    servers.append(ContractServer(policy(), api_key="s3cret"))
    monkeypatch.setenv("TEST_KEY", "s3cret")

    async def asked(variable: str) -> None:
        url = servers[0].url.replace("http://", "http://user:pass@")
        server = SGLangServer(url, Limits(5.0, 5.0), api_key_env=variable)
        try:
            assert "s3cret" not in repr(server)
            assert "pass" not in repr(server) + server.shown_url
            await server.connect()
        finally:
            await server.close()

    asyncio.run(asked("TEST_KEY"))
    monkeypatch.setenv("WRONG", "other")
    with pytest.raises(RolloutError, match="401") as caught:
        asyncio.run(asked("WRONG"))
    assert "other" not in str(caught.value)
    with pytest.raises(RolloutError, match="MISSING: this environment variable is not set"):
        asyncio.run(asked("MISSING"))
