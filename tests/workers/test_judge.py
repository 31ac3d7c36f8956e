"""The judge's own engine: equal requests give equal texts, alone and together, offloaded or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.config import load_config
from hone.event_loop import run_coroutine
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.rewards.failures import Failed
from hone.workers.judge import JudgeWorker, WorkerCompletions

ALPHABET = "abcdefgh0123456789+= \n:ua"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = character_tokenizer(ALPHABET)
    lm = tiny_lm(len(tokenizer), hidden=16, layers=1, mlp=16, seed=2)
    return save_pretrained(lm, tokenizer, tmp_path_factory.mktemp("judge"))


def worker(model: Path, *overrides: str) -> JudgeWorker:
    made = JudgeWorker(
        load_config(
            ["reward_model.enable=true", "reward_model.type=judge", "trainer.device=cpu",
             f"reward_model.model.path={model}", "reward_model.judge.max_tokens=6", *overrides]
        )
    )  # fmt: skip
    made.init_model()
    return made


def texts(of: JudgeWorker, *requests: tuple[str, int]) -> list[str | None]:
    columns = [object_array(list(column)) for column in zip(*requests, strict=True)]
    data = DataProto(None, dict(zip(("text", "vote"), columns, strict=True)))
    return list(of.complete(data).non_tensor_batch["completion"])


def test_a_vote_is_the_same_text_alone_and_among_others(model: Path) -> None:
    made = worker(model, "reward_model.judge.temperature=1.0")
    requests = [("ab", 0), ("ab", 1), ("cd+", 0), ("ab", 0)]
    together = texts(made, *requests)
    assert together[0] == together[3]
    assert together[0] != together[1]
    assert [texts(made, request)[0] for request in requests] == together
    resting = worker(model, "reward_model.judge.temperature=1.0",
                     "reward_model.model.fsdp_config.param_offload=true")  # fmt: skip
    assert texts(resting, *requests) == together
    made.close()
    resting.close()


def test_a_text_that_is_too_long_is_a_failure_of_its_row(model: Path) -> None:
    class Group:
        def call(self, method: object, data: DataProto) -> DataProto:
            return made.complete(data)

    made = worker(model, "reward_model.max_length=40")
    completions = WorkerCompletions(Group())  # type: ignore[arg-type]
    short, long, again = run_coroutine(completions.complete([("a", 0), ("a" * 100, 0), ("a", 0)]))
    assert isinstance(short, str)
    assert short == again
    assert isinstance(long, Failed)
    assert long.reason == "too_long"
    assert run_coroutine(completions.complete([])) == []
    made.close()
