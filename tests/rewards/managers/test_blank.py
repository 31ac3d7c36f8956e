from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hone.protocol import DataProto
from hone.rewards.managers.blank import BlankRewardManager


def test_every_reward_is_zero_and_the_format_is_verls(
    tokenizer: Any, make_batch: Callable[..., DataProto]
) -> None:
    data = make_batch(["abc", "d"], "no such source")
    manager = BlankRewardManager(tokenizer, 0)
    assert manager(data).shape == data.batch["responses"].shape
    assert manager(data).abs().sum() == 0
    assert manager(data, return_dict=True)["reward_extra_info"] == {}
    assert manager.pop_metrics() == {}
