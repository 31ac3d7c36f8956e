"""Two runs of a two-turn loop with the native engine agree bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hone.agents.runner import LoopRunner
from hone.event_loop import run_coroutine
from hone.models.policy import PolicyModel
from hone.models.tiny import tiny_lm
from hone.protocol import DataProto
from hone.rollout.native.core import NativeCore
from hone.rollout.native.engine import NativeRollout

LOOP = Path(__file__).resolve().parents[2] / "examples" / "two_turn_loop.py"
PROMPTS = ["1+1=", "what is 7 times 8?", "x", "abc", "zz top", "12345", "hi", "a longer one"]


@pytest.fixture
def run_rows(
    runner: Callable[..., LoopRunner], rows: Callable[..., DataProto], tokenizer: Any
) -> Callable[..., DataProto]:
    def run(slots: int, order: list[int]) -> DataProto:
        lm = tiny_lm(len(tokenizer), hidden=32, mlp=64)
        with torch.no_grad():
            for parameter in lm.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(6.0)
        core = NativeCore(
            PolicyModel(lm.eval()),
            eos_ids=(tokenizer.eos_token_id,),
            max_num_seqs=slots,
            max_num_batched_tokens=64,
            tokenizer=tokenizer,
        )
        engine = NativeRollout(core)
        prompts = [PROMPTS[i // 3] for i in order]
        data = rows(
            prompts,
            uid=[f"p{i // 3}" for i in order],
            sample_index=[i % 3 for i in order],
        )
        loop = f"actor_rollout_ref.rollout.agent.default_agent_loop='{LOOP}:TwoTurnAgentLoop'"
        lengths = ("data.max_response_length=40", "data.max_prompt_length=24")
        batch = runner(engine, loop, *lengths).run(data)
        run_coroutine(engine.close())
        return batch

    return run


ROWS = list(range(3 * len(PROMPTS)))


def test_two_runs_agree_bit_for_bit(run_rows: Callable[..., DataProto]) -> None:
    first = run_rows(7, ROWS)
    for _ in range(2):
        again = run_rows(7, ROWS)
        for name in ("prompts", "responses", "response_mask", "rollout_log_probs"):
            assert torch.equal(first.batch[name], again.batch[name]), name
    assert set(first.non_tensor_batch["num_turns"]) == {4}


def test_order_and_slots_change_no_token(run_rows: Callable[..., DataProto]) -> None:
    first = run_rows(64, ROWS)
    order = np.random.default_rng(0).permutation(ROWS).tolist()
    other = run_rows(5, order)
    for position, i in enumerate(order):
        ours, theirs = (
            b.batch["responses"][row][
                b.batch["attention_mask"][row, -b.batch["responses"].shape[1] :].bool()
            ]
            for b, row in ((first, i), (other, position))
        )
        assert ours.tolist() == theirs.tolist()
