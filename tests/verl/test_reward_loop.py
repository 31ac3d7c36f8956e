"""verl's reward loop: `run_single` scores one trajectory."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

from hone.protocol import DataProto
from hone.rewards.scorer import count_mishap
from hone.verl.reward_loop import DAPORewardManager, NaiveRewardManager

MakeBatch = Callable[..., DataProto]


async def by_length(solution_str: str, ground_truth: Any, **kwargs: Any) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"score": len(solution_str), "right": solution_str == ground_truth}


def exact_match(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return float(solution_str == ground_truth)


def test_one_trajectory_is_scored_by_a_plain_and_an_async_function(
    make_batch: MakeBatch, tokenizer: Any
) -> None:
    data = make_batch(["ab"], truths=["ab"])
    sync_manager = NaiveRewardManager({}, tokenizer, exact_match)
    assert asyncio.run(sync_manager.run_single(data)) == {
        "reward_score": 1.0,
        "reward_extra_info": {"acc": 1.0},
    }
    async_manager = NaiveRewardManager(config={}, tokenizer=tokenizer, compute_score=by_length)
    assert (sync_manager.is_async_reward_score, async_manager.is_async_reward_score) == (
        False,
        True,
    )
    result = asyncio.run(async_manager.run_single(data))
    assert result == {"reward_score": 2.0, "reward_extra_info": {"score": 2, "right": True}}


def test_a_plain_wrapper_of_an_async_function_works(make_batch: MakeBatch, tokenizer: Any) -> None:
    @functools.wraps(by_length)
    def wrapper(**arguments: Any) -> Any:
        count_mishap("symbolic_timeout")
        return asyncio.run(by_length(**arguments))

    manager = NaiveRewardManager({}, tokenizer, wrapper)
    assert manager(make_batch(["ab", "abc"])).sum(1).tolist() == [2.0, 3.0]
    assert manager.pop_metrics() == {"reward/failures/symbolic_timeout": 2.0}


def test_a_batch_has_each_score_at_the_last_token_of_the_policy(
    make_batch: MakeBatch, tokenizer: Any
) -> None:
    data = make_batch(["ab", "abc"], truths=["x", "abc"], masks=["110", "1100"])
    manager = NaiveRewardManager({}, tokenizer, by_length)
    result: Any = manager(data, return_dict=True)
    assert result["reward_tensor"].nonzero().tolist() == [[0, 1], [1, 1]]
    assert result["reward_tensor"].sum(dim=1).tolist() == [
        2.0,
        2.0,
    ]  # the length of the policy's text
    assert result["reward_extra_info"]["right"] == [False, False]


def test_dapo_subtracts_the_penalty(make_batch: MakeBatch, tokenizer: Any) -> None:
    config = OmegaConf.create(
        {
            "reward_model": {
                "reward_kwargs": {
                    "max_resp_len": 4,
                    "overlong_buffer_cfg": {
                        "enable": True,
                        "len": 2,
                        "penalty_factor": 1.0,
                        "log": True,
                    },
                }
            }
        }
    )
    manager = DAPORewardManager(config, tokenizer, exact_match)
    result = asyncio.run(manager.run_single(make_batch(["ab"], truths=["ab"])))  # 3 tokens of 4
    assert result["reward_score"] == 0.5
    assert result["reward_extra_info"] == {"acc": 1.0, "overlong_reward": -0.5, "overlong": True}
