"""`hone serve-rm` returns the scores of the reward-model worker to our client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hone.config.reward import RewardServerConfig
from hone.rewards.scorer import ScorerInput
from hone.rewards.served import ServedClassifier
from hone.workers import serve_reward_model
from hone.workers.serve_reward_model import Service, load_worker

from .test_reward_model import save_classifier

CHAT = [{"role": "user", "content": "1+1?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("scorer"))


def with_server(model: Path, call: Callable[[str], Awaitable[Any]], worker: Any = None) -> Any:
    """Runs a call with the address of a server on a real socket."""
    from aiohttp import web

    async def run() -> Any:
        app = Service(worker or load_worker(str(model), ["trainer.device=cpu"])).application()
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await call(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["classify", "score"])
def test_our_client_reads_the_scores_of_the_worker(model: Path, kind: Any) -> None:
    worker = load_worker(str(model), ["trainer.device=cpu"])
    answers = ["2", "3 or so", "2", ""]
    expected = worker.score_rows([worker.encode(CHAT, answer) for answer in answers])

    async def call(url: str) -> Any:
        settings = RewardServerConfig(url=url, kind=kind, model=str(model), batch_size=2)
        tokenizer = worker.tokenizer
        client = ServedClassifier(settings, tokenizer, is_chat=True)
        rows = [ScorerInput("x", answer, None, {"prompt": CHAT}) for answer in answers]
        return await client.score_rows(rows)

    scores = with_server(model, call, worker)
    assert [s.score for s in scores] == pytest.approx(expected, abs=1e-5)
    assert expected[0] != expected[1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/classify", {"input": [1]}),
        ("/classify", {}),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}),
        ("/score", {"text_1": "", "text_2": ["c"]}),
        ("/score", {"text_1": "a", "text_2": []}),
    ],
)
def test_a_bad_request_is_answered_with_400(model: Path, path: str, body: dict[str, Any]) -> None:
    async def call(url: str) -> tuple[int, Any, Any]:
        import aiohttp

        async with aiohttp.ClientSession() as session:
            async with session.post(url + path, json=body) as answer:
                status, content = answer.status, await answer.json()
            async with session.get(f"{url}/health") as answer:
                return status, content, await answer.json()

    status, content, health = with_server(model, call)
    assert status == 400
    assert "error" in content
    assert health == {"model": str(model)}


def test_one_prompt_may_have_several_responses(model: Path) -> None:
    service = Service(load_worker(str(model), ["trainer.device=cpu"]))
    for prompt in ("1+1?", ["1+1?"]):
        pairs = service._encode_pairs({"text_1": prompt, "text_2": ["2", "3"]})
        assert pairs == service._encode_pairs({"text_1": ["1+1?"] * 2, "text_2": ["2", "3"]})


def test_text_that_spells_a_control_token_is_encoded_as_text(model: Path) -> None:
    worker = load_worker(str(model), ["trainer.device=cpu"])
    end = worker.tokenizer.eos_token
    pairs = {"text_1": ["1+1?"] * 2, "text_2": ["2", f"2{end}2"]}
    plain, spelled = Service(worker)._encode_pairs(pairs)
    token = worker.tokenizer.eos_token_id
    assert spelled.count(token) == plain.count(token)
    assert len(spelled) > len(plain) + 2


def test_keys_may_follow_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: list[Any] = []

    def load(model: str, overrides: list[str]) -> None:
        arguments.extend([model, *overrides])
        raise SystemExit(0)

    monkeypatch.setattr(serve_reward_model, "load_worker", load)
    with pytest.raises(SystemExit) as caught:
        serve_reward_model.main(["M", "--port", "8001", "reward_model.max_length=4096"])
    assert caught.value.code == 0
    assert arguments == ["M", "reward_model.max_length=4096"]
