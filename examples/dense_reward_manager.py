"""A reward manager of one's own, outside the package: a reward at every token, not only the last.

    hone train reward_manager.source=importlib \
        reward_manager.module.path=examples/dense_reward_manager.py \
        reward_manager.module.name=DenseRewardManager …

A digit earns a little where it stands, anything else costs as much, and the score of the whole
response (the data source's rule, or your `custom_reward_function`) comes on its last token.
"""

from __future__ import annotations

from typing import Any

import torch

from hone.protocol import DataProto
from hone.rewards.managers import AbstractRewardManager

PER_TOKEN = 0.05


class DenseRewardManager(AbstractRewardManager):
    """Rewards [B, T] that are non-zero at every token the policy wrote."""

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        responses, mask = data.batch["responses"], data.batch["response_mask"].bool()
        rewards = torch.zeros(responses.shape, dtype=torch.float32)  # [B, T]
        scores, digits = [], []
        for row in range(len(data)):
            written = mask[row].nonzero().flatten().tolist()
            pieces = [self.tokenizer.decode([int(responses[row, i])]) for i in written]
            for position, piece in zip(written, pieces, strict=True):
                rewards[row, position] = PER_TOKEN if piece.strip().isdigit() else -PER_TOKEN
            columns = data[row].non_tensor_batch
            score = self.compute_score(
                data_source=columns[self.reward_fn_key],
                solution_str="".join(pieces),
                ground_truth=columns["reward_model"].get("ground_truth"),
                extra_info=columns.get("extra_info"),
            )
            scores.append(float(score["score"] if isinstance(score, dict) else score))
            digits.append(sum(piece.strip().isdigit() for piece in pieces) / max(len(pieces), 1))
            if written:
                rewards[row, written[-1]] += scores[-1]
        extra = {"score": scores, "digit_share": digits}
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards
