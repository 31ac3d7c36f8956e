"""Decode steps without graphs; tests/gpu compares graphs with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hone.rollout.native import kernels_reference
from hone.rollout.native.batch_state import BatchState
from hone.rollout.native.decode_graph import DecodeStep, graph_sizes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("most", "configured", "sizes"),
    [
        (3, None, [1, 2, 3]),
        (16, None, [1, 2, 4, 8, 16]),
        (400, None, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 400]),
        (20, [4, 8, 64], [4, 8, 20]),
        (20, [], [1, 2, 4, 8, 16, 20]),
    ],
)
def test_captured_sizes_end_with_the_largest_batch(
    most: int, configured: list[int] | None, sizes: list[int]
) -> None:
    assert graph_sizes(most, configured) == sizes


class Steps:
    """A forward that records its batch sizes and gives token t the next token t + 1."""

    def __init__(self) -> None:
        self.rows = BatchState.empty(8, 4, 4, CPU)
        self.rows.greedy.fill_(1)
        self.rows.max_length.fill_(100)
        self.rows.finished[:3] = 0
        self.rows.token.copy_(torch.arange(8))
        self.sizes: list[int] = []
        self.step = DecodeStep(
            self.forward, self.logits, lambda rows: None, self.rows, kernels_reference,
            block_size=4, batch_sizes=[2, 4, 8], use_graphs=False, may_synchronize=True,
        )  # type: ignore[arg-type, return-value]  # fmt: skip

    def forward(self, tokens: Tensor, positions: Tensor, layout: Any) -> Tensor:
        self.sizes.append(len(tokens))
        return tokens

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden + 1, 12).float()


def test_a_batch_is_padded_to_the_next_size_and_finished_rows_sample_nothing() -> None:
    steps = Steps()
    logits = steps.step.run(3, sample=True)
    assert steps.sizes == [4]
    assert logits.shape == (4, 12)
    assert steps.rows.token[:4].tolist() == [1, 2, 3, 3]
    assert steps.rows.num_sampled[:4].tolist() == [1, 1, 1, 0]
    steps.step.run(3, sample=True)
    assert steps.rows.tokens_out[:3, :2].tolist() == [[1, 2], [2, 3], [3, 4]]


def test_without_sampling_the_rows_stay_and_the_caller_has_the_logits() -> None:
    steps = Steps()
    before = steps.rows.state.clone()
    logits = steps.step.run(2, sample=False)
    assert steps.sizes == [2]
    assert logits.argmax(-1).tolist() == [1, 2]
    assert torch.equal(steps.rows.state, before)
    steps.step.discard_graphs()
    assert torch.equal(steps.step.run(2, sample=False), logits)
