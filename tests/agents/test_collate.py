"""From trajectories to one padded batch."""

from __future__ import annotations

import pytest
import torch

from hone.agents.collate import BadTrajectory, collate_outputs
from hone.agents.contract import AgentLoopOutput

PAD = 99


def trajectory(prompt: int, mask: list[int], **more: object) -> AgentLoopOutput:
    """A prompt of `prompt` tokens and a response with this mask."""
    response = list(range(20, 20 + len(mask)))
    return AgentLoopOutput(list(range(10, 10 + prompt)), response, mask, **more)  # type: ignore[arg-type]


def test_prompts_are_padded_left_and_responses_right_to_the_longest() -> None:
    batch = collate_outputs([trajectory(3, [1, 1]), trajectory(1, [1, 0, 1])], pad_token_id=PAD)
    columns = batch.batch
    assert columns["prompts"].tolist() == [[10, 11, 12], [PAD, PAD, 10]]
    assert columns["responses"].tolist() == [[20, 21, PAD], [20, 21, 22]]
    assert columns["response_mask"].tolist() == [[1, 1, 0], [1, 0, 1]]
    assert columns["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]
    assert columns["position_ids"].tolist() == [[0, 1, 2, 3, 4, 4], [0, 0, 0, 1, 2, 3]]
    assert torch.equal(
        columns["input_ids"], torch.cat([columns["prompts"], columns["responses"]], 1)
    )


def test_environment_tokens_are_attended_to_but_not_the_policys() -> None:
    columns = collate_outputs([trajectory(1, [1, 0, 0, 1])], pad_token_id=PAD).batch
    assert columns["attention_mask"].tolist() == [[1, 1, 1, 1, 1]]
    assert columns["response_mask"].tolist() == [[1, 0, 0, 1]]


def test_rollout_log_probs_are_zero_where_the_policy_wrote_nothing() -> None:
    first = trajectory(1, [1, 0, 1], response_logprobs=[-1.0, -2.0, -3.0])
    second = trajectory(1, [1], response_logprobs=[-4.0])
    columns = collate_outputs([first, second], pad_token_id=PAD).batch
    assert columns["rollout_log_probs"].tolist() == [[-1.0, 0.0, -3.0], [-4.0, 0.0, 0.0]]


def test_log_probs_are_left_out_unless_every_trajectory_has_them() -> None:
    pair = [trajectory(1, [1], response_logprobs=[-1.0]), trajectory(1, [1])]
    assert not collate_outputs(pair, pad_token_id=PAD).has_column("rollout_log_probs")


def test_a_loops_own_score_stands_on_the_last_policy_token() -> None:
    """Environment tokens may follow it."""
    pair = [
        trajectory(1, [1, 1, 0, 0], reward_score=0.5),
        trajectory(1, [1, 0, 1], reward_score=-2.0),
    ]
    columns = collate_outputs(pair, pad_token_id=PAD).batch
    assert columns["rm_scores"].tolist() == [[0.0, 0.5, 0.0, 0.0], [0.0, 0.0, -2.0, 0.0]]


def test_scores_for_some_trajectories_only_are_refused() -> None:
    pair = [trajectory(1, [1], reward_score=1.0), trajectory(1, [1])]
    with pytest.raises(BadTrajectory, match="1 of 2 trajectories have a reward_score"):
        collate_outputs(pair, pad_token_id=PAD)


def test_no_scores_give_no_column() -> None:
    assert not collate_outputs([trajectory(1, [1])], pad_token_id=PAD).has_column("rm_scores")


def test_extra_fields_become_columns_with_none_where_a_loop_gave_none() -> None:
    pair = [trajectory(1, [1], extra_fields={"tool": ["x", "y"]}), trajectory(1, [1])]
    facts = collate_outputs(pair, pad_token_id=PAD).non_tensor_batch
    assert facts["tool"].tolist() == [["x", "y"], None]


def test_widths_can_be_given() -> None:
    columns = collate_outputs(
        [trajectory(2, [1])], pad_token_id=PAD, prompt_width=4, response_width=3
    ).batch
    assert columns["prompts"].tolist() == [[PAD, PAD, 10, 11]]
    assert columns["responses"].tolist() == [[20, PAD, PAD]]
