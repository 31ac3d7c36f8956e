"""The server engine: updates, restarts, routing and sleep, over servers that fail."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
from typing import Any

import numpy as np
import pytest
import torch

from hone.rollout.contract import RolloutError, Sampling, StopReason
from hone.rollout.sglang_server import SGLangServer

from .contract_server import ContractServer
from .factories import slow_motion
from .models import policy, prompts, trainer_log_probs
from .opened_servers import PROMPT, SHORT, open_engine, updated


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
@pytest.mark.parametrize("send_tensors", [False, True], ids=["disk", "tensor"])
def test_a_refused_update_leaves_no_doubt(
    fault: str, words: str, send_tensors: bool, servers: list[ContractServer]
) -> None:
    """The version stays, no token is sampled with half an update, and the next update succeeds."""

    async def scenario() -> None:
        async with open_engine(servers, send_tensors=send_tensors) as engine:
            servers[0].faults[fault] = 1
            with pytest.raises(RolloutError, match=words):
                await updated(engine, 1)
            assert engine.version == 0
            await updated(engine, 2)
            out = await engine.generate(PROMPT, SHORT, "new")
            assert out.versions == [2] * SHORT.max_tokens
            expected = trainer_log_probs(policy(seed=1), PROMPT, out.token_ids, 1.0)
            assert out.log_probs == pytest.approx(expected, abs=1e-4)

    asyncio.run(scenario())


def test_a_refused_flush_fails_the_update(servers: list[ContractServer]) -> None:
    """Otherwise tokens would attend to keys of the old weights."""

    async def scenario() -> None:
        async with open_engine(servers, send_tensors=True) as engine:
            servers[0].faults["flush is refused"] = 1
            with pytest.raises(RolloutError, match=r"flush_cache.* answered 400"):
                await updated(engine, 1)

    asyncio.run(scenario())


def test_an_old_version_in_an_answer_is_repaired_or_reported(
    servers: list[ContractServer],
) -> None:
    async def scenario() -> None:
        async with open_engine(servers) as engine:
            await updated(engine, 1)
            servers[0].faults["version is old"] = 1
            out = await engine.generate(PROMPT, SHORT, "once")
            expected = trainer_log_probs(policy(seed=1), PROMPT, out.token_ids, 1.0)
            assert out.log_probs == pytest.approx(expected, abs=1e-4)
            servers[0].faults["version is old"] = 10**6
            with pytest.raises(RolloutError, match="has weights 'default' instead of"):
                await engine.generate(PROMPT, SHORT, "always")

    asyncio.run(scenario())


@pytest.mark.parametrize("send_tensors", [False, True], ids=["disk", "tensor"])
def test_a_server_that_dies_and_returns_gets_its_weights_again(
    send_tensors: bool, servers: list[ContractServer]
) -> None:
    async def scenario() -> None:
        async with open_engine(servers, send_tensors=send_tensors) as engine:
            await updated(engine, 1)
            long = Sampling(max_tokens=150, temperature=1.0, seed=1, ignore_eos=True)
            complete = await engine.generate(PROMPT, long, "whole")
            some = asyncio.Event()
            job = asyncio.create_task(
                engine.generate(PROMPT, long, "job", on_tokens=lambda delta: some.set())
            )
            for deaths in range(3):
                with slow_motion():
                    if deaths:
                        await asyncio.to_thread(servers[0].come_back)
                    some.clear()
                    await some.wait()
                    servers[0].die()
                await asyncio.sleep(0.05)
            await asyncio.to_thread(servers[0].come_back)
            out = await job
            assert out.token_ids == complete.token_ids
            assert out.log_probs == pytest.approx(complete.log_probs, abs=1e-4)
            assert out.versions == [1] * 150

    asyncio.run(scenario())


def test_a_server_that_dies_in_an_update_is_updated_when_it_returns(
    servers: list[ContractServer],
) -> None:
    async def scenario() -> None:
        async with open_engine(servers) as engine:
            servers[0].faults["dies in an update"] = 1
            update = asyncio.create_task(updated(engine, 1))
            while not servers[0].dead:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(servers[0].come_back)
            await update
            out = await engine.generate(PROMPT, SHORT, "new")
            expected = trainer_log_probs(policy(seed=1), PROMPT, out.token_ids, 1.0)
            assert out.log_probs == pytest.approx(expected, abs=1e-4)

    asyncio.run(scenario())


@pytest.mark.parametrize("verb", ["pause", "load", "generate"])
def test_a_server_that_is_unavailable_for_a_moment_is_asked_again(
    verb: str, servers: list[ContractServer]
) -> None:
    async def scenario() -> None:
        async with open_engine(servers, send_tensors=True) as engine:
            await engine.pause()
            await engine.begin_update()
            if verb == "load":
                servers[0].faults["503 at a call"] = 1
            await engine.load(policy(seed=1).lm.named_parameters())
            await engine.commit(1)
            await engine.resume()
            if verb != "load":
                servers[0].faults["503 at a call"] = 1
            if verb == "pause":
                await engine.pause()
                await engine.resume()
            assert len(await engine.generate(PROMPT, SHORT, "one")) == SHORT.max_tokens

    asyncio.run(scenario())


def test_a_server_that_does_not_return_is_named_once_while_another_serves(
    servers: list[ContractServer], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with open_engine(servers, 2) as engine:
            engine._servers[0].start_timeout_s = 0.3
            servers[0].die()
            before, after = prompts(4, 5, 9), prompts(4, 5, 9, seed=1)
            for prompt in before:
                assert len(await engine.generate(prompt, SHORT, f"{prompt}")) == SHORT.max_tokens
            while not warnings():
                await asyncio.sleep(0.01)
            for prompt in after:
                assert len(await engine.generate(prompt, SHORT, f"{prompt}")) == SHORT.max_tokens
            gc.collect()

    def warnings() -> list[logging.LogRecord]:
        return [r for r in caplog.records if r.levelno >= logging.WARNING]

    asyncio.run(scenario())
    assert not [r for r in warnings() if "never retrieved" in r.getMessage()]
    messages = [r.getMessage() for r in warnings() if r.name.startswith("hone.")]
    assert len(messages) == 1, messages
    assert "is not healthy after 0.3 s" in messages[0]
    assert "until the next update" in messages[0]


def test_requests_of_a_prefix_and_a_trajectory_stay_on_one_server(
    servers: list[ContractServer],
) -> None:
    async def scenario() -> None:
        async with open_engine(servers, 2) as engine:
            for group in prompts(4, 6, 9, seed=12):
                await asyncio.gather(
                    *(engine.generate(group, SHORT, f"{group}-{i}") for i in range(4))
                )
                later = [*group, 4, 5]  # the next turn of one trajectory
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
            with slow_motion():
                jobs = [asyncio.create_task(request) for request in many]
                while sum(server.num_open_requests for server in engine._servers) < len(jobs):
                    await asyncio.sleep(0.001)
            await asyncio.gather(*jobs)
            shares = [len(s.bodies) - b for s, b in zip(servers, before, strict=True)]
            assert min(shares) >= 8, "the load is not spread"

    asyncio.run(scenario())


def test_the_requests_of_a_lost_server_go_to_another(servers: list[ContractServer]) -> None:
    async def scenario() -> None:
        async with open_engine(servers, 2) as engine:
            await updated(engine, 1)
            servers[0].die()
            jobs = [engine.generate(p, SHORT, f"{i}") for i, p in enumerate(prompts(8, 5, 9))]
            outputs = await asyncio.gather(*jobs)
            assert [len(out) for out in outputs] == [SHORT.max_tokens] * 8
            await asyncio.to_thread(servers[0].come_back)
            await updated(engine, 2, seed=0)
            assert servers[0].version == servers[1].version

    asyncio.run(scenario())


def test_sleep_frees_the_weights_and_waking_restores_them(servers: list[ContractServer]) -> None:
    async def scenario() -> None:
        async with open_engine(servers) as engine:
            await engine.sleep()
            assert not servers[0].released, "its restart could not be noticed"
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

    asyncio.run(scenario())


@pytest.mark.parametrize("verb", ["generate", "update"])
@pytest.mark.parametrize("is_back", [True, False], ids=["back", "away"])
def test_a_server_that_restarted_asleep_is_not_asked_for_memory_that_it_has(
    is_back: bool, verb: str, servers: list[ContractServer]
) -> None:
    """SGLang exits if it must resume memory that it has not released."""

    async def scenario() -> None:
        async with open_engine(servers, 2) as engine:
            await updated(engine, 1)
            await engine.sleep()
            servers[0].die()
            if is_back:
                await asyncio.to_thread(servers[0].come_back)
            work = updated(engine, 2) if verb == "update" else engine.wake_up()
            job = asyncio.create_task(work)
            if not is_back:
                await asyncio.sleep(0.05)
                await asyncio.to_thread(servers[0].come_back)
            await job
            outputs = [await engine.generate(p, SHORT, f"{p}") for p in prompts(2, 5, 9)]
            for prompt, out in zip(prompts(2, 5, 9), outputs, strict=True):
                expected = trainer_log_probs(policy(seed=1), prompt, out.token_ids, 1.0)
                assert out.log_probs == pytest.approx(expected, abs=1e-4)
            assert not any(server.dead or server.released for server in servers)
            assert servers[0].version == servers[1].version

    asyncio.run(scenario())


def test_a_server_lost_while_its_weights_come_back_gets_them_once_more(
    servers: list[ContractServer],
) -> None:
    async def scenario() -> None:
        async with open_engine(servers) as engine:
            await updated(engine, 1)
            before = await engine.generate(PROMPT, SHORT, "before")
            await engine.sleep()
            servers[0].faults["dies in an update"] = 1
            job = asyncio.create_task(engine.wake_up())
            while not servers[0].dead:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(servers[0].come_back)
            await job
            after = await engine.generate(PROMPT, SHORT, "after")
            assert after.token_ids == before.token_ids

    asyncio.run(scenario())


def test_sleep_waits_until_a_server_is_idle_and_leaves_a_busy_one_its_memory(
    servers: list[ContractServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang exits if memory is released while a request runs, and a request ends after its abort returns."""
    monkeypatch.setattr("hone.rollout.sglang_server._IDLE_TIMEOUT_S", 0.5)

    async def scenario() -> None:
        async with open_engine(servers) as engine:
            await updated(engine, 1)
            servers[0].abort_s = 0.2
            await engine.generate(PROMPT, SHORT, "stops late")
            await engine.sleep()
            assert servers[0].released == {"kv_cache", "weights"}
            await engine.wake_up()
            servers[0].running.add("another client's")
            await engine.sleep()
            assert not servers[0].released
            assert not servers[0].dead
            await engine.generate(PROMPT, SHORT, "awake")

    asyncio.run(scenario())


def test_servers_without_a_memory_saver_keep_their_memory(servers: list[ContractServer]) -> None:
    async def scenario() -> None:
        async with open_engine(servers) as engine:
            await updated(engine, 1)
            engine._servers[0].can_release_memory = False
            before = len(servers[0].calls)
            await engine.sleep()
            await engine.wake_up()
            assert len(servers[0].calls) == before
            await engine.generate(PROMPT, SHORT, "awake")

    asyncio.run(scenario())


def test_a_commit_without_load_after_sleep_brings_the_weights_back(
    servers: list[ContractServer],
) -> None:
    """Resumed memory has no values, and the version string does not show this."""

    async def scenario() -> None:
        async with open_engine(servers) as engine:
            await updated(engine, 1)
            before = await engine.generate(PROMPT, SHORT, "before")
            await engine.sleep()
            await engine.begin_update()
            await engine.wake_up()
            calls = len(servers[0].calls)
            await engine.commit(2)
            assert "/get_weights_by_name" in servers[0].calls[calls:], "nothing was checked"
            after = await engine.generate(PROMPT, SHORT, "after")
            assert after.token_ids == before.token_ids
            assert after.versions == [2] * SHORT.max_tokens

    asyncio.run(scenario())


def test_a_request_to_sleeping_servers_wakes_them_and_one_that_runs_refuses_sleep(
    servers: list[ContractServer],
) -> None:
    async def scenario() -> None:
        async with open_engine(servers, 2) as engine:
            await updated(engine, 1)
            before = await engine.generate(PROMPT, SHORT, "before")
            await engine.sleep()
            jobs = [engine.generate(PROMPT, SHORT, f"{i}") for i in range(4)]
            assert {tuple(out) for out in await asyncio.gather(*jobs)} == {tuple(before)}
            assert not servers[0].released
            assert not servers[1].released
            some = asyncio.Event()
            long = Sampling(max_tokens=300, temperature=1.0, seed=1, ignore_eos=True)
            with slow_motion():
                job = asyncio.create_task(
                    engine.generate(PROMPT, long, "runs", on_tokens=lambda delta: some.set())
                )
                await some.wait()
                with pytest.raises(RolloutError, match="sleep while requests run"):
                    await engine.sleep()
                await engine.abort()
            await job

    asyncio.run(scenario())


@pytest.mark.parametrize("ending", ["abort", "close"])
@pytest.mark.parametrize("loss", ["dead", "hung"])
def test_no_request_that_waits_for_a_lost_server_outlives_an_abort_or_a_close(
    loss: str, ending: str, servers: list[ContractServer]
) -> None:
    """Each call ends after `call_timeout_s`, and does not wait for `start_timeout_s`."""

    async def scenario() -> None:
        async with open_engine(servers, start_timeout_s=3600.0) as engine:
            some = asyncio.Event()
            long = Sampling(max_tokens=300, temperature=1.0, seed=1, ignore_eos=True)
            with slow_motion():
                job = asyncio.create_task(
                    engine.generate(PROMPT, long, "waits", on_tokens=lambda delta: some.set())
                )
                await some.wait()
                engine._servers[0].call_timeout_s = 0.3
                servers[0].hung = loss == "hung"
                servers[0].dead = True  # a running stream does not notice that the server hangs
            while engine._servers[0].recovery is None:
                await asyncio.sleep(0.01)
            await asyncio.wait_for(getattr(engine, ending)(), 60)
            out = await asyncio.wait_for(job, 60)
            assert out.stop_reason is StopReason.ABORT
            assert len(out) > 0
            await asyncio.wait_for(engine.close(), 60)
            servers[0].hung = servers[0].dead = False

    asyncio.run(scenario())


@pytest.mark.parametrize("verb", ["pause", "begin_update", "commit"])
def test_closing_ends_a_call_that_waits_for_a_lost_server(
    verb: str, servers: list[ContractServer]
) -> None:
    async def scenario() -> None:
        async with open_engine(servers, start_timeout_s=3600.0) as engine:
            if verb == "commit":
                await engine.begin_update()
                await engine.load(policy(seed=1).lm.named_parameters())
                servers[0].die()
            else:
                servers[0].die()
                request = asyncio.create_task(engine.generate(PROMPT, SHORT, "lost"))
                while engine._servers[0].recovery is None:
                    await asyncio.sleep(0.01)
                await engine.abort()
                await request
            call = asyncio.create_task(getattr(engine, verb)(*[1] * (verb == "commit")))
            await asyncio.sleep(0.3)
            assert not call.done()
            await asyncio.wait_for(engine.close(), 60)
            with pytest.raises(RolloutError, match="is closed"):
                await asyncio.wait_for(call, 60)
            servers[0].dead = False

    asyncio.run(scenario())


def test_an_update_after_a_failed_broadcast_opens_a_new_group(
    servers: list[ContractServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a copy of the weights, a failed broadcast fails the update, and its group is closed."""
    groups: list[Any] = []

    class Group:
        def __init__(self, servers: object, device: object) -> None:
            self.log: list[str] = []
            groups.append(self)

        async def open(self) -> None:
            self.log.append("open")

        async def send(self, bucket: object) -> None:
            self.log.append("send")
            if len(groups) == 1:
                raise RolloutError("a server left")

        async def close(self) -> None:
            self.log.append("close")

    monkeypatch.setattr("hone.rollout.server.UpdateGroup", Group)

    async def scenario() -> None:
        options: dict[str, Any] = {"broadcast_device": torch.device("cpu"), "keep_weights": False}
        async with open_engine(servers, **options) as engine:
            with pytest.raises(RolloutError, match="a server left"):
                await updated(engine, 1)
            await updated(engine, 2)
            assert [group.log for group in groups] == [["open", "send", "close"]] * 2

    asyncio.run(scenario())


@pytest.mark.parametrize("keep_weights", [True, False])
def test_after_a_server_left_a_broadcast_no_server_serves_half_of_it(
    keep_weights: bool, servers: list[ContractServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group:
        def __init__(self, servers: object, device: object) -> None: ...

        async def open(self) -> None: ...

        async def send(self, bucket: object) -> None: ...

        async def close(self) -> None: ...

    monkeypatch.setattr("hone.rollout.server.UpdateGroup", Group)

    async def scenario() -> None:
        options: dict[str, Any] = {"broadcast_device": torch.device("cpu")}
        options["keep_weights"] = keep_weights
        async with open_engine(servers, 2, **options) as engine:
            await engine.begin_update()
            engine._stale_servers.add(engine._servers[0])
            await engine.load(policy(seed=1).lm.named_parameters())
            if not keep_weights:
                with pytest.raises(RolloutError, match="keep_weights=true"):
                    await engine.commit(1)
                return
            await engine.commit(1)
            for server in servers:
                weights = server.policy.lm.state_dict()
                assert all(
                    torch.equal(weights[n], p) for n, p in policy(seed=1).lm.named_parameters()
                )

    asyncio.run(scenario())


def test_numbers_of_numpy_and_torch_are_sent_as_numbers(servers: list[ContractServer]) -> None:
    """An agent loop may compute them; the in-process engines accept them."""

    async def scenario() -> None:
        async with open_engine(servers) as engine:
            plain = Sampling(4, 1.0, 3, top_p=0.5, stop_token_ids=(7,))
            computed = Sampling(
                np.int64(4),  # type: ignore[arg-type]
                np.float32(1.0),  # type: ignore[arg-type]
                np.int64(3),  # type: ignore[arg-type]
                top_p=np.float32(0.5),  # type: ignore[arg-type]
                stop_token_ids=tuple(np.array([7])),
            )
            expected = await engine.generate(PROMPT, plain, "plain")
            for prompt in (np.array(PROMPT), torch.tensor(PROMPT)):
                out = await engine.generate(prompt, computed, "computed")  # type: ignore[arg-type]
                assert out.token_ids == expected.token_ids

    asyncio.run(scenario())


def test_an_incomplete_update_is_refused(servers: list[ContractServer]) -> None:
    async def scenario() -> None:
        async with open_engine(servers) as engine:
            await engine.begin_update()
            await engine.load(list(copy.deepcopy(policy()).lm.named_parameters())[1:])
            with pytest.raises(RolloutError, match="lacks"):
                await engine.commit(1)

    asyncio.run(scenario())


def test_no_server_stays_paused_after_a_run(servers: list[ContractServer]) -> None:
    """This holds if a run closes its engine while paused, and for the run after a killed one."""

    async def scenario() -> None:
        async with open_engine(servers) as engine:
            await engine.pause()
            assert servers[0].paused == "retract"
        assert servers[0].paused == ""
        await servers[0].engine.pause(keep=True)
        servers[0].paused = "retract"
        server = SGLangServer(servers[0].url, 60.0, 60.0)
        await server.connect()
        assert servers[0].paused == ""
        await server.close()

    asyncio.run(scenario())
