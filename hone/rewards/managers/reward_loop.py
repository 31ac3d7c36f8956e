"""Reward managers whose method `run_single` scores one trajectory, as in verl's reward loop."""

from __future__ import annotations

import asyncio
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hone.event_loop import run_coroutine
from hone.protocol import DataProto
from hone.rewards.async_scorer import await_scorer, is_async
from hone.rewards.failures import Failed, RewardError, Scored, SetupError, WrongSetting
from hone.rewards.managers.rule import (
    AbstractRewardManager,
    extra_columns,
    place_on_last_policy_token,
    response_tokens,
)
from hone.rewards.scorer import accepted_arguments, counted_mishaps, read_result, read_rows
from hone.rewards.scores.table import default_compute_score
from hone.suggestions import suggestion
from hone.text import error_text, printable
from hone.tokenizer import Tokenizer
from hone.types import Fields, Function, Settings

logger = logging.getLogger(__name__)

_LIMITS = ("max_concurrent", "max_rpm", "max_tpm", "estimated_tokens_per_request")
DEFAULT_TIMEOUT_S = 300.0


class RewardManagerBase(AbstractRewardManager, ABC):
    """The base class; it calls `run_single` concurrently for all trajectories of a batch."""

    _class_initialized = False

    def __init__(
        self,
        config: Settings,
        tokenizer: Tokenizer,
        compute_score: Function | None = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Tokenizer | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.compute_score = compute_score or default_compute_score
        self.is_async_reward_score = is_async(self.compute_score)
        self.reward_router_address = reward_router_address
        self.reward_model_tokenizer = reward_model_tokenizer
        self.loop = asyncio._get_running_loop()  # `_run_all` sets the loop that scores the batch
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: Settings, tokenizer: Tokenizer) -> None:
        """Prepares the class; every instance calls this, so an override checks `_class_initialized`."""
        cls._class_initialized = True

    @abstractmethod
    async def run_single(self, data: DataProto) -> Fields:
        """Returns `{"reward_score", "reward_extra_info"}` for a batch of one trajectory."""

    @classmethod
    def assemble_rm_scores(cls, data: DataProto, scores: list[float]) -> torch.Tensor:
        """Returns rewards [B, T], each on the last policy token of its row."""
        return place_on_last_policy_token(data, scores)

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | Fields:
        results = run_coroutine(self._run_all(data))
        rewards = self.assemble_rm_scores(data, [result["reward_score"] for result in results])
        extras = extra_columns([result.get("reward_extra_info") or {} for result in results])
        return {"reward_tensor": rewards, "reward_extra_info": extras} if return_dict else rewards

    async def _run_all(self, data: DataProto) -> list[Fields]:
        self.loop = asyncio.get_running_loop()
        calls = (self._run_one(data[row : row + 1]) for row in range(len(data)))
        return list(await asyncio.gather(*calls))

    async def _run_one(self, data: DataProto) -> Fields:
        """Calls `run_single`, and applies the failure policy of `reward_kwargs`, by default `raise`."""
        reward_kwargs = reward_kwargs_of(self.config)
        try:
            result = await self.run_single(data)
            outcome = read_result(result["reward_score"])
            if isinstance(outcome, Scored):
                return {**result, "reward_score": outcome.score}
            error: Exception = RewardError(f"the manager's result is invalid: {outcome.detail}")
        except SetupError:
            raise
        except Exception as exception:  # a user's manager may raise anything; the policy applies
            error, outcome = exception, Failed("exception", error_text(exception))
        if reward_kwargs.get("on_failure", "raise") != "score":
            raise error
        self._count_failure(outcome)
        return result_dict(reward_kwargs["failure_score"], {"reward_failure": outcome.reason})

    def _count_failure(self, failed: Failed) -> None:
        """Counts a failure, and logs the first failure of each reason."""
        self.failures[failed.reason] += 1
        if self.failures[failed.reason] == 1:
            detail = printable(failed.detail)
            logger.warning("a response could not be scored: %s: %s", failed.reason, detail)

    async def _score(self, data: DataProto) -> tuple[float, Fields, int]:
        """Returns the score, the extra information and the number of tokens of the trajectory's last row."""
        data = data[len(data) - 1 : len(data)]
        ids, is_policy = response_tokens(data)
        columns, tokenizer = data.non_tensor_batch, self.tokenizer
        source_key = (self.config.get("data") or {}).get("reward_fn_key") or "data_source"
        score_observations = bool(_reward_block(self.config).get("score_observations"))
        (row,) = read_rows(columns, ids, is_policy, tokenizer, source_key, score_observations)
        options: Fields = {}
        if self.reward_router_address is not None:
            options["reward_router_address"] = self.reward_router_address
            options["reward_model_tokenizer"] = self.reward_model_tokenizer
        function: Function = self.compute_score
        arguments = accepted_arguments(function, row.arguments(), options)
        with counted_mishaps() as mishaps:
            result = await await_scorer(function, arguments)
        self.failures.update(mishaps)
        outcome = read_result(result)
        if isinstance(outcome, Failed):
            raise RewardError(f"the score function's result is invalid: {outcome.detail}")
        extra_info = dict(result) if isinstance(result, Mapping) else {"acc": outcome.score}
        return outcome.score, extra_info, len(ids[0])


class AsyncTokenBucket:
    """Limits tokens to `rate_limit` per second; the bucket starts full and holds `max_tokens`."""

    def __init__(self, rate_limit: float, max_tokens: float | None = None) -> None:
        self.rate_limit = rate_limit
        self.max_tokens = max_tokens or rate_limit
        self.tokens = self.max_tokens
        self.last_update: float | None = None

    async def acquire(self, num_tokens: float = 1.0) -> None:
        """Takes tokens, and waits until missing tokens are refilled; calls proceed in order."""
        self._refill()
        num_missing = num_tokens - self.tokens
        self.tokens -= num_tokens
        if num_missing > 0:
            await asyncio.sleep(num_missing / self.rate_limit)
            self._refill()

    def _refill(self) -> None:
        now = asyncio.get_running_loop().time()
        elapsed_s = 0.0 if self.last_update is None else now - self.last_update
        self.tokens = min(self.max_tokens, self.tokens + elapsed_s * self.rate_limit)
        self.last_update = now


class CallLimits:
    """Limits concurrent calls, calls per minute and tokens per minute."""

    def __init__(
        self,
        max_concurrent: int = 1,
        max_rpm: float | None = None,
        max_tpm: float | None = None,
        estimated_tokens_per_request: int = 2000,
    ) -> None:
        limits = {"max_concurrent": max_concurrent, "max_rpm": max_rpm, "max_tpm": max_tpm}
        for name, limit in limits.items():
            if limit is not None and not limit > 0:
                raise WrongSetting(f"{name}={limit} of the reward settings must be positive")
        self.requests = None if max_rpm is None else AsyncTokenBucket(max_rpm / 60.0)
        self.tokens = None if max_tpm is None else AsyncTokenBucket(max_tpm / 60.0)
        self._max_concurrent = max_concurrent
        self._tokens_per_request = estimated_tokens_per_request
        # A semaphore can be awaited only in the event loop that used it first.
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._semaphores = WeakKeyDictionary()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Waits until the limits allow a call; the caller makes the call in the `with` block."""
        if self.requests is not None:
            await self.requests.acquire(1.0)
        if self.tokens is not None:
            await self.tokens.acquire(self._tokens_per_request)
        loop = asyncio.get_running_loop()
        async with self._semaphores.setdefault(loop, asyncio.Semaphore(self._max_concurrent)):
            yield


@functools.cache
def shared_limits(cls: type, **settings: float) -> CallLimits:
    """Returns the limits that all managers of a class with equal settings share."""
    return CallLimits(**settings)  # type: ignore[arg-type]


class RateLimitedRewardManager(RewardManagerBase):
    """Limits concurrent calls and calls per minute, for score functions that call a service.

    Settings of the `reward` (or `reward_model`) block: `max_concurrent`, `max_rpm`, `max_tpm` with
    `estimated_tokens_per_request`, `timeout`. Managers with equal settings, such as those of training
    and validation, share the limits. A failed or late call scores `failure_score` (default 0), with
    `error` or `timeout` in its extra information, unless `on_failure` is raise.
    """

    def __init__(self, config: Settings, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        extra_settings = reward_kwargs_of(config).get("extra") or {}
        known_names = (*_LIMITS, "timeout")
        unknown_names = [name for name in extra_settings if name not in known_names]
        if unknown_names and type(self) is RateLimitedRewardManager:  # a subclass may have others
            name, hint = unknown_names[0], suggestion(unknown_names[0], known_names)
            raise WrongSetting(f"rate_limited has no setting reward_kwargs.{name}.{hint}")
        settings = {**_reward_block(config), **extra_settings}
        limits = {name: settings[name] for name in _LIMITS if settings.get(name) is not None}
        self.limits = shared_limits(type(self), **limits)
        self.timeout: float = settings.get("timeout", DEFAULT_TIMEOUT_S)

    async def run_single(self, data: DataProto) -> Fields:
        async with self.limits.slot():
            try:
                score, extra_info, _ = await asyncio.wait_for(self._score(data), self.timeout)
                return result_dict(score, extra_info)
            except SetupError:
                raise
            except Exception as error:  # a user's score function may raise anything
                reward_kwargs = reward_kwargs_of(self.config)
                if reward_kwargs.get("on_failure") == "raise":
                    raise
                is_late = isinstance(error, asyncio.TimeoutError)
                reason = "timeout" if is_late else "exception"
                self._count_failure(Failed(reason, error_text(error)))
                extra_info = {"timeout": True} if is_late else {"error": str(error)}
                failure_score = reward_kwargs.get("failure_score", 0.0)
                return result_dict(failure_score, {**extra_info, "acc": 0.0})


def result_dict(score: float, extra_info: Fields) -> Fields:
    """Returns the result of `run_single`."""
    return {"reward_score": score, "reward_extra_info": extra_info}


def _reward_block(config: Settings) -> Settings:
    """Returns the reward settings: the block `reward`, or `reward_model`, its name in verl before 0.9."""
    block: Settings = config.get("reward") or config.get("reward_model") or {}
    return block


def reward_kwargs_of(config: Settings) -> Settings:
    """Returns the settings `reward_kwargs` of the reward block."""
    return _reward_block(config).get("reward_kwargs") or {}
