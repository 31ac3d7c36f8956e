"""Trajectories are collated into one padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from hone.agents.collate import (
    BadTrajectory,
    collate_outputs,
    input_ids,
    position_ids,
)
from hone.agents.contract import AgentLoopOutput
from hone.agents.joining import join_ranks, pad_and_concat
from hone.protocol import DataProto
from hone.protocol.rows import deeply_equal, object_array

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
    assert position_ids(batch).tolist() == [[0, 1, 2, 3, 4, 4], [0, 0, 0, 1, 2, 3]]
    assert input_ids(batch).tolist() == [[10, 11, 12, 20, 21, PAD], [PAD, PAD, 10, 20, 21, 22]]


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
    """Environment tokens may follow the last policy token."""
    pair = [
        trajectory(1, [1, 1, 0, 0], reward_score=0.5),
        trajectory(1, [1, 0, 1], reward_score=-2.0),
    ]
    columns = collate_outputs(pair, pad_token_id=PAD).batch
    assert columns["reward/agent"].tolist() == [[0.0, 0.5, 0.0, 0.0], [0.0, 0.0, -2.0, 0.0]]


def test_scores_for_some_trajectories_only_are_refused() -> None:
    pair = [trajectory(1, [1], reward_score=1.0), trajectory(1, [1])]
    with pytest.raises(BadTrajectory, match="only some trajectories have a reward_score"):
        collate_outputs(pair, pad_token_id=PAD)


def test_no_scores_give_no_column() -> None:
    assert not collate_outputs([trajectory(1, [1])], pad_token_id=PAD).has_column("reward/agent")


def test_extra_fields_become_columns_with_none_where_a_loop_gave_none() -> None:
    pair = [trajectory(1, [1], extra_fields={"tool": ["x", "y"]}), trajectory(1, [1])]
    columns = collate_outputs(pair, pad_token_id=PAD).non_tensor_batch
    assert columns["tool"].tolist() == [["x", "y"], None]


def test_log_probs_may_be_tensors_or_arrays() -> None:
    pair = [
        trajectory(1, [1, 1], response_logprobs=torch.tensor([-1.0, -2.0])),
        trajectory(1, [1], response_logprobs=np.array([-3.0])),
    ]
    columns = collate_outputs(pair, pad_token_id=PAD).batch
    assert columns["rollout_log_probs"].tolist() == [[-1.0, -2.0], [-3.0, 0.0]]


def on_two_ranks(rows: Sequence[AgentLoopOutput], split: int) -> DataProto:
    ranks = [collate_outputs(part, pad_token_id=PAD) for part in (rows[:split], rows[split:])]
    return join_ranks(None, ranks)


MIXED = [
    trajectory(1, [1], response_logprobs=[-1.0], extra_fields={"tool_outputs": []}),
    trajectory(1, [1], extra_fields={"found": [1, 2]}),
    trajectory(1, [1], response_logprobs=[-1.0]),
]


@pytest.mark.parametrize("split", [1, 2])
def test_two_ranks_make_the_columns_that_one_makes(split: int) -> None:
    """The columns do not depend on the ranks of the rows."""
    one, two = collate_outputs(MIXED, pad_token_id=PAD), on_two_ranks(MIXED, split)
    assert set(two.column_names()) == set(one.column_names())
    for name in one.column_names():
        assert deeply_equal(two.column(name), one.column(name)), name
    assert not two.has_column("rollout_log_probs")


def test_two_ranks_keep_log_probs_and_scores_that_all_have() -> None:
    rows = [trajectory(1, [1], response_logprobs=[-1.0], reward_score=s) for s in (0.5, 2.0)]
    joined = on_two_ranks(rows, 1).batch
    assert joined["rollout_log_probs"].tolist() == [[-1.0], [-1.0]]
    assert joined["reward/agent"].tolist() == [[0.5], [2.0]]


@pytest.mark.parametrize("split", [1, 2])
def test_mixed_scores_are_refused_in_the_same_words_on_one_rank_and_on_two(split: int) -> None:
    rows = [trajectory(1, [1], reward_score=s) for s in (1.0, None, None)]
    with pytest.raises(BadTrajectory) as one:
        collate_outputs(rows, pad_token_id=PAD)
    with pytest.raises(BadTrajectory) as two:
        on_two_ranks(rows, split)
    assert str(two.value) == str(one.value)


def test_what_a_loop_wrote_where_the_policy_did_not_counts_for_nothing() -> None:
    rows = [trajectory(1, [1, 0], response_logprobs=[-1.0, x]) for x in (None, float("nan"), -7.0)]
    columns = collate_outputs(rows, pad_token_id=PAD).batch
    assert columns["rollout_log_probs"].tolist() == [[-1.0, 0.0]] * 3


@pytest.mark.parametrize("absent", [None, float("nan")])
def test_a_missing_log_prob_of_the_policy_is_refused(absent: float | None) -> None:
    pair = [
        trajectory(1, [1], response_logprobs=[-1.0]),
        trajectory(1, [1, 0, 1], response_logprobs=[-1.0, -1.0, absent]),
    ]
    with pytest.raises(BadTrajectory, match=r"trajectory 1 has a NaN .* at token 2"):
        collate_outputs(pair, pad_token_id=PAD)


def test_values_of_another_length_than_the_response_are_refused_and_not_moved() -> None:
    pair = [trajectory(1, [1, 1, 1]), trajectory(1, [1])]
    pair[0].response_mask, pair[1].response_mask = [1], [1, 1, 1]
    with pytest.raises(BadTrajectory, match="row 0 has 1 values for 3 tokens"):
        collate_outputs(pair, pad_token_id=PAD)


def test_experts_stand_at_their_tokens_and_a_cut_response_loses_the_last() -> None:
    experts = torch.arange(8).view(4, 1, 2)
    whole = AgentLoopOutput([5, 6], [7, 8, 9], [1, 1, 1], routed_experts=experts)
    split = AgentLoopOutput([5], [7, 8], [1, 1], routed_experts=experts)
    none = AgentLoopOutput([5], [7], [1])
    column = collate_outputs([whole, split, none], pad_token_id=0).batch["routed_experts"]
    assert column[..., 0].squeeze(-1).tolist() == [
        [0, 2, 4, 6, -1],
        [-1, 0, 2, 4, -1],
        [-1, -1, -1, -1, -1],
    ]


def test_a_rank_without_recorded_experts_has_none_for_its_tokens() -> None:
    experts = torch.zeros(3, 1, 2)
    ranks = [
        collate_outputs([output], pad_token_id=0)
        for output in (
            AgentLoopOutput([5], [7, 8, 9], [1, 1, 1], routed_experts=experts),
            AgentLoopOutput([5, 6], [7], [1]),
        )
    ]
    column = join_ranks(None, ranks).batch["routed_experts"]
    assert column.shape == (2, 5, 1, 2)
    assert column[0, :, 0, 0].tolist() == [-1, 0, 0, 0, -1]
    assert (column[1] == -1).all()


def batch_of(*rows: tuple[list[int], list[int]]) -> DataProto:
    outputs = [AgentLoopOutput(p, r, [1] * len(r), [-0.5] * len(r)) for p, r in rows]
    return collate_outputs(outputs, pad_token_id=0)


def test_prompts_grow_on_the_left_and_responses_on_the_right() -> None:
    narrow, wide = batch_of(([1], [2])), batch_of(([3, 4, 5], [6, 7]), ([8], [9]))
    joined = pad_and_concat([narrow, wide])
    whole = batch_of(([1], [2]), ([3, 4, 5], [6, 7]), ([8], [9]))
    for name in whole.batch.keys():  # noqa: SIM118
        assert torch.equal(joined.batch[name], whole.batch[name]), name


def test_only_columns_that_all_have_are_kept() -> None:
    first, second = batch_of(([1], [2])), batch_of(([1], [2]))
    first.batch["extra"] = torch.ones(1, 1)
    assert "extra" not in pad_and_concat([first, second]).batch.keys()  # noqa: SIM118


def test_what_a_loop_says_in_one_batch_only_is_none_in_the_other() -> None:
    first, second = batch_of(([1], [2])), batch_of(([1], [2]))
    second.non_tensor_batch["found"] = object_array([[3, 4]])
    assert pad_and_concat([first, second]).non_tensor_batch["found"].tolist() == [None, [3, 4]]


def test_what_a_score_function_says_in_one_batch_only_is_left_out() -> None:
    first, second = batch_of(([1], [2])), batch_of(([1], [2]))
    for batch in (first, second):
        batch.non_tensor_batch["acc"] = object_array([1.0])
        batch.meta_info["reward_extra_names"] = ["acc"]
    second.non_tensor_batch["steps"] = object_array([2.0])
    second.meta_info["reward_extra_names"] = ["acc", "steps"]
    joined = pad_and_concat([first, second])
    assert joined.meta_info["reward_extra_names"] == ["acc"]
    assert "steps" not in joined.non_tensor_batch
