"""A running vLLM OpenAI server: its answers, and the servers that can train."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.models.tiny import save_pretrained
from hone.rollout.contract import RolloutError, Sampling
from hone.rollout.http_server import ServerLost
from hone.rollout.requests import Request, RequestRules
from hone.rollout.server import ServerRollout
from hone.rollout.server_weights import WeightFolder
from hone.rollout.vllm_openai import VLLMServer

from . import (
    clauses_control,
    clauses_failure,
    clauses_kept,
    clauses_lifecycle,
    clauses_model,
    clauses_sampling,
    models,
    vllm_openai_factory,
)
from .engine_contract import CLAUSES, verify
from .models import policy
from .vllm_factory import vllm
from .vllm_openai_factory import UNTIED, VLLMServerFactory

_ = (
    clauses_control,
    clauses_failure,
    clauses_kept,
    clauses_lifecycle,
    clauses_model,
    clauses_sampling,
)


def server(**state: Any) -> VLLMServer:
    return VLLMServer("http://user:pass@gpu:8000", 1.0, 1.0, **state)


def choice(**changes: Any) -> dict[str, Any]:
    complete = {"token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": None}
    return {"choices": [complete | changes]}


def test_an_event_is_its_token_ids_with_their_log_probs() -> None:
    chunk = server()._parse_chunk(choice())
    assert (chunk.token_ids, chunk.log_probs, chunk.finished) == ([5], [-0.5], False)
    last = server()._parse_chunk(choice(token_ids=[], logprobs=None, finish_reason="length"))
    assert (last.token_ids, last.finished) == ([], True)
    assert not server()._parse_chunk({"usage": {}}).token_ids


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": None}, r"no token_ids \(return_token_ids\)"),
        ({"logprobs": None}, "tokens without log-probs"),
        ({"finish_reason": "bored"}, "finish_reason 'bored'"),
    ],
)
def test_an_event_that_lacks_something_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RolloutError, match=words) as caught:
        server()._parse_chunk(choice(**changes))
    assert "pass" not in str(caught.value)


def test_a_request_that_the_server_aborts_is_issued_again() -> None:
    with pytest.raises(ServerLost):
        server()._parse_chunk(choice(finish_reason="abort"))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "cannot load new weights, which training.*VLLM_SERVER_DEV_MODE=1"),
        (
            {"has_dev_routes": True, "device_type": "cpu", "tied_embeddings": True},
            "keeps the old output head",
        ),
    ],
)
def test_a_server_that_cannot_be_updated_is_refused_for_training(
    state: dict[str, Any], words: str
) -> None:
    with pytest.raises(RolloutError, match=words):
        server(**state).check_updates_supported()


def test_other_servers_train() -> None:
    server(has_dev_routes=True, device_type="cpu").check_updates_supported()
    server(has_dev_routes=True, device_type="cuda", tied_embeddings=True).check_updates_supported()


def test_a_request_sets_every_parameter_for_which_vllm_has_a_default_of_the_model() -> None:
    """By default vLLM takes them from generation_config.json; Qwen2.5 has a repetition penalty there."""
    bodies: list[Any] = []

    class Records(VLLMServer):
        async def events(self, path: str, body: Any) -> Any:
            bodies.append(body)
            yield choice(finish_reason="length")

    async def stream() -> None:
        running = Records("http://gpu:8000", 1.0, 1.0)
        request = Request([1], Sampling(1, 1.0, 0), "one")
        assert [c.finished async for c in running.stream(request, request.sampling)] == [True]

    asyncio.run(stream())
    body = bodies[0]
    neutral = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "max_tokens": 1}
    neutral |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert {name: body.get(name) for name in neutral} == neutral


class RestartedServer(VLLMServer):
    """A server whose version is a variable; it records the version that served each request."""

    current = "default"

    async def connect(self) -> None:
        self.has_dev_routes, self.expected_version, self.served = True, self.current, list[str]()

    async def wait_until_healthy(self) -> None: ...

    async def call(self, path: str, body: Any = None, *, get: bool = False) -> Any:
        return None

    async def weight_version(self) -> str:
        await asyncio.sleep(0)
        return self.current

    async def load_folder(self, folder: str, version: str) -> None:
        self.current = version

    async def events(self, path: str, body: Any) -> Any:
        self.served.append(self.current)
        for reason in (None, "length"):
            await asyncio.sleep(0)
            yield choice(finish_reason=reason)


def test_a_server_that_restarted_while_it_was_idle_serves_nothing_before_its_weights_are_back() -> (
    None
):
    running = RestartedServer("http://gpu:8000", 1.0, 1.0)
    engine = ServerRollout(
        [running],
        RequestRules(frozenset({89}), vocab_size=90),
        {"shift": torch.zeros(1)},
        WeightFolder(None, "no-model"),
    )

    async def scenario() -> None:
        await engine.start()
        await engine.begin_update()
        await engine.load([("shift", torch.ones(1))])
        await engine.commit(1)
        published = running.current
        sampling = Sampling(2, 1.0, 0, ignore_eos=True)
        await engine.generate([1], sampling, "before")
        running.current = "default"
        await asyncio.gather(*(engine.generate([1], sampling, str(i)) for i in range(3)))
        assert published != "default"
        assert running.served == [published] * 4
        await engine.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("event", [{"choices": ["x"]}, choice(token_ids=5)])
def test_an_event_that_cannot_be_read_fails_its_request_alone(event: dict[str, Any]) -> None:
    class Garbles(RestartedServer):
        async def events(self, path: str, body: Any) -> Any:
            yield event if body["prompt"] == [2] else choice(finish_reason="length")

    engine = ServerRollout(
        [Garbles("http://gpu:8000", 1.0, 1.0)],
        RequestRules(frozenset({89}), vocab_size=90),
        {},
        WeightFolder(None, "no-model"),
    )

    async def scenario() -> None:
        await engine.start()
        sampling = Sampling(1, 1.0, 0, ignore_eos=True)
        with pytest.raises(RolloutError, match="http://gpu:8000 sent a response that hone cannot"):
            await engine.generate([2], sampling, "garbled")
        assert len(await engine.generate([1], sampling, "next")) == 1
        await engine.close()

    asyncio.run(scenario())


# -- vLLM itself ------------------------------------------------------------------------------

APPLY = [name for name, clause in CLAUSES.items() if clause.applies(VLLMServerFactory())]


@pytest.fixture
def _untied_heads_of_32_numbers() -> Iterator[None]:
    before = dict(models.SHAPE)
    models.SHAPE.update(UNTIED)
    models.sharp_lm.cache_clear()
    yield
    models.SHAPE.clear()
    models.SHAPE.update(before)
    models.sharp_lm.cache_clear()


@vllm
@pytest.mark.usefixtures("_untied_heads_of_32_numbers")
@pytest.mark.parametrize("name", APPLY)
def test_contract(name: str) -> None:
    verify(name, VLLMServerFactory())


def test_the_weaker_laws_are_named() -> None:
    probes = {"memory", "prefill"}  # a server does not have these probes
    lacking = {n for n, c in CLAUSES.items() if n not in APPLY and not c.needs & probes}
    assert lacking == {
        "a draw depends on the absolute position",
        "the same request gets the same tokens in any batch",
        "log probs are those before truncation",
    }


@vllm
@pytest.mark.usefixtures("_untied_heads_of_32_numbers")
def test_what_the_server_says_of_itself_is_what_the_contract_tests_believe() -> None:
    engine: Any = VLLMServerFactory().build(policy())
    (running,) = engine._servers
    assert engine.traits == VLLMServerFactory.engine_traits
    assert running.log_probs_after_temperature
    assert running.device_type == "cpu"
    asyncio.run(engine.close())


@vllm
@pytest.mark.usefixtures("_untied_heads_of_32_numbers")
def test_a_run_trains_through_the_server_with_the_trainers_log_probs(tmp_path: Path) -> None:
    from hone.trainer.main_ppo import run
    from tests.workers.tasks import config_of

    model = save_pretrained(policy(seed=3).lm, models.TOKENIZER, tmp_path / "model")
    row = {"data_source": "arithmetic", "prompt": "a+b=", "reward_model": {"ground_truth": 2}}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    run(
        config_of(
            model,
            "actor_rollout_ref.rollout.name=vllm",
            f"actor_rollout_ref.rollout.server.urls=[{vllm_openai_factory.server_url()}/v1]",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.entropy_coeff=0.1",  # with equal scores, only the entropy has a gradient
            "algorithm.adv_estimator=grpo",
            f"data.train_files={tmp_path / 'rows.jsonl'}",
            "data.val_files=[]",
            "data.prompt_format=raw",
            "trainer.total_training_steps=3",
            "trainer.logger=[jsonl]",
            f"trainer.default_local_dir={tmp_path / 'run'}",
        )
    )
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert max(abs(line["rollout_corr/kl"]) for line in lines) < 1e-4
    assert min(line["actor/grad_norm"] for line in lines) > 0, "the weights did not change"
