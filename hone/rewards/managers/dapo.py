"""The dapo manager adds a soft penalty for responses close to the length limit to the naive scores.

The reward includes the penalty; `acc` and `score` do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hone.config.reward import OverlongBufferConfig
from hone.rewards.failures import WrongSetting
from hone.rewards.managers.rule import NaiveRewardManager
from hone.tokenizer import Tokenizer
from hone.types import Function, JsonValue, Settings


def overlong_penalty(length: int, max_resp_len: int, buffer_len: int, factor: float) -> float:
    """Returns the penalty: 0 before the buffer, then linear in `length`, -factor at `max_resp_len`."""
    excess = length - (max_resp_len - buffer_len)
    return min(-excess / buffer_len * factor, 0.0)


class DAPORewardManager(NaiveRewardManager):
    """Adds DAPO's overlong penalty when `overlong_buffer_cfg.enable` is set."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        num_examine: int,
        compute_score: Function | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: OverlongBufferConfig | Settings | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **kwargs)
        if isinstance(overlong_buffer_cfg, Mapping):
            overlong_buffer_cfg = OverlongBufferConfig(**overlong_buffer_cfg)
        self.buffer = overlong_buffer_cfg or OverlongBufferConfig()
        self.max_resp_len = max_resp_len
        if self.buffer.enable and (not max_resp_len or not 0 < self.buffer.len <= max_resp_len):
            raise WrongSetting(
                f"overlong_buffer_cfg.len={self.buffer.len} with max_resp_len={max_resp_len}: the "
                "buffer must have at least one token and fit into the response. Set "
                "reward_model.reward_kwargs.{max_resp_len,overlong_buffer_cfg.len}."
            )

    def shape_rewards(
        self, scores: list[float], lengths: list[int]
    ) -> tuple[list[float], dict[str, Sequence[JsonValue]]]:
        buffer, max_resp_len = self.buffer, self.max_resp_len
        if not buffer.enable or max_resp_len is None:
            return scores, {}
        limits = max_resp_len, buffer.len, buffer.penalty_factor
        penalties = [overlong_penalty(length, *limits) for length in lengths]
        rewards = [score + penalty for score, penalty in zip(scores, penalties, strict=True)]
        if not buffer.log:
            return rewards, {}
        is_overlong = [penalty < 0 for penalty in penalties]
        return rewards, {"overlong_reward": penalties, "overlong": is_overlong}
