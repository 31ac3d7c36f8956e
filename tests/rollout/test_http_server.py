"""Calls to a server: keys, deadlines and health."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from hone.rollout.contract import RolloutError, Sampling
from hone.rollout.http_server import Event, ServerLost
from hone.rollout.server_weights import WeightFolder
from hone.rollout.sglang_server import SGLangServer
from hone.rollout.vllm_openai import VLLMServer

from .contract_server import ContractServer
from .models import policy
from .opened_servers import PROMPT, SHORT, open_engine


def test_a_server_that_does_not_return_is_reported_at_the_deadline(
    servers: list[ContractServer],
) -> None:
    async def scenario() -> None:
        async with open_engine(servers) as engine:
            for server in engine._servers:
                server.start_timeout_s = 0.5
            servers[0].die()
            with pytest.raises(RolloutError, match=r"is not healthy after 0.5 s"):
                await engine.generate(PROMPT, SHORT, "lost")
            servers[0].dead = False

    asyncio.run(scenario())


def test_a_client_without_aiohttp_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hone.rollout.http_server.find_spec", lambda name: None)
    with pytest.raises(RolloutError, match=r"needs aiohttp.*pip install 'hone-rl\[server\]'"):
        SGLangServer("http://127.0.0.1:1", 1.0, 1.0)


def test_a_server_that_is_not_healthy_yet_is_waited_for(servers: list[ContractServer]) -> None:
    servers.append(ContractServer(policy()))
    servers[0].faults["unhealthy"] = 2

    async def scenario() -> None:
        server = SGLangServer(servers[0].url, 60.0, 60.0)
        await server.wait_until_healthy()
        await server.close()
        assert servers[0].calls == ["/health"] * 3

    asyncio.run(scenario())


def test_a_healthy_server_that_cannot_generate_is_reported(servers: list[ContractServer]) -> None:
    async def scenario() -> None:
        async with open_engine(servers) as engine:
            servers[0].faults["500 at the start"] = 10**6
            with pytest.raises(RolloutError, match=r"broke off 4 times.*500 to /generate"):
                await engine.generate(PROMPT, SHORT, "health lies")

    asyncio.run(scenario())


def test_the_api_key_comes_from_the_environment_and_is_never_shown(
    servers: list[ContractServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.rollout.sglang_server import SGLangServer

    servers.append(ContractServer(policy(), api_key="s3cret"))
    monkeypatch.setenv("TEST_KEY", "s3cret")

    async def scenario(variable: str) -> None:
        url = servers[0].url.replace("http://", "http://user:pass@")
        server = SGLangServer(url, 60.0, 60.0, api_key_env=variable)
        try:
            assert "s3cret" not in repr(server)
            assert "pass" not in repr(server) + server.safe_url
            await server.connect()
        finally:
            await server.close()

    asyncio.run(scenario("TEST_KEY"))
    monkeypatch.setenv("WRONG", "other")
    with pytest.raises(RolloutError, match="401") as caught:
        asyncio.run(scenario("WRONG"))
    assert "other" not in str(caught.value)
    with pytest.raises(RolloutError, match="MISSING: this environment variable is not set"):
        asyncio.run(scenario("MISSING"))


@pytest.mark.parametrize("mode", ["raw", "truncated", "ours"])
def test_two_requests_show_what_the_log_probs_mean(
    mode: str, servers: list[ContractServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that computes log-probs without temperature or after truncation is refused for training."""
    sample_one_token = SGLangServer.sample_one_token

    async def changed(
        self: SGLangServer, prompt: list[int], sampling: dict[str, float]
    ) -> tuple[float, float]:
        if mode == "raw":
            sampling = sampling | {"temperature": min(sampling["temperature"], 1.0)}
        sampled, best = await sample_one_token(self, prompt, sampling)
        return (0.0 if mode == "truncated" and "top_k" in sampling else sampled), best

    monkeypatch.setattr(SGLangServer, "sample_one_token", changed)

    async def scenario() -> None:
        async with open_engine(servers) as engine:
            warm, cut = Sampling(1, 0.7, 0), Sampling(1, 1.0, 0, top_k=2)
            engine.check_training_log_probs(Sampling(1, 1.0, 0))
            for sampling, wrong, words in (
                (warm, "raw", "log-probs at temperature 1.*temperature=0.7"),
                (cut, "truncated", "log-probs after truncation"),
            ):
                if mode == wrong:
                    with pytest.raises(RolloutError, match=words):
                        engine.check_training_log_probs(sampling)
                else:
                    engine.check_training_log_probs(sampling)

    asyncio.run(scenario())


class ReturnsSomeWeights(SGLangServer):
    """A server that returns zeros for some of its weights."""

    returned_names: tuple[str, ...] = ()

    async def weight_version(self) -> str:
        return "v"

    async def read_weight(self, name: str) -> Any:
        return [0.0] * 4 if name in self.returned_names else None


@pytest.fixture
def ones(tmp_path: Path) -> Iterator[WeightFolder]:
    folder = WeightFolder(str(tmp_path / "weights"), str(tmp_path))
    folder.begin()
    folder.add({"a": torch.ones(4), "b": torch.ones(4)})
    folder.commit()
    yield folder
    folder.close()


def test_a_weight_that_is_not_shown_hides_no_other(ones: WeightFolder) -> None:
    server = ReturnsSomeWeights("http://gpu:1", 1.0, 1.0)
    server.returned_names = ("b",)
    with pytest.raises(RolloutError, match="'b' has other values"):
        asyncio.run(server.check_weights("v", ones))


def test_a_server_that_shows_no_weight_is_named_once(
    ones: WeightFolder, caplog: pytest.LogCaptureFixture
) -> None:
    server = ReturnsSomeWeights("http://gpu:1", 1.0, 1.0)
    for _ in range(2):
        asyncio.run(server.check_weights("v", ones))
    (record,) = caplog.records
    assert "http://gpu:1 returned none of the weights" in record.getMessage()


def test_a_server_of_another_kind_is_named(servers: list[ContractServer]) -> None:
    from hone.rollout.vllm_openai import VLLMServer

    servers.append(ContractServer(policy()))

    async def connect() -> None:
        server = VLLMServer(servers[0].url, 60.0, 60.0)
        try:
            await server.connect()
        finally:
            await server.close()

    with pytest.raises(RolloutError, match="/v1/models answered 404"):
        asyncio.run(connect())


def test_a_cancellation_is_never_lost_to_an_answer_that_comes_at_the_same_time() -> None:
    from hone.rollout.http_server import _wait_for

    async def scenario() -> None:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def read() -> int:
            return await answer

        job = asyncio.create_task(_wait_for(60.0, read()))
        await asyncio.sleep(0.01)
        answer.set_result(1)
        await asyncio.sleep(0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    asyncio.run(scenario())


def outcomes_of(answer: web.Response) -> tuple[object, object]:
    """Returns the results or errors of a call and of a stream, if the server gives every path this answer."""

    async def outcome(work: Any) -> object:
        try:
            return await work
        except (RolloutError, ServerLost) as error:
            return error

    async def scenario() -> tuple[object, object]:
        async def handle(request: web.Request) -> web.Response:
            return web.Response(body=answer.body, status=answer.status, headers=answer.headers)

        async def events() -> list[Event]:
            return [event async for event in server.events("/v1/completions", {})]

        web_server = web.Server(handle)
        listener = await asyncio.get_running_loop().create_server(web_server, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        server = VLLMServer(f"http://127.0.0.1:{port}", 60.0, 60.0)
        try:
            return await outcome(server.weight_version()), await outcome(events())
        finally:
            await server.close()
            await web_server.shutdown(1.0)
            listener.close()

    return asyncio.run(scenario())


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("body", [b"\xff", b"<html>", b"{}", b"[]", b"null", b""])
def test_an_answer_of_any_form_is_an_error_of_the_server(status: int, body: bytes) -> None:
    """An error of another type would fail the engine and all of its requests."""
    answers = outcomes_of(web.Response(body=body, status=status, content_type="text/plain"))
    assert all(isinstance(answer, RolloutError | ServerLost) for answer in answers)


def test_an_error_with_status_200_is_quoted() -> None:
    _, streamed = outcomes_of(web.Response(text='{"message": "the model is overloaded"}'))
    assert "the model is overloaded" in str(streamed)


def test_an_event_whose_error_is_null_has_no_error() -> None:
    text = 'data: {"error": null, "choices": []}\n\ndata: [DONE]\n\n'
    assert outcomes_of(web.Response(text=text))[1] == [{"error": None, "choices": []}]


def test_a_weight_that_cannot_be_read_is_an_error_of_the_server() -> None:
    class Garbles(SGLangServer):
        async def weight_version(self) -> str:
            return "v"

        async def _request(self, *arguments: object) -> tuple[int, str]:
            return 200, "<html>"

    class Folder:
        def sample_weights(self, count: int) -> list[tuple[str, torch.Tensor]]:
            return [("weight", torch.ones(2))]

    folder: Any = Folder()
    with pytest.raises(RolloutError, match="cannot read"):
        asyncio.run(Garbles("http://gpu", 1.0, 1.0).check_weights("v", folder))
