"""Decoding in the caller's thread and in the runner's thread gives the same bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hone.agents.contract import LOOPS, AgentLoopBase, AgentLoopOutput
from hone.agents.groups import FinishedGroup, GroupRequest
from hone.agents.runner import LoopRunner
from hone.event_loop import run_coroutine
from hone.models.policy import PolicyModel
from hone.models.tiny import tiny_lm
from hone.protocol import DataProto
from hone.rollout.native.core import NativeCore
from hone.rollout.native.engine import NativeRollout

PROMPTS = ["1+1=", "what is 7 times 8?", "x", "abc", "zz top"]
SAMPLES = 3
DEADLINE_S = 120.0


class TurnsLoop(AgentLoopBase):
    """Runs the number of turns in the row; odd prompts get longer turns."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt, response, mask, log_probs = self.prompt_ids(row), [], [], []
        for turn in range(row["turns"]):
            out = await self.server_manager.generate(
                prompt_ids=prompt + response,
                sampling_params={**sampling_params, "max_tokens": 3 + turn + len(prompt) % 2},
            )
            response += [*out.token_ids, 5]
            mask += [1] * len(out.token_ids) + [0]
            log_probs += [*out.log_probs, 0.0]
        return AgentLoopOutput(prompt, response, mask, log_probs, num_turns=2 * row["turns"])


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the loop during the tests of this file."""
    monkeypatch.setitem(LOOPS.entries, "turns_for_test", TurnsLoop)


Runner = Callable[..., Any]


@pytest.fixture
def running(runner: Runner, tokenizer: Any) -> Callable[[], Any]:
    lm = tiny_lm(len(tokenizer), hidden=32, mlp=64)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)

    @contextmanager
    def build() -> Iterator[LoopRunner]:
        core = NativeCore(
            PolicyModel(lm.eval()),
            eos_ids=(tokenizer.eos_token_id,),
            max_num_seqs=8,
            max_num_batched_tokens=64,
            tokenizer=tokenizer,
        )
        engine = NativeRollout(core)
        lengths = ("data.max_response_length=60", "data.max_prompt_length=24")
        built: LoopRunner = runner(engine, *lengths)
        yield built
        built.close()
        run_coroutine(engine.close())

    return build


@pytest.fixture
def submission(
    rows: Callable[..., DataProto], requests: Callable[..., list[GroupRequest]]
) -> Callable[[int], list[GroupRequest]]:
    """The groups of loops with so many turns, numbered from 100 x turns."""

    def build(turns: int) -> list[GroupRequest]:
        order = range(SAMPLES * len(PROMPTS))
        data = rows(
            [PROMPTS[i // SAMPLES] for i in order],
            uid=[f"{turns} turns, p{i // SAMPLES}" for i in order],
            sample_index=[i % SAMPLES for i in order],
            agent_name=["turns_for_test"] * len(order),
            turns=[turns] * len(order),
        )
        return requests(data, 100 * turns)

    return build


def bits(groups: list[FinishedGroup]) -> dict[int, list[Any]]:
    """Returns tokens, masks and log-probs of each group."""
    return {
        group.number: [
            (o.response_ids, o.response_mask, o.response_logprobs) for o in group.outputs
        ]
        for group in groups
    }


def wait_for_groups(runner: LoopRunner, groups: int) -> list[FinishedGroup]:
    """Waits for this many groups of a runner with a decode thread, a few at a time."""
    finished: list[FinishedGroup] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(finished) < groups and time.monotonic() < deadline:
        finished += runner.pop_finished(1, 5.0)
    return finished


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_both_drivers_give_the_same_bits(
    running: Callable[[], Any], submission: Callable[[int], list[GroupRequest]], turns: int
) -> None:
    with running() as caller_driven:
        caller_driven.submit(submission(turns))
        caller_driven.run_until(lambda: caller_driven.num_ready() == len(PROMPTS))
        expected = bits(caller_driven.pop_finished())
    with running() as thread_driven:
        thread_driven.start()
        thread_driven.submit(submission(turns))
        finished = bits(wait_for_groups(thread_driven, len(PROMPTS)))
    assert finished == expected
    assert len(expected) == len(PROMPTS)


def test_submissions_that_overlap_give_what_they_give_one_by_one(
    running: Callable[[], Any], submission: Callable[[int], list[GroupRequest]]
) -> None:
    with running() as one_by_one:
        expected: dict[int, list[Any]] = {}
        for turns in (1, 2, 5):
            one_by_one.submit(submission(turns))
            one_by_one.run_until(lambda: False)  # until no loop runs
            expected |= bits(one_by_one.pop_finished())
    with running() as caller_driven:
        for turns in (5, 1, 2):
            caller_driven.submit(submission(turns))
        caller_driven.run_until(lambda: False)
        assert bits(caller_driven.pop_finished()) == expected
    with running() as thread_driven:
        thread_driven.start()
        for turns in (2, 5, 1):
            thread_driven.submit(submission(turns))
        assert bits(wait_for_groups(thread_driven, 3 * len(PROMPTS))) == expected


def test_the_rest_goes_on_after_some_groups_were_taken(
    running: Callable[[], Any], submission: Callable[[int], list[GroupRequest]]
) -> None:
    with running() as runner:
        runner.submit(submission(2))
        runner.run_until(lambda: False)
        expected = bits(runner.pop_finished())
    with running() as runner:
        runner.submit(submission(2))
        finished: list[FinishedGroup] = []
        while runner.pending_numbers():
            runner.run_until(lambda: runner.num_ready() >= 1)
            finished += runner.pop_finished(1)
    assert bits(finished) == expected
