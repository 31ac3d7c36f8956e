"""Events that break SGLang's interface are handled, or raise an error with one sentence."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from hone.rollout.contract import RolloutError, Sampling, StopReason, TokenOutput

from .contract_server import ContractServer
from .factories import slow_motion
from .models import policy, trainer_log_probs
from .opened_servers import PROMPT, SHORT, open_engine

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
]
REPORTED = {
    "count is wrong": "counts",
    "log-probs are missing": "without output_ids, completion_tokens or output_token_logprobs",
    "log-prob is nan": "nan as log-prob",
    "log-prob is positive": "1.5 as log-prob",
    "a log-prob is null": "None as log-prob",
    "another request is answered": "in the stream of",
    "ids differ from log-probs": "the ids differ",
    "id is outside the vocabulary": "token id 1000000",
    "finish reason is wrong": "neither an end token nor a stop",
    "finish reason is unknown": "ended a request with the finish_reason",
    "meta is missing": "without meta_info",
}


@pytest.mark.parametrize("fault", HANDLED)
def test_a_fault_of_the_connection_loses_no_token(
    fault: str, servers: list[ContractServer]
) -> None:
    async def scenario() -> tuple[TokenOutput, TokenOutput, list[int]]:
        async with open_engine(servers) as engine:
            complete = await engine.generate(PROMPT, SHORT, "whole")
            servers[0].faults[fault] = 1
            if fault == "stream stalls":
                engine._servers[0].call_timeout_s = 0.4
            if fault == "the first token comes too late":  # its limit is that of a start
                engine._servers[0].start_timeout_s = 1.0
            streamed: list[int] = []
            again = await engine.generate(
                PROMPT, SHORT, "again", on_tokens=lambda delta: streamed.extend(delta.token_ids)
            )
            assert servers[0].faults[fault] == 0, "the fault did not happen"
            return complete, again, streamed

    complete, again, streamed = asyncio.run(scenario())
    assert again.token_ids == streamed == complete.token_ids
    assert again.log_probs == pytest.approx(complete.log_probs, abs=1e-4)
    assert again.stop_reason is StopReason.LENGTH


def test_a_request_ends_although_the_server_ignores_its_abort(
    servers: list[ContractServer],
) -> None:
    async def scenario() -> None:
        async with open_engine(servers) as engine:
            some = asyncio.Event()
            long = Sampling(max_tokens=300, temperature=1.0, seed=1, ignore_eos=True)
            with slow_motion():
                job = asyncio.create_task(
                    engine.generate(PROMPT, long, "long", on_tokens=lambda delta: some.set())
                )
                await some.wait()
                servers[0].faults["abort is ignored"] = 1
                await engine.abort()
                out = await job
            assert out.stop_reason is StopReason.ABORT
            assert servers[0].faults["abort is ignored"] == 0
            assert len(await engine.generate(PROMPT, SHORT, "after")) == SHORT.max_tokens

    asyncio.run(scenario())


def test_every_fault_of_the_contract_server_is_tried() -> None:
    here = Path(__file__).parent
    faults = {
        fault
        for file in ("contract_server.py", "contract_faults.py")
        for fault in re.findall(r'fails\("([^"]+)"\)', (here / file).read_text())
    }
    tests = "".join(file.read_text() for file in here.glob("test_*.py"))
    assert len(faults) > 30
    assert {fault for fault in faults if f'"{fault}"' not in tests} == set()


@pytest.mark.parametrize(("fault", "words"), REPORTED.items())
def test_a_false_event_fails_its_request_in_one_sentence(
    fault: str, words: str, servers: list[ContractServer]
) -> None:
    async def scenario() -> None:
        async with open_engine(servers) as engine:
            servers[0].faults[fault] = 1
            with pytest.raises(RolloutError, match=words):
                await engine.generate(PROMPT, SHORT, "wrong")
            assert servers[0].faults[fault] == 0
            assert len(await engine.generate(PROMPT, SHORT, "after")) == SHORT.max_tokens

    asyncio.run(scenario())


def test_tokens_after_the_end_are_dropped(servers: list[ContractServer]) -> None:
    async def scenario() -> None:
        async with open_engine(servers) as engine:
            four = Sampling(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
            expected = await engine.generate(PROMPT, four, "without the fault")
            servers[0].faults["tokens come after the end"] = 100
            out = await engine.generate(PROMPT, four, "four")
            assert out.token_ids == expected.token_ids
            assert servers[0].faults["tokens come after the end"] < 100
            assert out.stop_reason is StopReason.LENGTH

    asyncio.run(scenario())


def test_events_with_all_tokens_so_far_are_understood(servers: list[ContractServer]) -> None:
    async def scenario() -> None:
        async with open_engine(servers, incremental=False) as engine:
            out = await engine.generate(PROMPT, SHORT, "all so far")
            assert len(out) == SHORT.max_tokens
            expected = trainer_log_probs(policy(), PROMPT, out.token_ids, 1.0)
            assert out.log_probs == pytest.approx(expected, abs=1e-4)
            servers[0].faults["sent tokens change"] = 1
            with pytest.raises(RolloutError, match="changed tokens that it had sent"):
                await engine.generate(PROMPT, SHORT, "changes")

    asyncio.run(scenario())


def test_without_deterministic_inference_the_weaker_law_is_a_trait(
    servers: list[ContractServer],
) -> None:
    async def scenario() -> None:
        async with open_engine(servers, deterministic=False) as engine:
            assert not engine.traits.honors_seeds
            assert not engine.traits.samples_by_position
            await engine.generate(PROMPT, SHORT, "unseeded")
            assert "sampling_seed" not in servers[0].bodies[-1]["sampling_params"]

    asyncio.run(scenario())
