"""Batches of different widths are concatenated."""

from __future__ import annotations

import torch

from hone.agents.collate import collate_outputs
from hone.agents.contract import AgentLoopOutput
from hone.agents.widths import pad_and_concat
from hone.protocol import DataProto
from hone.protocol.rows import object_array


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
