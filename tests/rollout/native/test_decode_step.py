"""Rows of running sequences on the host and on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hone.rollout.native import kernels_reference
from hone.rollout.native.decode_step import (
    MAX_STOP_IDS,
    STATE_FIELDS,
    BatchState,
    DecodeStep,
    graph_sizes,
)

CPU = torch.device("cpu")


def filled() -> tuple[BatchState, BatchState]:
    host, device_state = BatchState.empty(4, 3, 0, CPU), BatchState.empty(4, 3, 5, CPU)
    host.fill(
        1,
        [(11, 12, 13, 14, 15, 0, 0), (21, 22, 23, 24, 25, 0, 1)],
        temperatures=[0.5, 0.0],
        stop_ids=[[7, 8], []],
        blocks=[[2, 3], [4]],
    )
    host.copy_to(device_state, 0, 4)
    return host, device_state


def test_a_filled_row_reaches_the_device_by_name() -> None:
    _, rows = filled()
    assert len(STATE_FIELDS) == 7
    assert rows.token.tolist() == [0, 11, 21, 0]
    assert rows.position.tolist() == [0, 12, 22, 0]
    assert rows.slot.tolist() == [0, 13, 23, 0]
    assert rows.seed.tolist() == [0, 14, 24, 0]
    assert rows.max_length.tolist() == [0, 15, 25, 0]
    assert rows.finished.tolist() == [1, 0, 0, 1]
    assert rows.num_sampled.tolist() == [0, 0, 1, 0]
    assert rows.stop_ids[1].tolist() == [7, 8, *[-1] * (MAX_STOP_IDS - 2)]
    assert rows.block_table[1:3].tolist() == [[2, 3, 0], [4, 0, 0]]


def test_a_temperature_of_zero_is_greedy_and_divides_by_one() -> None:
    _, rows = filled()
    assert rows.greedy.tolist() == [0, 0, 1, 0]
    assert rows.inverse_temperature.tolist() == [1.0, 2.0, 1.0, 1.0]


def test_more_stop_ids_than_a_row_holds_are_left_to_the_host() -> None:
    host, _ = filled()
    ids = list(range(100, 100 + MAX_STOP_IDS + 3))
    host.fill(0, [(0,) * 7], temperatures=[1.0], stop_ids=[ids], blocks=[[]])
    assert host.stop_ids[0].tolist() == ids[:MAX_STOP_IDS]


def test_cleared_rows_are_finished_and_write_to_the_null_block() -> None:
    host, device_state = filled()
    host.clear_from(2)
    host.copy_to(device_state, 2, 4)
    assert device_state.finished.tolist() == [1, 0, 1, 1]
    assert device_state.slot[2:].tolist() == [0, 0]
    assert not device_state.block_table[2:].any()
    assert device_state.token.tolist() == [0, 11, 0, 0]


def test_a_slice_of_rows_is_a_view() -> None:
    _, device_state = filled()
    rows = device_state.rows(1, 3)
    rows.token.fill_(99)
    rows.tokens_out[:, 0] = 5
    assert device_state.token.tolist() == [0, 99, 99, 0]
    assert device_state.tokens_out[:, 0].tolist() == [0, 5, 5, 0]


def test_filling_no_rows_changes_nothing() -> None:
    host, _ = filled()
    before = host.state.clone()
    host.fill(0, [], temperatures=[], stop_ids=[], blocks=[])
    assert torch.equal(host.state, before)


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
