"""The search loop with a scripted engine and a real retriever; two real steps of GRPO."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hone.agents.loops.search import (
    INFORMATION_END,
    INFORMATION_START,
    INVALID_ACTION_TEXT,
    Action,
    read_action,
)
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.protocol import DataProto
from hone.rollout.scripted import ScriptedRollout
from tests.retrieval.passages import TEXTS, Retriever

RunRow = Callable[..., tuple[ScriptedRollout, DataProto]]
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop=search_agent"
ROME = f'Doc 1(Title: "Rome") {TEXTS["Rome"]}'
SEARCH, ANSWER = "<search> Italy </search>", "<answer> Rome </answer>"


@pytest.fixture(scope="module")
def retriever(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Retriever]:
    with Retriever(tmp_path_factory.mktemp("retriever")) as running:
        yield running


@pytest.fixture
def run_row(runner: Callable[..., Any], rows: Any, tokenizer: Any, retriever: Retriever) -> RunRow:
    """`run_row(lines, *overrides)` runs one row through the loop and returns engine and batch."""

    def run(lines: list[Any], *overrides: str) -> tuple[ScriptedRollout, DataProto]:
        engine = ScriptedRollout(lines, tokenizer=tokenizer)
        tag_tokenizer = [
            LOOP,
            "data.max_response_length=900",
            f"retriever.url={retriever.url}",
            *overrides,
        ]
        return engine, runner(engine, *tag_tokenizer).run(rows(["Italy?"]))

    return run


def text(tokenizer: Any, batch: DataProto, mask: int | None = None) -> str:
    """Returns the response text, or its part with this mask value."""
    length = batch.batch["responses"].shape[1]
    inside = batch.batch["attention_mask"][0, -length:].bool()
    if mask is not None:
        inside &= batch.batch["response_mask"][0] == mask
    response: str = tokenizer.decode(batch.batch["responses"][0][inside])
    return response


def counts(batch: DataProto) -> dict[str, float]:
    fields = batch.non_tensor_batch
    return {name[4:]: float(fields[name][0]) for name in fields if name.startswith("env/")}


def test_a_search_is_answered_with_passages_that_carry_no_loss(
    run_row: RunRow, tokenizer: Any
) -> None:
    think = "<think>who</think>" + SEARCH
    engine, batch = run_row([think, ANSWER], "retriever.topk=1")
    assert text(tokenizer, batch) == f"{think}{INFORMATION_START}{ROME}{INFORMATION_END}{ANSWER}"
    assert text(tokenizer, batch, 1) == think + ANSWER
    first, second = engine.requests
    assert second.prompt_ids == [
        *first.prompt_ids,
        *first.token_ids,
        *tokenizer.encode(INFORMATION_START + ROME + INFORMATION_END, add_special_tokens=False),
    ]
    assert counts(batch) == {
        "number_of_actions": 2,
        "finish_ratio": 1,
        "number_of_valid_action": 2,
        "ratio_of_valid_action": 1,
        "number_of_valid_search": 1,
        "retrieval_failures": 0,
    }


def test_a_turn_ends_at_the_tag_and_its_last_token_stays_whole(
    runner: Callable[..., Any], rows: Any, retriever: Retriever
) -> None:
    tag_tokenizer = character_tokenizer(words=[">\n\n"])  # one token closes the tag and goes on
    engine = ScriptedRollout(
        [tag_tokenizer.encode(SEARCH[:-1] + ">\n\nmore"), ANSWER], tokenizer=tag_tokenizer
    )
    length, url = "data.max_response_length=900", f"retriever.url={retriever.url}"
    batch = runner(engine, LOOP, length, url, tokenizer=tag_tokenizer).run(rows(["q"]))
    assert tag_tokenizer.decode(engine.requests[0].token_ids) == SEARCH + "\n\n"
    assert text(tag_tokenizer, batch).startswith(SEARCH + "\n\n" + INFORMATION_START)


def test_a_turn_without_an_action_is_told_so(run_row: RunRow, tokenizer: Any) -> None:
    _, batch = run_row(["Rome, I think", "<search>Italy", ANSWER])
    assert text(tokenizer, batch, 0) == INVALID_ACTION_TEXT * 2
    env_counts = counts(batch)
    assert (env_counts["number_of_actions"], env_counts["number_of_valid_action"]) == (3, 1)
    assert env_counts["ratio_of_valid_action"] == pytest.approx(1 / 3)


def test_after_max_turns_searches_comes_a_turn_that_does_not_search(
    run_row: RunRow, tokenizer: Any, retriever: Retriever
) -> None:
    before = retriever.answered()
    engine, batch = run_row([SEARCH] * 9, "max_turns=2")
    assert len(engine.requests) == 3
    assert retriever.answered() - before == 2
    assert text(tokenizer, batch).endswith(SEARCH)
    env_counts = counts(batch)
    assert (env_counts["finish_ratio"], env_counts["number_of_valid_search"]) == (0, 3)


def test_a_long_observation_keeps_its_closing_tag(run_row: RunRow, tokenizer: Any) -> None:
    _, batch = run_row([SEARCH, ANSWER], "data.max_obs_length=60")
    observed = text(tokenizer, batch, 0)
    assert len(observed) == 60
    assert observed.startswith(INFORMATION_START + 'Doc 1(Title: "Rome") ')
    assert observed.endswith(INFORMATION_END)


def test_an_observation_that_leaves_no_room_is_not_appended(
    run_row: RunRow, tokenizer: Any
) -> None:
    engine, batch = run_row([SEARCH, ANSWER], f"data.max_response_length={len(SEARCH) + 9}")
    assert len(engine.requests) == 1
    assert text(tokenizer, batch) == SEARCH


def test_turns_end_where_the_model_length_ends(run_row: RunRow, tokenizer: Any) -> None:
    _, batch = run_row(["Rome"] * 9, "actor_rollout_ref.rollout.max_model_len=120")
    assert text(tokenizer, batch) == "Rome</s>"
    assert counts(batch)["number_of_actions"] == 1


def test_a_turn_without_tokens_is_the_last(run_row: RunRow, tokenizer: Any) -> None:
    engine, batch = run_row(["Rome", [], ANSWER])
    assert len(engine.requests) == 2
    assert text(tokenizer, batch) == f"Rome</s>{INVALID_ACTION_TEXT}"


def test_a_retriever_that_does_not_answer_gives_empty_information(
    run_row: RunRow, tokenizer: Any
) -> None:
    nowhere = ("retriever.url=http://127.0.0.1:9/retrieve", "retriever.retries=0")
    _, batch = run_row([SEARCH, ANSWER], *nowhere)
    assert text(tokenizer, batch, 0) == INFORMATION_START + INFORMATION_END
    assert counts(batch)["retrieval_failures"] == 1


def test_a_service_that_does_not_answer_is_told_before_training(
    config: Callable[..., Any], tokenizer: Any, retriever: Retriever
) -> None:
    from hone.checks.agent_checks import AgentChecks

    def problems(url: str, *overrides: str) -> list[str]:
        settings = config(LOOP, f"retriever.url={url}", *overrides)
        return list(AgentChecks(settings, tokenizer, {}).problems())

    assert problems(retriever.url) == []
    for url in ("http://127.0.0.1:9/retrieve", "127.0.0.1:8000/retrieve", retriever.url + "x"):
        (problem,) = problems(url)
        assert problem.startswith(f"retriever.url does not answer ({url}: ")
        assert "start `hone serve-retriever" in problem
    limit = "actor_rollout_ref.rollout.multi_turn.max_observation_tokens"
    num_tags = len(tokenizer.encode(INFORMATION_START + INFORMATION_END))
    (problem,) = problems(retriever.url, f"{limit}={num_tags}")
    assert problem.startswith(f"{limit}={num_tags} leaves no token for passages")
    assert problems(retriever.url, f"{limit}={num_tags + 1}") == []


@pytest.mark.parametrize(
    ("turn", "action"),
    [
        ("<search> a b </search>", Action("search", "a b")),
        ("<answer>x</answer><search>y</search>", Action("answer", "x")),
        ("<search><answer>x</answer>", Action("answer", "x")),
        ("</search> <search>", None),
        ("<search>" * 9, None),
        ("<think>a</think>", None),
    ],
)
def test_the_first_closed_action_counts(turn: str, action: Action | None) -> None:
    assert read_action(turn) == action


def test_two_steps_of_grpo_with_a_real_retriever(tmp_path: Path, retriever: Retriever) -> None:
    """Some tokens are whole actions, so that a random policy searches and answers."""
    from hone.tracking import read_metrics
    from hone.trainer.main_ppo import run
    from hone.verl.dialect import load_config

    tokenizer = character_tokenizer(words=[SEARCH, "<search> Seine </search>", ANSWER])
    save_pretrained(tiny_lm(len(tokenizer), hidden=32, mlp=48, seed=3), tokenizer, tmp_path / "m")
    row = {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": "Capital of Italy?"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Rome"]}},
    }
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    run(
        load_config(
            [
                "algorithm.adv_estimator=grpo",
                f"data.train_files={tmp_path}/rows.jsonl",
                f"data.val_files={tmp_path}/rows.jsonl",
                "data.train_batch_size=4",
                "data.max_start_length=32",
                "data.max_prompt_length=600",
                "data.max_response_length=40",
                "data.max_obs_length=80",
                f"actor_rollout_ref.model.path={tmp_path}/m",
                "actor_rollout_ref.actor.optim.lr=1e-3",
                "actor_rollout_ref.actor.state_masking=true",
                "actor_rollout_ref.rollout.n_agent=4",
                f"retriever.url={retriever.url}",
                "retriever.topk=1",
                "max_turns=2",
                "do_search=true",
                "trainer.total_training_steps=2",
                "trainer.test_freq=2",
                "trainer.logger=[jsonl]",
                "trainer.device=cpu",
                f"trainer.default_local_dir={tmp_path}/run",
                f"trainer.rollout_data_dir={tmp_path}/rollouts",
            ]
        )
    )
    steps = [line for line in read_metrics(tmp_path / "run") if "training/global_step" in line]
    assert len(steps) == 2
    assert sum(step["env/number_of_valid_search"] for step in steps) > 0
    assert {
        "state_tokens/coverage",
        "env/number_of_actions/max",
        "env/finish_ratio",
        "env/ratio_of_valid_action",
    } <= set(steps[0])
    assert "val-aux/nq/env/number_of_valid_search/mean@1" in steps[-1]
    files = os.listdir(tmp_path / "rollouts")
    assert len(files) == 2
