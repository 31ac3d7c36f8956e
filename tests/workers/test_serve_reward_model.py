"""`hone serve-rm` returns the scores of the reward-model worker to our client."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hone.config.reward import RewardServerConfig
from hone.rewards.scorer import ScorerInput
from hone.rewards.served import ServedClassifier
from hone.services.json_client import ServiceError, post_json
from hone.workers import serve_reward_model
from hone.workers.serve_reward_model import Service, load_worker
from tests.services.hostile_peers import peak_mb

from .test_reward_model import save_classifier

CHAT = [{"role": "user", "content": "1+1?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("scorer"))


@contextmanager
def serving(worker: Any) -> Iterator[str]:
    """Serves the worker on a real socket; gives the address."""
    server = Service(worker).server("127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.address
    server.shutdown()
    server.server_close()
    thread.join()


def post(url: str, body: Any, timeout_s: float = 60.0) -> tuple[int, Any]:
    try:
        status, content = 200, post_json(url, json.dumps(body).encode(), timeout_s=timeout_s)
    except ServiceError as error:
        status, content = error.status or 0, error.content
    return status, json.loads(content or "null")


@pytest.fixture(scope="module")
def worker(model: Path) -> Any:
    return load_worker(str(model), ["trainer.device=cpu"])


@pytest.mark.parametrize("kind", ["classify", "score"])
def test_our_client_reads_the_scores_of_the_worker(model: Path, worker: Any, kind: Any) -> None:
    answers = ["2", "3 or so", "2", ""]
    expected = worker.score_rows([worker.encode(CHAT, answer) for answer in answers])

    with serving(worker) as url:
        settings = RewardServerConfig(url=url, kind=kind, model=str(model), batch_size=2)
        client = ServedClassifier(settings, worker.tokenizer, is_chat=True)
        rows = [ScorerInput("x", answer, None, {"prompt": CHAT}) for answer in answers]
        scores: Any = asyncio.run(client.score_rows(rows))
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
def test_a_bad_request_is_answered_with_400(
    model: Path, worker: Any, path: str, body: dict[str, Any]
) -> None:
    with serving(worker) as url:
        status, content = post(url + path, body)
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            health = json.load(answer)
    assert status == 400
    assert "must be" in content["detail"] or "text" in content["detail"]
    assert health == {"model": str(model)}


def test_a_text_of_60_mb_costs_its_own_memory_only(model: Path) -> None:
    """In a process of its own: a tokenizer would need 16 GB for this text."""
    code = "from tests.workers.test_serve_reward_model import measure; measure()"
    run = subprocess.run(
        [sys.executable, "-c", code, str(model)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    growth_mb, *statuses = run.stdout.split()
    assert statuses == ["400", "400", "200"]
    assert float(growth_mb) < 1000


def measure() -> None:
    """Prints how far the memory of a server and its client grows, and the status of each request."""
    import resource

    worker = load_worker(sys.argv[1], ["trainer.device=cpu"])
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + (4 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))  # spares the machine without a limit
    before = peak_mb()
    large_text = "a" * (60 << 20)
    with serving(worker) as url:
        statuses = [
            post(f"{url}/classify", {"input": [large_text]})[0],
            post(f"{url}/score", {"text_1": ["a"], "text_2": [large_text]})[0],
            post(f"{url}/classify", {"input": ["a"]})[0],
        ]
    after = peak_mb()
    sys.stdout.write(" ".join(map(str, [after - before, *statuses])))


def test_a_client_that_hangs_up_ends_its_request(
    worker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_scored, is_held, score_rows = 0, threading.Event(), worker.score_rows

    def score_and_hold(rows: list[list[int]]) -> list[float]:
        nonlocal num_scored
        num_scored += len(rows)
        assert is_held.wait(60)
        return list(score_rows(rows))

    monkeypatch.setattr(worker, "score_rows", score_and_hold)
    with serving(worker) as url, ThreadPoolExecutor(1) as pool:
        for _ in range(5):  # the first is being scored when its client hangs up, the others wait
            body = {"input": ["a"] * 5000}
            assert post(f"{url}/classify", body, timeout_s=0.5) == (0, None)
        after = pool.submit(post, f"{url}/classify", {"input": ["a"]})
        is_held.set()
        assert after.result(60)[0] == 200
    assert num_scored <= 16 + 1
    assert not caplog.records


def test_one_prompt_may_have_several_responses(worker: Any) -> None:
    service = Service(worker)
    for prompt in ("1+1?", ["1+1?"]):
        pairs = list(service._encode_pairs({"text_1": prompt, "text_2": ["2", "3"]}))
        separate = {"text_1": ["1+1?"] * 2, "text_2": ["2", "3"]}
        assert pairs == list(service._encode_pairs(separate))


def test_text_that_spells_a_control_token_is_encoded_as_text(worker: Any) -> None:
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
