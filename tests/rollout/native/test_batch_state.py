"""Rows of running sequences on the host and on the device."""

from __future__ import annotations

import numpy as np
import torch

from hone.rollout.native.batch_state import MAX_STOP_IDS, STATE_FIELDS, BatchState, HostBatch

CPU = torch.device("cpu")


def filled() -> tuple[HostBatch, BatchState]:
    host, device_state = HostBatch(4, 3), BatchState.empty(4, 3, 5, CPU)
    host.fill(
        1,
        [(11, 12, 13, 14, 15, 0, 0), (21, 22, 23, 24, 25, 0, 1)],
        temperatures=[0.5, 0.0],
        stop_ids=[[7, 8], []],
        blocks=[[2, 3], [4]],
    )
    host.send(device_state, 0, 4)
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
    host.send(device_state, 2, 4)
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
    before = host.state.copy()
    host.fill(0, [], temperatures=[], stop_ids=[], blocks=[])
    assert np.array_equal(host.state, before)
