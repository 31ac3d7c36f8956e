"""Served reward models over real sockets: endpoints, failures, limits and the cache."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from hone.config.reward import RewardServerConfig
from hone.event_loop import run_coroutine
from hone.models.tiny import character_tokenizer
from hone.rewards import remote
from hone.rewards.failures import Failed, Scored, WrongSetting
from hone.rewards.scorer import ScorerInput
from hone.rewards.served import ServedClassifier

from .scoring_server import ScoringServer, by_length


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScoringServer]:
    monkeypatch.setattr(remote, "FIRST_RETRY_PAUSE_S", 0.01)
    server = ScoringServer(by_length)
    yield server
    server.stop()


def classifier(server: ScoringServer, **settings: Any) -> ServedClassifier:
    config = RewardServerConfig(**{"url": server.url, "kind": "texts", "model": "rm", **settings})
    return ServedClassifier(config, None, is_chat=False)


def scores(reward_model: ServedClassifier, *answers: str) -> list[float | str]:
    rows = [ScorerInput("src", answer, None, {"prompt": "1+1="}) for answer in answers]
    results = run_coroutine(reward_model.score_rows(rows))
    return [r.score if isinstance(r, Scored) else r.reason for r in results]


@pytest.mark.parametrize(
    ("kind", "path"),
    [("classify", "/classify"), ("pooling", "/pooling"), ("score", "/score"), ("texts", "/")],
)
def test_every_endpoint_scores_each_row(server: ScoringServer, kind: str, path: str) -> None:
    paths: list[str] = []
    server.answer = lambda path, body: paths.append(path) or by_length(path, body)
    reward_model = classifier(server, kind=kind, batch_size=2)
    prompt = 0 if kind == "score" else 4
    assert scores(reward_model, "a", "bbb", "cc", "a") == [prompt + n for n in (1, 3, 2, 1)]
    assert set(paths) == {path}
    assert len(server.bodies) == 2  # equal texts are sent once, two per request
    if kind in ("classify", "pooling"):
        assert server.bodies[0]["model"] == "rm"
        assert server.bodies[0]["use_activation"] is False


def test_a_url_with_a_path_is_the_endpoint(server: ScoringServer) -> None:
    paths: list[str] = []
    server.answer = lambda path, body: paths.append(path) or by_length(path, body)
    scores(classifier(server, kind="classify", url=f"{server.url}/v1"), "a")
    scores(classifier(server, kind="classify", url=f"{server.url}/my/classify"), "a")
    assert paths == ["/v1/classify", "/my/classify"]


def status(code: int, **headers: str) -> web.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.Response(status=code, text="no", headers=names)


BAD = {
    "garbage": (lambda body: web.Response(text="<html>"), "bad_answer"),
    "no object": (lambda body: [1.0], "bad_answer"),
    "deep": (lambda body: web.Response(text="[" * 100_000), "bad_answer"),
    "wrong count": (lambda body: {"scores": [1.0] * (len(body["texts"]) + 1)}, "bad_answer"),
    "text": (lambda body: {"scores": ["good"]}, "bad_answer"),
    "null": (lambda body: {"scores": [None]}, "bad_answer"),
    "nan": (lambda body: web.Response(text='{"scores": [NaN]}'), "nan"),
    "busy": (lambda body: status(429), "busy"),
    "broken": (lambda body: status(500), "http_error"),
    "refused": (lambda body: status(401), "http_error"),
    "redirect": (lambda body: status(302, Location="http://127.0.0.1:1/"), "http_error"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_answer_is_a_counted_failure(server: ScoringServer, case: str) -> None:
    answer, reason = BAD[case]
    server.answer = lambda path, body: answer(body)
    assert scores(classifier(server, retries=1), "a") == [reason]
    is_permanent = case in ("refused", "redirect", "nan")  # not retried
    assert len(server.bodies) == (1 if is_permanent else 2)


def test_two_labels_are_a_failure(server: ScoringServer) -> None:
    server.answer = lambda path, body: {"data": [{"index": 0, "probs": [0.2, 0.8]}]}
    reward_model = classifier(server, kind="classify", retries=0)
    (result,) = run_coroutine(
        reward_model.score_rows([ScorerInput("s", "a", None, {"prompt": "b"})])
    )
    assert isinstance(result, Failed)
    assert "one label, this one has 2" in result.detail


def test_a_failed_request_is_retried_until_it_succeeds(server: ScoringServer) -> None:
    answers = [status(429, Retry_After="0.02"), status(503), web.Response(text="{")]
    server.answer = lambda path, body: answers.pop(0) if answers else by_length(path, body)
    reward_model = classifier(server)
    assert scores(reward_model, "ab") == [6]
    assert reward_model.pop_metrics() == {
        "reward/server/requests": 4,
        "reward/server/retries": 3,
        "reward/server/cache_hits": 0,
    }
    assert reward_model.pop_metrics() == {}


def test_a_stalled_request_times_out_and_other_rows_are_scored(server: ScoringServer) -> None:
    async def answer(path: str, body: Any) -> Any:
        if body["texts"] == ["1+1=slow"]:
            await asyncio.sleep(60)
        return by_length(path, body)

    server.answer = answer
    expected = [5, "timeout", 6]
    for timeout_s in (0.5, 5.0, 50.0):  # 0.5 s are enough, unless the machine stands still
        reward_model = classifier(server, timeout_s=timeout_s, retries=0, batch_size=1)
        results = scores(reward_model, "a", "slow", "bb")
        if results == expected:
            break
    assert results == expected


def test_a_server_that_answers_slowly_times_out(server: ScoringServer) -> None:
    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(100):
            await response.write(b" ")
            await asyncio.sleep(0.05)
        return response

    server._handle = trickle  # type: ignore[method-assign]
    server.stop()
    server.start()
    assert scores(classifier(server, timeout_s=0.4, retries=0), "a") == ["timeout"]


def test_a_restarted_server_is_used_again(
    server: ScoringServer, caplog: pytest.LogCaptureFixture
) -> None:
    reward_model = classifier(server, retries=2)
    with caplog.at_level(logging.WARNING):
        assert scores(reward_model, "a") == [5]
        server.stop()
        assert scores(reward_model, "bb") == ["unreachable"]
        reward_model.pop_metrics()
        assert scores(reward_model, "cc") == ["unreachable"]
        assert (
            reward_model.pop_metrics()["reward/server/requests"] == 1
        )  # no retries while it is down
        assert scores(reward_model, "a") == [5]  # from the cache
        server.start()
        assert scores(reward_model, "ccc") == [7]
    assert sum("requests are not retried" in r.message for r in caplog.records) == 1
    assert sum("answers again" in r.message for r in caplog.records) == 1


def test_several_servers_share_requests_and_replace_each_other(server: ScoringServer) -> None:
    second = ScoringServer(by_length)
    reward_model = classifier(server, url=(server.url, second.url), batch_size=1)
    try:
        assert scores(reward_model, "a", "bb", "ccc", "dddd") == [5, 6, 7, 8]
        assert (len(server.bodies), len(second.bodies)) == (2, 2)
        server.stop()
        assert scores(reward_model, "e", "fffff") == [5, 9]
    finally:
        second.stop()


def test_concurrent_requests_and_requests_per_minute_are_limited(server: ScoringServer) -> None:
    async def answer(path: str, body: Any) -> Any:
        while server.max_concurrent < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # time for one request too many
        return by_length(path, body)

    server.answer = answer
    reward_model = classifier(server, max_concurrency=2, batch_size=1)
    assert len(scores(reward_model, *"abcdefgh")) == 8
    assert server.max_concurrent == 2
    waits: list[float] = []

    async def acquire(self: Any, tokens: float = 1.0) -> None:
        waits.append(self.rate_limit)

    limited = classifier(server, requests_per_minute=120.0, batch_size=1)
    limited.server._bucket.acquire = acquire.__get__(limited.server._bucket)  # type: ignore
    scores(limited, "a", "b", "c")
    assert waits == [2.0] * 3


def test_scores_are_cached_by_model_and_text_in_memory_and_in_a_folder(
    server: ScoringServer, tmp_path: Path
) -> None:
    cached = classifier(server)
    assert scores(cached, "a", "b") == scores(cached, "b", "a") == [5, 5]
    assert len(server.bodies) == 1
    folder = str(tmp_path / "cache")
    scores(classifier(server, cache=folder), "a", "bb")
    count = len(server.bodies)
    assert scores(classifier(server, cache=folder), "bb", "a") == [6, 5]  # another run
    assert len(server.bodies) == count
    assert scores(classifier(server, cache=folder, model="other"), "a") == [5]
    assert len(server.bodies) == count + 1
    for file in (tmp_path / "cache").rglob("*.json"):
        file.write_text('{"answer": ')  # an incomplete file is ignored
    assert scores(classifier(server, cache=folder), "a") == [5]
    assert len(server.bodies) == count + 2
    (tmp_path / "file").touch()
    assert scores(classifier(server, cache=str(tmp_path / "file")), "c") == [5]  # no folder
    count += 1
    scores(uncached := classifier(server, cache=None), "a")
    scores(uncached, "a")
    assert len(server.bodies) == count + 4


def test_the_key_is_sent_in_a_header_and_appears_nowhere_else(
    server: ScoringServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    server.answer = lambda path, body: web.Response(status=401, text="bad key sk-secret")
    reward_model = classifier(server, api_key_env="MY_KEY", url=f"{server.url}/x?token=sk-secret")
    (result,) = run_coroutine(
        reward_model.score_rows([ScorerInput("s", "a", None, {"prompt": "b"})])
    )
    assert server.headers[0]["Authorization"] == "Bearer sk-secret"
    assert isinstance(result, Failed)
    assert "sk-secret" not in result.detail
    assert "sk-secret" not in str(server.bodies)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(WrongSetting, match="api_key_env=MY_KEY"):
        classifier(server, api_key_env="MY_KEY")


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://a", "http://", "http://me:sk-1@host"])
def test_an_invalid_url_is_refused_at_once(server: ScoringServer, url: str) -> None:
    with pytest.raises(WrongSetting) as refused:
        classifier(server, url=url)
    assert "sk-1" not in str(refused.value)


def test_a_request_ignores_the_proxies_of_the_environment(
    server: ScoringServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "http_proxy", "http://127.0.0.1:1")
    assert scores(classifier(server), "a") == [5]


def test_the_text_is_rendered_by_the_reward_models_template(server: ScoringServer) -> None:
    tokenizer = character_tokenizer("ab+1=:;user<|>_imend")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
    )
    settings = RewardServerConfig(url=server.url, model="rm", cache=None)
    rows = [
        ScorerInput("s", answer, None, {"prompt": prompt})
        for prompt in ("1+1=", [{"role": "user", "content": "1+1="}])
        for answer in ("ab", "a<|im_end|>b")
    ]
    run_coroutine(ServedClassifier(settings, tokenizer, is_chat=True).score_rows(rows))
    texts = server.bodies[0]["input"]
    assert texts[0] == "user:1+1=;assistant:ab;"
    assert texts[1].startswith("user:1+1=;assistant:a<")
    assert "<|im_end|>" not in texts[1]
    assert len(texts) == 2  # both prompts are one user message
    run_coroutine(ServedClassifier(settings, tokenizer, is_chat=False).score_rows(rows[:1]))
    assert server.bodies[-1]["input"] == ["1+1=ab"]
