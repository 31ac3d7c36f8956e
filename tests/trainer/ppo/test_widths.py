"""Batches of different widths side by side."""

from __future__ import annotations

import torch

from hone.agents.collate import collate_outputs
from hone.agents.contract import AgentLoopOutput
from hone.protocol import DataProto
from hone.trainer.ppo.widths import concat_padded


def batch_of(*rows: tuple[list[int], list[int]]) -> DataProto:
    outputs = [AgentLoopOutput(p, r, [1] * len(r), [-0.5] * len(r)) for p, r in rows]
    return collate_outputs(outputs, pad_token_id=0)


def test_prompts_grow_on_the_left_and_responses_on_the_right() -> None:
    narrow, wide = batch_of(([1], [2])), batch_of(([3, 4, 5], [6, 7]), ([8], [9]))
    joined = concat_padded([narrow, wide])
    whole = batch_of(([1], [2]), ([3, 4, 5], [6, 7]), ([8], [9]))
    for name in whole.batch.keys():  # noqa: SIM118
        if name != "position_ids":
            assert torch.equal(joined.batch[name], whole.batch[name]), name
    kept = whole.batch["attention_mask"].bool()
    assert torch.equal(joined.batch["position_ids"][kept], whole.batch["position_ids"][kept])


def test_only_columns_that_all_have_are_kept() -> None:
    first, second = batch_of(([1], [2])), batch_of(([1], [2]))
    first.batch["extra"] = torch.ones(1, 1)
    assert "extra" not in concat_padded([first, second]).batch.keys()  # noqa: SIM118
