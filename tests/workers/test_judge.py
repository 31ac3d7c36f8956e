"""The judge's worker: equal requests give equal texts, alone and together, offloaded or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.event_loop import run_coroutine
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.rewards.failures import Failed
from hone.verl.dialect import load_config
from hone.workers.judge import JudgeWorker, JudgeWorkerClient

ALPHABET = "abcdefgh0123456789+= \n:ua"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = character_tokenizer(ALPHABET)
    lm = tiny_lm(len(tokenizer), hidden=16, layers=1, mlp=16, seed=2)
    return save_pretrained(lm, tokenizer, tmp_path_factory.mktemp("judge"))


def make_worker(model: Path, *overrides: str) -> JudgeWorker:
    worker = JudgeWorker(
        load_config(
            ["reward_model.enable=true", "reward_model.type=judge", "trainer.device=cpu",
             f"reward_model.model.path={model}", "reward_model.judge.max_tokens=6", *overrides]
        )
    )  # fmt: skip
    worker.init_model()
    return worker


def texts(judge: JudgeWorker, *requests: tuple[str, int]) -> list[str | Failed]:
    columns = [object_array(list(column)) for column in zip(*requests, strict=True)]
    data = DataProto(None, dict(zip(("text", "vote"), columns, strict=True)))
    return list(judge.complete(data).non_tensor_batch["completion"])


def test_a_vote_gives_the_same_text_alone_and_in_a_batch(model: Path) -> None:
    worker = make_worker(model, "reward_model.judge.temperature=1.0")
    requests = [("ab", 0), ("ab", 1), ("cd+", 0), ("ab", 0)]
    together = texts(worker, *requests)
    assert together[0] == together[3]
    assert together[0] != together[1]
    assert [texts(worker, request)[0] for request in requests] == together
    offloaded = make_worker(model, "reward_model.judge.temperature=1.0",
                     "reward_model.model.fsdp_config.param_offload=true")  # fmt: skip
    assert texts(offloaded, *requests) == together
    worker.close()
    offloaded.close()


def test_a_text_that_is_too_long_or_cut_off_is_a_failure_of_its_row(model: Path) -> None:
    class Group:
        def call(self, method: object, data: DataProto) -> DataProto:
            return worker.complete(data)

    worker = make_worker(model, "reward_model.max_length=40")
    completions = JudgeWorkerClient(Group())  # type: ignore[arg-type]
    short, long, again = run_coroutine(completions.complete([("a", 0), ("a" * 100, 0), ("a", 0)]))
    assert isinstance(short, Failed)  # this model never ends its text
    assert short.reason == "unparsed"
    assert short == again
    assert isinstance(long, Failed)
    assert long.reason == "too_long"
    assert run_coroutine(completions.complete([])) == []
    worker.close()
