"""A process records one step at a time, for all roles that it plays."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toy_workers import Toy

from hone.controller import ClassWithInitArgs, LocalWorkerGroup, Worker, profiling


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    profiling.discard()


def operations(file: Path) -> set[str]:
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if event["name"].startswith("aten::")}


def test_the_trace_of_a_step_holds_every_thread_and_is_named_after_step_roles_and_rank(
    tmp_path: Path,
) -> None:
    go = threading.Event()
    thread = threading.Thread(target=lambda: (go.wait(), torch.ones(2).sigmoid()))
    thread.start()  # before the recording, as the engine's decoding thread is
    profiling.start("torch", 3, "actor")
    profiling.start("torch", 3, "critic")
    torch.ones(2).tanh()
    go.set()
    thread.join()
    profiling.stop(str(tmp_path / "profile"), rank=1)
    torch.ones(2).exp()
    profiling.stop(str(tmp_path / "profile"), rank=1)
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "step_3-actor+critic-rank_1.json.gz"
    found = operations(file)
    assert {"aten::tanh", "aten::sigmoid"} <= found
    assert "aten::exp" not in found


def test_a_step_that_failed_leaves_no_file_and_the_next_one_is_recorded(tmp_path: Path) -> None:
    profiling.start("torch", 1, "actor")
    profiling.discard()
    profiling.start("torch", 2, "actor")
    profiling.stop(str(tmp_path), rank=0)
    assert [file.name for file in tmp_path.iterdir()] == ["step_2-actor-rank_0.json.gz"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_capture_of_nsys_ends_with_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    states: list[bool] = []
    monkeypatch.setattr(profiling, "_set_nsys_capture", lambda *, begin: states.append(begin))
    profiling.start("nsys", 1, "actor")
    profiling.discard() if fails else profiling.stop(str(tmp_path), rank=0)
    assert states == [True, False]


@pytest.mark.parametrize(("ranks", "files"), [(None, 1), ([0], 1), ([1, 2], 0), ([], 0)])
def test_only_the_ranks_of_a_role_are_recorded(
    tmp_path: Path, ranks: list[int] | None, files: int
) -> None:
    with LocalWorkerGroup(None, ClassWithInitArgs(Toy, 1.0)) as group:
        group.call(Worker.start_profile, "torch", 1, "toy", ranks)
        group.call(Worker.stop_profile, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == files


def test_nsys_writes_its_own_files(tmp_path: Path) -> None:
    profiling.start("nsys", 1, "actor")
    profiling.stop(str(tmp_path), rank=0)
    assert list(tmp_path.iterdir()) == []
