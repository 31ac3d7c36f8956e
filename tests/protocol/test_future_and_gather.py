"""Futures of batches are resolved late and in order; ranks gather the rows of all ranks."""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hone.protocol import DataProto, DataProtoFuture, all_gather_data_proto
from hone.verl.tensordict_utils import get_tensordict


def rows(*numbers: int) -> DataProto:
    return DataProto.from_dict({"n": torch.tensor(numbers)}, {"u": [str(n) for n in numbers]})


class Late:
    def __init__(self, value: Any) -> None:
        self.value, self.asked = value, 0

    def get(self) -> Any:
        self.asked += 1
        return self.value


def test_nothing_is_fetched_before_get() -> None:
    handles = [Late(rows(1, 2)), Late(rows(3, 4))]
    future = DataProtoFuture(DataProto.concat, handles)
    pieces = future.chunk(2)
    joined = DataProtoFuture.concat([pieces[1], pieces[0]])
    halves = joined.chunk(2)
    assert [handle.asked for handle in handles] == [0, 0]
    assert future.get().batch["n"].tolist() == [1, 2, 3, 4]
    assert joined.get().batch["n"].tolist() == [3, 4, 1, 2]
    assert halves[1].get().batch["n"].tolist() == [1, 2]
    assert pieces[1].chunk(2)[0].get().batch["n"].tolist() == [3]


def test_handles_may_be_standard_futures_or_plain_batches() -> None:
    done: Future[DataProto] = Future()
    done.set_result(rows(1))
    assert DataProtoFuture.concat([done, rows(2)]).get().batch["n"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="empty"):
        DataProtoFuture.concat([])


def test_a_future_of_a_tensordict_is_split_and_joined() -> None:
    batch = get_tensordict({"n": torch.arange(3), "u": ["a", "b", "c"]}, {"step": 4})
    future = DataProtoFuture.concat([batch])
    parts = [part.get() for part in future.split_padded(2)]
    assert [part["n"].tolist() for part in parts] == [[0, 1], [2, 2]]
    assert [part["padded_row"].tolist() for part in parts] == [[False, False], [False, True]]
    assert [part["step"] for part in parts] == [4, 4]
    assert len(DataProtoFuture.concat([future, batch]).get()) == 6


def test_a_future_of_a_part_can_be_pickled() -> None:
    part = DataProtoFuture(DataProto.concat, [rows(1, 2, 3)]).split_padded(2)[1]
    again = pickle.loads(pickle.dumps(part)).get()
    assert again.batch["n"].tolist() == [3, 3]
    assert again.batch["padded_row"].tolist() == [False, True]


def _gather(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    data = rows(1) if rank == 0 else rows(2, 3)
    data.meta_info = {"metrics": {"rank": rank}, "t": 1}
    all_gather_data_proto(data)
    data.save_to_disk(f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_gather_rows_of_different_number(tmp_path: Path) -> None:
    mp.spawn(_gather, args=(str(tmp_path),), nprocs=2)
    for rank in range(2):
        data = DataProto.load_from_disk(tmp_path / str(rank))
        assert data.batch is not None
        assert data.batch["n"].tolist() == [1, 2, 3]
        assert list(data.non_tensor_batch["u"]) == ["1", "2", "3"]
        assert data.meta_info == {"metrics": {"rank": [0, 1]}, "t": 1}
