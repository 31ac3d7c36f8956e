"""Functions over ranks that code written for verl imports, in a group of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from hone.verl import distributed as F


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    F.destroy_global_process_group()
    assert not dist.is_initialized()
    F.destroy_global_process_group()


@pytest.mark.usefixtures("group")
def test_statistics_over_ranks() -> None:
    x = torch.tensor([1.0, 2.0, 6.0])
    actual = F.distributed_mean_max_min_std(x)
    assert [float(v) for v in actual if v is not None] == pytest.approx([3.0, 6.0, 1.0, 7**0.5])
    assert F.distributed_mean_max_min_std(x, False, False, False)[1:] == (None, None, None)
    assert F.distributed_masked_mean(x, torch.tensor([1, 0, 1])) == 3.5


@pytest.mark.usefixtures("group")
def test_tensors_by_name_are_broadcast_and_gathered() -> None:
    rows = {"b": torch.tensor([[1.0]]), "a": torch.tensor([[2.0]])}
    F.broadcast_dict_tensor(rows, 0, None)
    assert F.allgather_dict_tensors(rows, 1, None) == rows
    joined = F.allgather_dict_tensors(TensorDict(rows, batch_size=[1]), 1, None)
    assert isinstance(joined, TensorDict)
    assert joined["a"].tolist() == [[2.0]]
    assert F.reduce_timing({"gen": 2.0, "step": 3.0}) == {"gen": 2.0, "step": 3.0}


def test_a_batch_size_that_does_not_divide_the_rows_is_refused() -> None:
    rows = TensorDict({"a": torch.arange(6)}, batch_size=[6])
    assert [part["a"].tolist() for part in F.split_dict_tensor_into_batches(rows, 3)] == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    with pytest.raises(AssertionError, match="6 rows do not divide into batches of 4"):
        F.split_dict_tensor_into_batches(rows, 4)


def test_a_process_of_torchrun_joins_and_leaves_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (world | {"MASTER_PORT": "0"}).items():
        monkeypatch.setenv(name, value)
    try:
        assert F.initialize_global_process_group(timeout_second=30) == (0, 0, 1)
    finally:
        F.destroy_global_process_group()


def test_emptying_the_cache_collects_cycles() -> None:
    class Cycle:
        freed = False

        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            Cycle.freed = True

    Cycle()
    F.aggressive_empty_cache()
    assert Cycle.freed
