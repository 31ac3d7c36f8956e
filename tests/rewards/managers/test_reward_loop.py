"""Managers with `run_single`: calls are limited, the failure policy applies, runs select them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf

from hone.protocol import DataProto
from hone.rewards.failures import RewardError, WrongSetting
from hone.rewards.loading import load_reward_manager
from hone.rewards.managers import reward_loop
from hone.rewards.managers.reward_loop import (
    AsyncTokenBucket,
    RateLimitedRewardManager,
    RewardManagerBase,
)
from hone.rewards.scorer import ScorerSignatureError
from hone.verl.dialect import load_config

MakeBatch = Callable[..., DataProto]


async def by_length(solution_str: str, ground_truth: Any, **kwargs: Any) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"score": len(solution_str), "right": solution_str == ground_truth}


def exact_match(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return float(solution_str == ground_truth)


def test_concurrent_calls_are_limited(make_batch: MakeBatch, tokenizer: Any) -> None:
    running, max_running = 0, 0

    async def count_calls(**_: Any) -> float:
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        await asyncio.sleep(0.001)
        running -= 1
        return 1.0

    config = OmegaConf.create({"reward_model": {"max_concurrent": 2}})
    manager = RateLimitedRewardManager(config, tokenizer, count_calls)
    data = make_batch(["a"] * 5)
    for _ in range(2):  # each call has an event loop of its own
        assert manager(data).sum() == 5.0  # type: ignore[union-attr]
    assert max_running == 2


def test_managers_with_equal_limits_share_them_and_others_do_not(tokenizer: Any) -> None:
    def manager(**limits: int) -> RateLimitedRewardManager:
        return RateLimitedRewardManager({"reward_model": limits}, tokenizer, by_length)

    first = manager(max_rpm=60)
    assert manager(max_rpm=60).limits is first.limits  # training and validation share them
    assert manager(max_rpm=120).limits.requests.rate_limit == 2.0  # type: ignore[union-attr]
    assert first.limits.requests.rate_limit == 1.0  # type: ignore[union-attr]
    assert manager().limits.requests is None
    with pytest.raises(WrongSetting, match="max_concurrent=0"):  # no call would ever start
        manager(max_concurrent=0)


def test_a_late_or_failing_call_scores_0_and_is_counted(
    make_batch: MakeBatch, tokenizer: Any
) -> None:
    async def hangs(**_: Any) -> float:
        await asyncio.sleep(60)
        return 1.0

    async def fails(**_: Any) -> float:
        raise ValueError("service is down")

    config = OmegaConf.create({"reward": {"timeout": 0.01}})
    late = RateLimitedRewardManager(config, tokenizer, hangs)
    result = asyncio.run(late.run_single(make_batch(["a"])))
    assert result == {"reward_score": 0.0, "reward_extra_info": {"timeout": True, "acc": 0.0}}
    broken = RateLimitedRewardManager(config, tokenizer, fails)
    result = asyncio.run(broken.run_single(make_batch(["a"])))
    assert result["reward_extra_info"] == {"error": "service is down", "acc": 0.0}
    assert late.pop_metrics() == {"reward/failures/timeout": 1.0}
    assert broken.pop_metrics() == {"reward/failures/exception": 1.0}


def test_a_token_bucket_limits_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(round(seconds, 2))

    monkeypatch.setattr(reward_loop.asyncio, "sleep", sleep)
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda _: sum(waits))
    bucket = AsyncTokenBucket(rate_limit=10.0)
    assert (bucket.max_tokens, bucket.tokens, bucket.last_update) == (10.0, 10.0, None)

    async def acquire_all() -> None:
        for tokens in (4.0, 6.0, 5.0, 25.0):
            await bucket.acquire(tokens)

    asyncio.run(acquire_all())
    assert waits == [0.5, 2.5]


class Mine(RewardManagerBase):
    """A manager as verl's users write it."""

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
        if item.non_tensor_batch["reward_model"]["ground_truth"] == "nan":
            return {"reward_score": float("nan")}
        text = await self.loop.run_in_executor(None, lambda: "x" * length)
        return {"reward_score": len(text), "reward_extra_info": {"n": length}}


@pytest.mark.parametrize("name", [f"{__name__}:Mine", "rate_limited"])
def test_a_manager_is_selected_by_its_name(
    make_batch: MakeBatch, tokenizer: Any, name: str
) -> None:
    config = load_config(["actor_rollout_ref.model.path=x", f"reward_model.reward_manager={name}"])
    manager = load_reward_manager(config, tokenizer, 0)
    assert isinstance(manager, RewardManagerBase)
    assert manager.config is config
    manager.close()


def test_the_failure_policy_applies_to_a_manager_that_raises(
    make_batch: MakeBatch, tokenizer: Any
) -> None:
    data = make_batch(["ab", "abc", "a"], truths=["good", "bad", "nan"])
    settings = ["actor_rollout_ref.model.path=x", "reward_model.reward_kwargs.failure_score=-1"]
    manager = Mine(load_config(settings), tokenizer, None)
    result: Any = manager(data, return_dict=True)
    assert result["reward_tensor"].sum(dim=1).tolist() == [3.0, -1.0, -1.0]
    assert result["reward_extra_info"]["reward_failure"] == [None, "exception", "nan"]
    assert manager.pop_metrics() == {"reward/failures/exception": 1.0, "reward/failures/nan": 1.0}
    with pytest.raises(RuntimeError, match="cannot"):
        Mine({}, tokenizer, None)(data)
    with pytest.raises(RewardError, match="the score is NaN"):
        Mine({}, tokenizer, None)(data[2:3])


def managed(tokenizer: Any, scorer: Any, *settings: str) -> Any:
    config = load_config(
        [
            "actor_rollout_ref.model.path=x",
            "reward_model.reward_manager=rate_limited",
            "data.reward_fn_key=task",
            *settings,
        ]
    )
    return load_reward_manager(config, tokenizer, 0, compute_score=scorer)


def test_the_settings_of_rules_reach_a_limited_manager(
    make_batch: MakeBatch, tokenizer: Any
) -> None:
    truth = {"target": 5, "numbers": [2, 3]}
    data = make_batch(["<answer>2-3</answer>"], truths=[truth], task=["countdown"])
    settings = ("reward_model.format_score=0.3", "reward_model.server.url=http://127.0.0.1:1")
    manager = managed(tokenizer, None, *settings)
    assert manager(data).sum().item() == pytest.approx(0.3)
    assert manager.pop_metrics() == {}


def test_a_limited_manager_passes_the_arguments_that_a_function_names(
    make_batch: MakeBatch, tokenizer: Any
) -> None:
    def length(solution_str: str, weight: float = 1.0) -> float:
        return weight * len(solution_str)

    data = make_batch(["ab"], masks=["010"], task=["s"])
    weight = "+reward_model.score_kwargs.weight=2"
    assert managed(tokenizer, length, weight)(data).sum().item() == 2.0
    everything = managed(tokenizer, length, weight, "reward_model.score_observations=true")
    assert everything(data).sum().item() == 4.0


def test_the_failure_policy_applies_to_a_limited_manager(
    make_batch: MakeBatch, tokenizer: Any
) -> None:
    def fails(solution_str: str) -> float:
        raise ValueError("no score")

    data = make_batch(["ab"], task=["s"])
    score = "reward_model.reward_kwargs.failure_score=-1"
    assert managed(tokenizer, fails, score)(data).sum().item() == -1.0
    with pytest.raises(ValueError, match="no score"):
        managed(tokenizer, fails, "reward_model.reward_kwargs.on_failure=raise")(data)


def test_a_limited_manager_refuses_a_function_that_it_cannot_call(tokenizer: Any) -> None:
    with pytest.raises(ScorerSignatureError, match="cannot be called"):
        managed(tokenizer, lambda text: 1.0)
