from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hone.config.reward import OverlongBufferConfig
from hone.protocol import DataProto
from hone.rewards.managers.dapo import DAPORewardManager, overlong_penalty

MakeBatch = Callable[..., DataProto]


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (22, -1.5)]
)
def test_the_penalty_grows_over_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_resp_len=20, buffer_len=4, factor=1.0) == penalty


def always_one(solution_str: str) -> float:
    return 1.0


@pytest.mark.parametrize("config_type", [dict, OverlongBufferConfig])
def test_the_reward_includes_the_penalty_and_the_score_does_not(
    tokenizer: Any, make_batch: MakeBatch, config_type: Any
) -> None:
    config = config_type(enable=True, len=4, penalty_factor=2.0, log=True)
    # The arguments of verl's class, in its order.
    manager = DAPORewardManager(tokenizer, 0, always_one, "data_source", 10, config)
    result = manager(make_batch(["abc", "abcdefg", "abcdefghi"]), return_dict=True)
    # One token more than characters: the end of the turn counts.
    assert result["reward_tensor"].sum(1).tolist() == [1.0, 0.0, -1.0]
    extras = result["reward_extra_info"]
    assert extras["score"] == [1.0, 1.0, 1.0]
    assert extras["overlong_reward"] == [0.0, -1.0, -2.0]
    assert extras["overlong"] == [False, True, True]


def test_without_log_the_penalty_is_not_reported(tokenizer: Any, make_batch: MakeBatch) -> None:
    config = OverlongBufferConfig(enable=True, len=4)
    manager = DAPORewardManager(
        tokenizer, 0, always_one, max_resp_len=5, overlong_buffer_cfg=config
    )
    assert set(manager(make_batch(["abc"]), return_dict=True)["reward_extra_info"]) == {"score"}


@pytest.mark.parametrize("config", [None, {"enable": False, "len": 4}])
def test_without_the_penalty_it_is_the_naive_manager(
    tokenizer: Any, make_batch: MakeBatch, config: Any
) -> None:
    manager = DAPORewardManager(tokenizer, 0, always_one, overlong_buffer_cfg=config)
    assert manager(make_batch(["a" * 50])).sum() == 1.0


@pytest.mark.parametrize(("limit", "length"), [(None, 4), (10, 0), (10, 11)])
def test_a_buffer_that_does_not_fit_is_refused(
    tokenizer: Any, limit: int | None, length: int
) -> None:
    config = OverlongBufferConfig(enable=True, len=length)
    with pytest.raises(ValueError, match=r"overlong_buffer_cfg\.len"):
        DAPORewardManager(tokenizer, 0, max_resp_len=limit, overlong_buffer_cfg=config)
