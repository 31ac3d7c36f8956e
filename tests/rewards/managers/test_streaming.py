"""verl's reward loop: one trajectory per call of `run_single`, limits of calls, and the way into a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf

from hone.config import load_config
from hone.protocol import DataProto
from hone.rewards.loading import load_reward_manager
from hone.rewards.managers import streaming
from hone.rewards.managers.streaming import (
    AsyncTokenBucket,
    DAPORewardManager,
    NaiveRewardManager,
    RateLimitedRewardManager,
    RewardManagerBase,
)

Make = Callable[..., DataProto]


@pytest.fixture(autouse=True)
def no_limits_before() -> Iterator[None]:
    yield
    RateLimitedRewardManager._class_initialized = False


async def by_length(solution_str: str, ground_truth: Any, **more: Any) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"score": len(solution_str), "right": solution_str == ground_truth}


def plain(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return float(solution_str == ground_truth)


def test_one_trajectory_is_scored_by_a_plain_and_an_async_function(
    make_batch: Make, tokenizer: Any
) -> None:
    data = make_batch(["ab"], truths=["ab"])
    one = NaiveRewardManager({}, tokenizer, plain)
    assert asyncio.run(one.run_single(data)) == {
        "reward_score": 1.0,
        "reward_extra_info": {"acc": 1.0},
    }
    other = NaiveRewardManager(config={}, tokenizer=tokenizer, compute_score=by_length)
    assert (one.is_async_reward_score, other.is_async_reward_score) == (False, True)
    found = asyncio.run(other.run_single(data))
    assert found == {"reward_score": 2.0, "reward_extra_info": {"score": 2, "right": True}}


def test_a_batch_has_each_score_at_the_last_token_of_the_policy(
    make_batch: Make, tokenizer: Any
) -> None:
    data = make_batch(["ab", "abc"], truths=["x", "abc"], masks=["110", "1100"])
    manager = NaiveRewardManager({}, tokenizer, by_length)
    found: Any = manager(data, return_dict=True)
    assert found["reward_tensor"].nonzero().tolist() == [[0, 1], [1, 1]]
    assert found["reward_tensor"].sum(dim=1).tolist() == [2.0, 2.0]  # what the policy wrote
    assert found["reward_extra_info"]["right"] == [False, False]


def test_dapo_takes_the_penalty_off(make_batch: Make, tokenizer: Any) -> None:
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
    manager = DAPORewardManager(config, tokenizer, plain)
    found = asyncio.run(manager.run_single(make_batch(["ab"], truths=["ab"])))  # 3 tokens of 4
    assert found["reward_score"] == 0.5
    assert found["reward_extra_info"] == {"acc": 1.0, "overlong_reward": -0.5, "overlong": True}


def test_at_most_so_many_calls_run_at_once(make_batch: Make, tokenizer: Any) -> None:
    running, most = 0, 0

    async def counted(**_: Any) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return 1.0

    config = OmegaConf.create({"reward_model": {"max_concurrent": 2}})
    manager = RateLimitedRewardManager(config, tokenizer, counted)
    data = make_batch(["a"] * 5)
    for _ in range(2):  # each call has an event loop of its own
        assert manager(data).sum() == 5.0  # type: ignore[union-attr]
    assert most == 2


def test_a_late_or_failing_call_scores_0_and_is_counted(make_batch: Make, tokenizer: Any) -> None:
    async def hangs(**_: Any) -> float:
        await asyncio.sleep(60)
        return 1.0

    async def fails(**_: Any) -> float:
        raise ValueError("service is down")

    config = OmegaConf.create({"reward": {"timeout": 0.01}})
    late = RateLimitedRewardManager(config, tokenizer, hangs)
    found = asyncio.run(late.run_single(make_batch(["a"])))
    assert found == {"reward_score": 0.0, "reward_extra_info": {"timeout": True, "acc": 0.0}}
    broken = RateLimitedRewardManager(config, tokenizer, fails)
    found = asyncio.run(broken.run_single(make_batch(["a"])))
    assert found["reward_extra_info"] == {"error": "service is down", "acc": 0.0}
    assert late.pop_metrics() == {"reward/failures/timeout": 1.0}
    assert broken.pop_metrics() == {"reward/failures/exception": 1.0}


def test_a_bucket_lets_calls_pass_at_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(round(seconds, 2))

    monkeypatch.setattr(streaming.asyncio, "sleep", sleep)
    bucket = AsyncTokenBucket(rate_limit=10.0)
    assert (bucket.max_tokens, bucket.tokens, bucket.last_update) == (10.0, 10.0, None)

    async def ask() -> None:
        for tokens in (4.0, 6.0, 5.0, 25.0):
            await bucket.acquire(tokens)

    asyncio.run(ask())
    assert waits == [0.5, 3.0]


class Mine(RewardManagerBase):
    """As a verl user writes it."""

    def __init__(
        self,
        config,
        tokenizer,
        compute_score,
        reward_router_address=None,
        reward_model_tokenizer=None,
    ):  # type: ignore[no-untyped-def]
        super().__init__(config, tokenizer, compute_score)

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        item = data[0]
        length = int(item.batch["response_mask"].sum())
        if item.non_tensor_batch["reward_model"]["ground_truth"] == "bad":
            raise RuntimeError("cannot")
        text = await self.loop.run_in_executor(None, lambda: "x" * length)
        return {"reward_score": len(text), "reward_extra_info": {"n": length}}


@pytest.mark.parametrize("name", [f"{__name__}:Mine", "rate_limited"])
def test_a_run_finds_it_by_its_name(make_batch: Make, tokenizer: Any, name: str) -> None:
    config = load_config(["actor_rollout_ref.model.path=x", f"reward_model.reward_manager={name}"])
    manager = load_reward_manager(config, tokenizer, 0)
    assert isinstance(manager, RewardManagerBase)
    assert manager.config is config
    manager.close()


def test_a_manager_that_raises_is_settled_by_the_policy(make_batch: Make, tokenizer: Any) -> None:
    data = make_batch(["ab", "abc"], truths=["good", "bad"])
    settings = ["actor_rollout_ref.model.path=x", "reward_model.reward_kwargs.failure_score=-1"]
    manager = Mine(load_config(settings), tokenizer, None)
    found: Any = manager(data, return_dict=True)
    assert found["reward_tensor"].sum(dim=1).tolist() == [3.0, -1.0]
    assert found["reward_extra_info"]["reward_failure"] == [None, "exception"]
    assert manager.pop_metrics() == {"reward/failures/exception": 1.0}
    with pytest.raises(RuntimeError, match="cannot"):
        Mine({}, tokenizer, None)(data)
