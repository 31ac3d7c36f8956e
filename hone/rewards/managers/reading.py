"""Converts a batch to the rows that scorers read: text, ground truth, extra information.

The text contains only the policy's tokens (`response_mask` 1), without special tokens. The output
of tools, searches and users is only in `extra_info["transcript"]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, groupby
from typing import TYPE_CHECKING

import torch

from hone.ops.statistics import last_true_index, split_at_response
from hone.protocol import DataProto
from hone.rewards.failures import WrongSetting
from hone.rewards.outcome import OBSERVATION, POLICY, ScorerInput, policy_text
from hone.tokenizer import Tokenizer
from hone.types import Fields, Settings

if TYPE_CHECKING:
    from tensordict import TensorDict

_NUM_TURNS_COLUMNS = ("__num_turns__", "num_turns")
_ROLLOUT_SCORE_COLUMNS = ("reward_scores", "rollout_reward_scores")


def batch_tensors(data: DataProto) -> TensorDict:
    """Returns the batch's tensors; a batch without tensors raises ValueError."""
    if data.batch is None:
        raise ValueError("the batch has no tensors; a reward manager needs 'responses'")
    return data.batch


def response_attention(data: DataProto) -> torch.Tensor:
    """Returns the attention mask of the responses, bool [B, T]."""
    batch = batch_tensors(data)
    _, attention = split_at_response(batch["attention_mask"], batch["responses"])
    return attention.bool()


def valid_response_ids(data: DataProto) -> list[list[int]]:
    """Returns the token ids of each response without padding."""
    responses = batch_tensors(data)["responses"].tolist()
    rows = zip(responses, response_attention(data).tolist(), strict=True)
    return [list(compress(ids, mask)) for ids, mask in rows]


def policy_mask(data: DataProto) -> torch.Tensor:
    """Returns the mask of policy tokens, bool [B, T]: `response_mask`, or without it all tokens."""
    if "response_mask" in batch_tensors(data):
        return batch_tensors(data)["response_mask"].bool()
    return response_attention(data)


def place_on_last_policy_token(data: DataProto, scores: Sequence[float]) -> torch.Tensor:
    """Returns rewards [B, T]: each row has its score on its last policy token, and 0 elsewhere."""
    rewards = torch.zeros(batch_tensors(data)["responses"].shape, dtype=torch.float32)
    for row, position in enumerate(last_true_index(policy_mask(data)).tolist()):
        if position >= 0:
            rewards[row, position] = scores[row]
    return rewards


def move_to_policy_tokens(data: DataProto, rewards: torch.Tensor) -> torch.Tensor:
    """Moves each reward [B, T] on an observation to the policy token before it, or else to the first one.

    A manager in verl's form puts the score on the last token of the response, which may be a tool's.
    """
    mask = policy_mask(data)
    positions = torch.arange(mask.shape[1]).expand_as(mask)
    first_positions = mask.int().argmax(-1, keepdim=True)
    targets = torch.where(mask, positions, first_positions).cummax(-1).values
    return torch.zeros_like(rewards).scatter_add_(1, targets, rewards)


def read_rows(
    data: DataProto,
    ids: list[list[int]],
    tokenizer: Tokenizer | None,
    source_key: str,
    *,
    score_observations: bool = False,
) -> list[ScorerInput]:
    """Returns one row per response; with `score_observations`, the text includes observations."""
    columns = data.non_tensor_batch
    if source_key not in columns:
        raise WrongSetting(
            f"the batch has no column {source_key!r} that selects the scorer; it has "
            f"{', '.join(sorted(columns)) or 'none'}. Set data.reward_fn_key to the right column."
        )
    attention, policy_tokens = response_attention(data), policy_mask(data)
    has_observation = (attention & ~policy_tokens).any(dim=1).tolist()
    assert tokenizer is not None, "a manager without a tokenizer cannot score a batch"
    rows = []
    for index, token_ids in enumerate(ids):
        reward_model = _dict_at(columns, "reward_model", index)
        transcript = tokenizer.decode(token_ids, skip_special_tokens=True)
        segments = [{"role": POLICY, "text": transcript}]
        if has_observation[index]:
            is_policy = policy_tokens[index][attention[index]].tolist()
            segments = _segments(token_ids, is_policy, tokenizer)
        extra = extra_info_of(columns, reward_model, index)
        rows.append(
            ScorerInput(
                data_source=str(columns[source_key][index]),
                solution_str=transcript if score_observations else policy_text(segments),
                ground_truth=reward_model.get("ground_truth"),
                extra_info=extra | {"transcript": transcript, "transcript_segments": segments},
            )
        )
    return rows


def _segments(ids: list[int], is_policy: list[bool], tokenizer: Tokenizer) -> list[dict[str, str]]:
    """Splits a response into segments by author (see `outcome.py`)."""
    segments, start = [], 0
    for is_policy_run, run in groupby(is_policy):
        end = start + len(list(run))
        text = tokenizer.decode(ids[start:end], skip_special_tokens=True)
        segments.append({"role": POLICY if is_policy_run else OBSERVATION, "text": text})
        start = end
    return segments


def extra_info_of(columns: Settings, reward_model: Settings, index: int) -> Fields:
    """Returns `extra_info` of a row, with fields of `reward_model` and rollout statistics."""
    extra = {k: v for k, v in reward_model.items() if k not in ("ground_truth", "style")}
    extra.update(_dict_at(columns, "extra_info", index))
    turns, calls, scores = (
        next((columns[name][index] for name in names if name in columns), None)
        for names in (_NUM_TURNS_COLUMNS, ("tool_call_counts",), _ROLLOUT_SCORE_COLUMNS)
    )
    extra["num_turns"] = extra.get("num_turns") if turns is None else turns
    extra["num_tool_calls"] = extra.get("num_tool_calls", 0) if calls is None else calls
    extra["rollout_reward_scores"] = {} if scores is None else scores
    return extra


def _dict_at(columns: Settings, name: str, index: int) -> Fields:
    value = columns[name][index] if name in columns else None
    return dict(value) if value is not None else {}
